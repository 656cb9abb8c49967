"""Plans found by chance: one thing is changed at a time, and only what it touches is built again."""
