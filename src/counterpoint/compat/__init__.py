"""Compatibility APIs: programs written for other systems run on Counterpoint's communication layer."""
