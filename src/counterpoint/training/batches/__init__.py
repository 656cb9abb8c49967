"""Batches of a fit: global batches, batches of each rank, and batches in flight of asynchronous pipelines."""
