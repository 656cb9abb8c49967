"""State of a process, as the kernel tells it in ``/proc/PID/stat``."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")

#: What has stopped a process, by the letter of its state.
STOPPED_BY = {"T": "a signal", "t": "a debugger"}


class ProcessStat(NamedTuple):
    """What the kernel tells of a process.

    Args:
        letter: of its state.
        parent: process id of its parent.
        start_ticks: when it has started, in ticks since the start of the kernel; another process may get its id later.
    """

    letter: str
    parent: int
    start_ticks: int


def read_process_stat(folder: Path) -> ProcessStat | None:
    """Return the state of a process; None if there is no such process.

    Args:
        folder: ``/proc/PID``, or a copy of it.
    """
    try:
        fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return ProcessStat(fields[0], int(fields[1]), int(fields[19]))
    except (OSError, ValueError, IndexError):
        return None
