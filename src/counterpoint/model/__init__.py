"""Models without tensors: layers, blocks, parameters, the edges between blocks, and profiles of their run time."""
