"""Checkpoints of a fit: saved by all ranks together, or by each pipeline stage independently."""
