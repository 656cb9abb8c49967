"""Where a program runs: mesh axes, clusters of devices and links, and the cores of a host."""
