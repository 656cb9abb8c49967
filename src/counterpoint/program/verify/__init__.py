"""Verification of programs against the eight rules, by symbolic execution."""
