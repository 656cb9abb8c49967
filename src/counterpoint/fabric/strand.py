"""Messages of a schedule on a connection of their own: straight bytes, for ranks that have agreed on what they do."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import Tensor

from counterpoint.fabric.frames import CODES, DTYPES
from counterpoint.fabric.gloo import Gloo, GlooWork
from counterpoint.fabric.wire import raw

LOOKS, CONTENT = 1, 2  # gloo's tags: how a tensor looks, and its bytes
MOST_FLYING = 64


class Strand:
    """What :func:`~counterpoint.fabric.algorithms.execute.execute` sends and receives by, without frames.

    All members have compared what they are about to do, as for gloo's own collectives, whose bytes travel alike.

    Cost:
        a tensor is copied once where it is sent; 16 bytes go before it.

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
            looks = torch.tensor([CODES[tensor.dtype], tensor.numel()])
            for piece, tag in ((looks, LOOKS), (tensor.detach().clone(), CONTENT)):
                self._flying.append((piece, self._gloo.send([raw(piece)], self._places[peer], tag)))
        while len(self._flying) > MOST_FLYING:
            self._flying.popleft()[1].wait(self._limit)

    def recv(self, peer: int, label: str) -> tuple[Tensor, ...]:
        """Return the next tensor of a peer; a RuntimeError where none comes in time."""
        looks = torch.empty(2, dtype=torch.int64)
        self._gloo.recv([raw(looks)], self._places[peer], LOOKS).wait(self._limit)
        code, length = looks.tolist()
        tensor = torch.empty(length, dtype=DTYPES[code])
        self._gloo.recv([raw(tensor)], self._places[peer], CONTENT).wait(self._limit)
        return (tensor,)

    def flush(self) -> None:
        """All that was sent has left this rank."""
        while self._flying:
            self._flying.popleft()[1].wait(self._limit)

    def stop(self, reason: str) -> None:
        """What is under way is forgotten; whoever executes a schedule on a strand tells the others."""
        self._flying.clear()
