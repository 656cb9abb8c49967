"""Training: the trainer, ``parallelize``, elastic workers, callbacks, checkpoints and batches."""
