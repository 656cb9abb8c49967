"""Search for plans by random walks that change one thing at a time."""
