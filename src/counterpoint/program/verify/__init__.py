"""Verify that a program obeys the eight rules before it may run."""
