"""Programs and traces made visible: text grid, SVG, HTML report, Perfetto."""
