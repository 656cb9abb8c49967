"""Liveness of the ranks of this host, from pidfds: the kernel reports an exit however a process ends."""

from __future__ import annotations

import json
import os
import re
import select
from collections.abc import Iterable
from dataclasses import dataclass

from counterpoint.errors import PeerError
from counterpoint.fabric.c10d import Store
from counterpoint.world.process_stat import PROC, STOPPED_BY, read_process_stat


@dataclass(frozen=True, slots=True)
class PeerProcesses:
    """Pidfds of the ranks of this host; a pidfd becomes readable when its process exits.

    Args:
        fds: by rank; -1 for the own rank and for ranks of other hosts.
    """

    fds: list[int]

    def exited_rank(self) -> int | None:
        """Return a rank whose process has exited; None if all known ones run."""
        poll = select.poll()
        for fd in self.fds:
            if fd >= 0:
                poll.register(fd, select.POLLIN)
        return next((self.fds.index(fd) for fd, _ in poll.poll(0)), None)

    def describe_stopped(self) -> str:
        """Return the error text for the first rank that a signal or a debugger has stopped; empty if all run."""
        for rank, fd in enumerate(self.fds):
            pid = _pid_of(fd) if fd >= 0 else None
            state = None if pid is None else read_process_stat(PROC / str(pid))
            if state is not None and state.letter in STOPPED_BY:
                return (
                    f"rank {rank} (pid {pid}) has been stopped by {STOPPED_BY[state.letter]}: find what stops it; "
                    f"`kill -CONT {pid}` lets it go on"
                )
        return ""

    def close(self) -> None:
        """Close the pidfds. Idempotent."""
        for rank, fd in enumerate(self.fds):
            if fd >= 0:
                os.close(fd)
                self.fds[rank] = -1


def _pid_of(pidfd: int) -> int | None:
    """Return the process id of a pidfd; None if its process has ended."""
    pid = re.search(r"^Pid:\s*(\d+)$", (PROC / "self" / "fdinfo" / str(pidfd)).read_text(), re.MULTILINE)
    return None if pid is None else int(pid[1])


def open_peer_processes(store: Store, ranks: Iterable[int], rank: int, num_ranks: int) -> PeerProcesses:
    """Return the processes of these ranks, which are on this host and have announced themselves in the store.

    Raises:
        PeerError: one has exited already.
    """
    processes = PeerProcesses([-1] * num_ranks)
    for other in ranks:
        try:
            if other != rank:
                processes.fds[other] = os.pidfd_open(int(json.loads(store.get(f"here/{other}"))["pid"]))
        except OSError as error:
            processes.close()
            raise PeerError(describe_early_exit(other)) from error
    return processes


def local_ranks(store: Store, rank: int, num_ranks: int) -> list[int]:
    """Return the ranks of this host, the own one included."""
    hosts = [json.loads(store.get(f"here/{other}"))["place"][0] for other in range(num_ranks)]
    return [other for other, host in enumerate(hosts) if host == hosts[rank]]


def describe_exit(rank: int) -> str:
    """Return the error text for a rank that has exited."""
    return f"rank {rank} has ended; look at the output of rank {rank}"


def describe_early_exit(rank: int) -> str:
    """Return the error text for a rank that has exited before the connections were complete."""
    return f"rank {rank} has ended before all ranks were connected; look at the output of rank {rank}"
