"""What is trained, without tensors: blocks, the parameters they use, and where they may be cut."""
