"""Hosts as network namespaces on one Linux machine, for benchmarks and tests that need a network.

``from benchmarks.lab import Lab`` works wherever the root of the checkout is on the path: in tests, and in a
``benchmarks/*/run.py`` that is started from the root. README.md says what it does and what it cannot.
"""

from benchmarks.lab.commands import FinishedCommand, RunningCommand, wait_all
from benchmarks.lab.host import LabError
from benchmarks.lab.lab import Lab
from benchmarks.lab.network import Traffic

__all__ = ["FinishedCommand", "Lab", "LabError", "RunningCommand", "Traffic", "wait_all"]
