"""Optimizer state that is elsewhere between updates."""
