"""Batches of a fit: global batches, batches of each rank, and batches in flight in asynchronous pipelines."""
