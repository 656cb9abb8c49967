"""``python -m counterpoint.launchers.liveness_probe N``: whether the N ranks of this host live; what a kubelet asks of a pod."""

from __future__ import annotations

import sys
from pathlib import Path

from counterpoint.launchers.environment import RANK_VARIABLES

LOCAL_RANK = RANK_VARIABLES[2]
NOT_RUNNING_STATES = {"Z", "T", "t", "X", "x"}  # ended, or stopped by a signal or a debugger


def live_ranks(proc: Path) -> set[int]:
    """Return the local ranks whose process neither has ended nor is stopped; processes that a rank started count not.

    Args:
        proc: ``/proc``, or a folder with copies.
    """
    found: dict[int, tuple[int, int, str]] = {}
    for folder in proc.iterdir():
        if folder.name.isdigit() and (told := _read_process(folder)) is not None:
            found[int(folder.name)] = told
    return {
        rank for rank, parent, state in found.values()
        if state not in NOT_RUNNING_STATES and (parent not in found or found[parent][0] != rank)
    }  # fmt: skip


def _read_process(folder: Path) -> tuple[int, int, str] | None:
    """Return a process's local rank, its parent and its state; None where it has no rank, or is gone."""
    try:
        environ = (folder / "environ").read_bytes().split(b"\0")
        state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return None
    prefix = f"{LOCAL_RANK}=".encode()
    rank = next((entry.removeprefix(prefix) for entry in environ if entry.startswith(prefix)), b"")
    return (int(rank), int(parent), state) if rank.isdigit() else None


def main(arguments: list[str]) -> int:
    """Return 0 where so many ranks live; else 1, and standard error says which do."""
    wanted, ranks = int(arguments[0]), live_ranks(Path("/proc"))
    if ranks >= set(range(wanted)):
        return 0
    sys.stderr.write(f"of {wanted} ranks of this host these live: {', '.join(map(str, sorted(ranks))) or 'none'}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
