"""One rank in the memory of its host: its place there, its messages, and how its waits end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Final

from torch import Tensor

from counterpoint.errors import PeerError
from counterpoint.fabric.fingerprint import check_peer, unexpected
from counterpoint.fabric.joined import JoinedFabric
from counterpoint.fabric.shm.mail import ShmMail
from counterpoint.fabric.shm.memory import Site, int_array
from counterpoint.fabric.shm.native import SLICE_NS, Status, native
from counterpoint.fabric.shm.news import News
from counterpoint.fabric.shm.recipes import Recipe
from counterpoint.fabric.shm.yielding import Yielding
from counterpoint.fabric.stamps import Stamps

SPINS, FEW_SPINS = 16000, 200  # where every rank has a core, and where ranks take turns
LOOK_S: Final = 0.1  # so often a wait looks whether a rank of another host has stopped


class ShmRank(JoinedFabric):
    """What a rank has in shared memory but for tensors and collectives, which :class:`~.transport.ShmFabric` adds.

    Args:
        site: where the ranks of this host meet.
        job: the job's number.
        generation: of its ranks.
    """

    def __init__(self, site: Site, job: int, generation: int) -> None:
        super().__init__(site.rank, site.num_ranks, site.deadline_s)
        library = native().library
        assert library is not None, "whoever chose this transport has looked"
        self._library = library
        self.here = site.here
        self._processes = site.open_processes()
        self._memory = site.open_world(library, self._processes)
        fds = int_array(tuple(self._processes.fds[rank] for rank in self.here))
        place, count = self.here.index(self.rank), len(self.here)
        cores = len(os.sched_getaffinity(0))
        spins = SPINS if cores >= count else FEW_SPINS
        self._yielding = Yielding(count, cores)
        self._world: int = library.cp_open_world(self._memory.address, place, count, os.getpid(), fds, spins, SLICE_NS)
        self._news = News(library, self._world, self.rank, self.here)
        self._mail = ShmMail(library, self._world, self.here, Stamps(self.rank, job, generation))

    @property
    def hosts(self) -> Sequence[int]:
        """Those here are on this host, whose number is its first rank; others are elsewhere."""
        return [self.here[0] if rank in self.here else rank for rank in range(self.num_ranks)]

    def send(self, peer: int, label: str, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors into the pipe to the peer."""
        check_peer(peer, self.rank, self.num_ranks, label)
        with self.waiting(f"room to send {label}", (peer,)):
            self._mail.send(peer, label, tensors, self._pump)

    def recv(self, peer: int, label: str) -> tuple[Tensor, ...]:
        """Wait for the peer's next message and verify it."""
        check_peer(peer, self.rank, self.num_ranks, label)
        with self.waiting(label, (peer,)):
            frame = self._mail.recv(peer, self._pump)
            if frame.label != label:
                raise PeerError(unexpected(self.rank, label, peer, frame.label))
        return frame.tensors

    def recv_any(self, peers: Sequence[int]) -> tuple[int, str, tuple[Tensor, ...]]:
        """Wait for a message of any of the peers."""
        for peer in peers:
            check_peer(peer, self.rank, self.num_ranks, "any message")
        with self.waiting("any message", peers):
            sender, frame = self._mail.recv_any(peers, self._pump)
        return sender, frame.label, frame.tensors

    def await_any(self, peers: Sequence[int], seconds: float) -> int | None:
        """Return which peer's message can be received without waiting for it; None where none can within so long."""
        with self.waiting("any message", peers):
            found = self._mail.await_any(peers, int(seconds * 1e9))
            if found < 0 and found != Status.NOT_YET:
                raise RuntimeError(Status(found).name)
        return found if found >= 0 else None

    def take_in(self) -> None:
        """What others have sent to this rank is out of the pipes, so that they need not wait for it."""
        if self._world:
            self._mail.take_in()

    def stop(self, reason: str) -> None:
        """Write the reason where all see it, and wake them."""
        if self._world:
            self.fail(reason)

    def _leave(self) -> None:
        """The others see that this rank takes part in nothing more; its memory here is gone."""
        self._yielding.end()
        self._library.cp_close_world(self._world)
        self._memory.close()
        self._world = 0
        self._processes.close()

    def _pump(self, call: Callable[[], int], recipe: Recipe | None = None) -> int:
        """Return what a call of the library returns when it is done; it is called again and again until then.

        Between two calls, what others have sent is taken in.

        Raises:
            PeerError: the members of the recipe's group disagree.
            RuntimeError: somebody has stopped, or is lost.
            TimeoutError: the deadline has passed.
        """
        end, look = time.monotonic() + self.deadline_s, time.monotonic() + LOOK_S
        while True:
            status = call()
            if status >= 0:
                return status
            if status == Status.DISAGREE and recipe is not None:
                raise PeerError(self._news.disagreement(recipe))
            if status != Status.NOT_YET:
                raise RuntimeError(Status(status).name)
            self._mail.take_in()  # who sends to this rank need not wait for what it waits for
            now = time.monotonic()
            if now > end:
                raise TimeoutError
            if now > look and self.companions:
                if any(way.stopped() for way in self.companions):
                    raise RuntimeError("a rank of another host has stopped")
                look = now + LOOK_S

    def stopped(self) -> str | None:
        """Read what a rank has written."""
        return self._news.stopped() if self._world else None

    def ended(self) -> str | None:
        """Say which rank has ended, or will take part in nothing more, where a wait has found one."""
        return self._news.lost() if self._world else None

    def cause_of(self, error: Exception) -> str:
        """Memory cannot be opened."""
        return f"shared memory cannot be used ({error}); look at the output of the rank that ended first"

    def tell_others(self, reason: str) -> None:
        """Write the reason where all see it."""
        if self._world:
            self._news.post(reason)
