"""``python -m counterpoint.launchers script.py arguments``: the command of a rank that runs a script."""

import sys

from counterpoint.launchers.worker import worker_main

if __name__ == "__main__":
    sys.exit(worker_main(sys.argv[1:]))
