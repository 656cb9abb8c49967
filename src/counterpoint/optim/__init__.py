"""Optimizers and learning-rate schedules for large batches; plain torch, independent of the rest of the package."""
