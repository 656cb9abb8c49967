"""State of a process, as the kernel tells it in ``/proc/PID/stat``."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")

#: What has stopped a process, by the letter of its state.
STOPPED_BY = {"T": "a signal", "t": "a debugger"}


class ProcessStat(NamedTuple):
    """The letter of a process's state, and the process id of its parent."""

    letter: str
    parent: int


def read_process_stat(folder: Path) -> ProcessStat | None:
    """Return the state of a process; None if there is no such process.

    Args:
        folder: ``/proc/PID``, or a copy of it.
    """
    try:
        letter, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return None
    return ProcessStat(letter, int(parent))
