"""Where a program runs: axes, ranks, devices and links."""
