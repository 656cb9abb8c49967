"""Messages of a schedule on a connection of their own: straight bytes, for ranks that have agreed on what they do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch import Tensor

from counterpoint.errors import ProgramError
from counterpoint.fabric.c10d import GlooProcessGroup, GlooWork
from counterpoint.fabric.gloo.ops import as_bytes

DATA_TAG = 2  # gloo's tag
MAX_PENDING = 64


class GlooChannel:
    """What :func:`~counterpoint.fabric.collectives.execute.execute` sends and receives by, without frames.

    All members have compared what they are about to do, as for gloo's own collectives, whose bytes travel alike.

    Cost:
        a tensor is copied once where it is sent.

    Args:
        rank: the own rank.
        group: the members, in the order of the connection.
        gloo: the connection; nobody else sends on it.
        deadline_s: the longest that any wait may last.
    """

    def __init__(self, rank: int, group: Sequence[int], gloo: GlooProcessGroup, timeout_s: float) -> None:
        self.rank = rank
        self._places = {member: place for place, member in enumerate(group)}
        self._gloo = gloo
        self._limit = timedelta(seconds=timeout_s)
        self._pending: deque[tuple[Tensor, GlooWork]] = deque()

    def send(self, peer: int, label: str, tensors: Sequence[Tensor]) -> None:
        """Copies of the tensors are on their way; a RuntimeError where the connection is lost."""
        for tensor in tensors:
            piece = tensor.detach().clone()
            self._pending.append((piece, self._gloo.send([as_bytes(piece)], self._places[peer], DATA_TAG)))
        while len(self._pending) > MAX_PENDING:
            self._pending.popleft()[1].wait(self._limit)

    def recv(self, peer: int, label: str) -> tuple[Tensor, ...]:
        """Nothing can be received that was not asked for: a strand does not say how long a message is."""
        raise ProgramError(f"{label} of rank {peer} on a strand has to be asked for, with what it looks like: use ask")

    def irecv(self, peer: int, label: str, like: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        """Make room for a peer's next tensor; waiting is a RuntimeError where it comes late or is longer."""
        tensor = torch.empty_like(like)
        work = self._gloo.recv([as_bytes(tensor)], self._places[peer], DATA_TAG)

        def wait() -> tuple[Tensor, ...]:
            work.wait(self._limit)
            return (tensor,)

        return wait

    def flush(self) -> None:
        """All that was sent has left this rank."""
        while self._pending:
            self._pending.popleft()[1].wait(self._limit)

    def abort(self, reason: str) -> None:
        """What is under way is forgotten; whoever executes a schedule on a strand tells the others."""
        self._pending.clear()
