"""Functions of torch replaced while segments run, so that a step reads and writes memory fewer times."""
