"""Parameters of one rank: flat buffers, gradients, sharing between replicas of a host, and optimizer updates."""
