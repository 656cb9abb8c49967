"""Raw messages of a schedule on a gloo connection of its own, for benchmarks of the algorithms."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch import Tensor

from counterpoint.errors import ProgramError
from counterpoint.fabric.c10d import GlooProcessGroup, GlooWork
from counterpoint.tensor_bytes import view_bytes

DATA_TAG = 2  # gloo's tag
MAX_PENDING = 64


class GlooChannel:
    """Transport for :func:`~counterpoint.fabric.collectives.execute.execute` that sends bytes without frames.

    Members must have compared the collective before, as for gloo's own collectives.

    Cost:
        a tensor is copied once by the sender.

    Args:
        rank: the own rank.
        group: the members, in the order of the connection.
        gloo: the connection, used by nothing else.
        timeout_s: the longest that any wait may last.
    """

    def __init__(self, rank: int, group: Sequence[int], gloo: GlooProcessGroup, timeout_s: float) -> None:
        self.rank = rank
        self._indices = {member: index for index, member in enumerate(group)}
        self._gloo = gloo
        self._limit = timedelta(seconds=timeout_s)
        self._pending: deque[tuple[Tensor, GlooWork]] = deque()

    def send(self, peer: int, label: str, tensors: Sequence[Tensor]) -> None:
        """Start to send copies of the tensors; raise RuntimeError if the connection is lost."""
        for tensor in tensors:
            copy = tensor.detach().clone()
            self._pending.append((copy, self._gloo.send([view_bytes(copy)], self._indices[peer], DATA_TAG)))
        while len(self._pending) > MAX_PENDING:
            self._pending.popleft()[1].wait(self._limit)

    def recv(self, peer: int, label: str) -> tuple[Tensor, ...]:
        """Raise a ProgramError: messages carry no length, so only :meth:`irecv` can receive."""
        raise ProgramError(f"{label} of rank {peer} on a raw channel needs its shape and dtype in advance; use irecv")

    def irecv(self, peer: int, label: str, like: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        """Start to receive a peer's next tensor; the wait raises RuntimeError if it is late or too long."""
        tensor = torch.empty_like(like)
        work = self._gloo.recv([view_bytes(tensor)], self._indices[peer], DATA_TAG)

        def wait() -> tuple[Tensor, ...]:
            work.wait(self._limit)
            return (tensor,)

        return wait

    def flush(self) -> None:
        """Wait until everything sent has left this rank."""
        while self._pending:
            self._pending.popleft()[1].wait(self._limit)

    def abort(self, reason: str) -> None:
        """Drop pending sends; the caller informs the other ranks."""
        self._pending.clear()
