"""Callbacks of a fit: their events, the progress display, the run folder, and what reports the steps to them."""
