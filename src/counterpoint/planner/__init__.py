"""Rank plans by simulating them, and choose one with reasons."""
