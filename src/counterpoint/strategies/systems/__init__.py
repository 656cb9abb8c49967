"""The systems that people know by name, each a function from its own options to the strategies it amounts to."""
