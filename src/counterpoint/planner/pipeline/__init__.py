"""Find pipelines with replicated stages: layer graphs, partitions, and a search over stage layouts."""
