"""Every way to train a PyTorch model in parallel, as one composable plan."""
