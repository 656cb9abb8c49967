"""``python -m counterpoint.launchers script.py arguments``: the command line of a rank that runs a script."""

import sys

from counterpoint.launchers.rank_main import run_script

if __name__ == "__main__":
    sys.exit(run_script(sys.argv[1:]))
