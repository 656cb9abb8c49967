"""Storage of keys on a shard: values, optimizer state, and the in-place updates of both."""
