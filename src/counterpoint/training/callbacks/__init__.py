"""Callbacks of a fit: their events, the progress display and the run folder."""
