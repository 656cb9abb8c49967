"""Checks of a model and its loss before the first step: what a divided batch or a split model would change."""
