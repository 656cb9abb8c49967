"""Ways to spread a program over ranks: one file per way, each a pure rewrite."""
