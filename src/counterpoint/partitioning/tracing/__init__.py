"""Partition a model along the traced graph of its forward: trace, split, and build functions of the parts."""
