"""Losses of a step: their reduction over microbatches, checks, parameters, state and scale."""
