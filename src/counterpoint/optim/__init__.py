"""Optimizers and learning rate schedules for large batches: plain torch, of use without the rest of this package."""
