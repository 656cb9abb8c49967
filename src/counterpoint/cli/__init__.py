"""The command line: ``counterpoint COMMAND``."""
