"""Hosts as network namespaces on one Linux machine, for benchmarks and tests that need a network.

``from benchmarks.lab import Lab`` works if the root of the checkout is on the path: in tests, and in a
``benchmarks/*/run.py`` started from the root. README.md describes its features and limits.
"""

from benchmarks.lab.commands import FinishedCommand, RunningCommand, wait_all
from benchmarks.lab.host import LabError
from benchmarks.lab.lab import Lab
from benchmarks.lab.network import Traffic

__all__ = ["FinishedCommand", "Lab", "LabError", "RunningCommand", "Traffic", "wait_all"]
