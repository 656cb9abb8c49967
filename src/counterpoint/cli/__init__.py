"""The ``counterpoint`` command: one file per command, each imported only when it is asked for."""
