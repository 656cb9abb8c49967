"""Messages of a schedule on a connection of their own: straight bytes, for ranks that have agreed on what they do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch import Tensor

from counterpoint.errors import ProgramError
from counterpoint.fabric.gloo import Gloo, GlooWork
from counterpoint.fabric.wire import raw

CONTENT = 2  # gloo's tag
MOST_FLYING = 64


class Strand:
    """What :func:`~counterpoint.fabric.algorithms.execute.execute` sends and receives by, without frames.

    All members have compared what they are about to do, as for gloo's own collectives, whose bytes travel alike.

    Cost:
        a tensor is copied once where it is sent.

    Args:
        rank: the own rank.
        group: the members, in the order of the connection.
        gloo: the connection; nobody else sends on it.
        deadline_s: the longest that any wait may last.
    """

    def __init__(self, rank: int, group: Sequence[int], gloo: Gloo, deadline_s: float) -> None:
        self.rank = rank
        self._places = {member: place for place, member in enumerate(group)}
        self._gloo = gloo
        self._limit = timedelta(seconds=deadline_s)
        self._flying: deque[tuple[Tensor, GlooWork]] = deque()

    def send(self, peer: int, label: str, tensors: Sequence[Tensor]) -> None:
        """Copies of the tensors are on their way; a RuntimeError where the connection is lost."""
        for tensor in tensors:
            piece = tensor.detach().clone()
            self._flying.append((piece, self._gloo.send([raw(piece)], self._places[peer], CONTENT)))
        while len(self._flying) > MOST_FLYING:
            self._flying.popleft()[1].wait(self._limit)

    def recv(self, peer: int, label: str) -> tuple[Tensor, ...]:
        """Nothing can be received that was not asked for: a strand does not say how long a message is."""
        raise ProgramError(f"{label} of rank {peer} on a strand has to be asked for, with what it looks like: use ask")

    def ask(self, peer: int, label: str, like: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        """Make room for a peer's next tensor; waiting is a RuntimeError where it comes late or is longer."""
        tensor = torch.empty_like(like)
        work = self._gloo.recv([raw(tensor)], self._places[peer], CONTENT)

        def wait() -> tuple[Tensor, ...]:
            work.wait(self._limit)
            return (tensor,)

        return wait

    def flush(self) -> None:
        """All that was sent has left this rank."""
        while self._flying:
            self._flying.popleft()[1].wait(self._limit)

    def stop(self, reason: str) -> None:
        """What is under way is forgotten; whoever executes a schedule on a strand tells the others."""
        self._flying.clear()
