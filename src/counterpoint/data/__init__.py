"""Samplers, dataset readers and prefetching workers; and three datasets that need no download."""
