"""Known systems (DDP, Horovod, PipeDream, ...): each a function from its own options to equivalent strategies."""
