"""Store the values and optimizer state of keys on one shard, and update them."""
