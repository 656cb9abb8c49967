"""Deterministic simulation of a parameter-server job under faults, and checks of what must hold afterwards."""
