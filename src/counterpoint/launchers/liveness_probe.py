"""``python -m counterpoint.launchers.liveness_probe N``: whether the N ranks of this host run; a Kubernetes probe."""

from __future__ import annotations

import sys
from pathlib import Path

from counterpoint.launchers.environment import RANK_VARIABLES
from counterpoint.world.process_stat import STOPPED_BY, read_process_stat

LOCAL_RANK = RANK_VARIABLES[2]
NOT_RUNNING_STATES = {"Z", "X", "x", *STOPPED_BY}  # ended, or stopped


def live_ranks(proc: Path) -> set[int]:
    """Return the local ranks with a process that has neither ended nor is stopped; their child processes are ignored.

    Args:
        proc: ``/proc``, or a folder with copies.
    """
    processes: dict[int, tuple[int, int, str]] = {}
    for folder in proc.iterdir():
        if folder.name.isdigit() and (process := _read_process(folder)) is not None:
            processes[int(folder.name)] = process
    return {
        rank for rank, parent, state in processes.values()
        if state not in NOT_RUNNING_STATES and (parent not in processes or processes[parent][0] != rank)
    }  # fmt: skip


def _read_process(folder: Path) -> tuple[int, int, str] | None:
    """Return a process's local rank, parent and state; None if it is not a rank, or gone."""
    state = read_process_stat(folder)
    try:
        environ = (folder / "environ").read_bytes().split(b"\0")
    except OSError:
        return None
    prefix = f"{LOCAL_RANK}=".encode()
    rank = next((entry.removeprefix(prefix) for entry in environ if entry.startswith(prefix)), b"")
    return (int(rank), state.parent, state.letter) if state is not None and rank.isdigit() else None


def main(arguments: list[str]) -> int:
    """Return 0 if all ranks run; else 1, with the running ones on standard error."""
    num_ranks, ranks = int(arguments[0]), live_ranks(Path("/proc"))
    if ranks >= set(range(num_ranks)):
        return 0
    sys.stderr.write(f"of {num_ranks} ranks of this host these live: {', '.join(map(str, sorted(ranks))) or 'none'}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
