"""Callbacks of a fit: the events, the progress display and the run folder."""
