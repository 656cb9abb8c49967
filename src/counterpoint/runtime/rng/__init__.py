"""Random numbers keyed by sample, and the places where a model draws them."""
