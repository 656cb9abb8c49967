"""Which samples, in which order, as which tensors; and three datasets that need no download."""
