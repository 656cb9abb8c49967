"""Many plans, scored by the simulator, the best first and every one with its reasons."""
