"""Pipelines with replicated stages: layer graphs, the dynamic program that partitions them, and a search over stage layouts."""
