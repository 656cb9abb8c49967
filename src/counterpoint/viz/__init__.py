"""Draw programs and traces: text timelines, SVG, HTML reports, Perfetto."""
