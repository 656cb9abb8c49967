"""Rows of plans, each made and looked at once for all plans that have it."""
