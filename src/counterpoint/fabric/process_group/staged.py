"""Tensors that no process group accepts where they are: they travel through host memory, pinned for a CUDA device."""

from __future__ import annotations

import torch
from torch import Tensor

from counterpoint.fabric.fabric import Work


class StagedWork(Work):
    """A collective on a copy in host memory, which the wait copies back.

    Args:
        work: the collective.
        copies: each tensor, and the host copy that replaces it.
    """

    def __init__(self, work: Work, *copies: tuple[Tensor, Tensor]) -> None:
        self._work = work
        self._copies: tuple[tuple[Tensor, Tensor], ...] = copies

    @property
    def is_complete(self) -> bool:
        """Whether the wait only has to copy."""
        return self._work.is_complete

    def completes_within(self, seconds: float) -> bool:
        """Wait for at most ``seconds``; copy if the collective is complete."""
        if not self._work.completes_within(seconds):
            return False
        self.wait()
        return True

    def wait(self) -> None:
        """Block until the collective is complete, and copy the result."""
        self._work.wait()
        for tensor, host in self._copies:
            tensor.copy_(host)
        self._copies = ()


def to_host(tensor: Tensor) -> Tensor:
    """Return a copy in host memory; the host waits for the device."""
    return host_empty(tensor).copy_(tensor.detach())


def host_empty(like: Tensor) -> Tensor:
    """Return uninitialized host memory for such a tensor, pinned if a CUDA device copies from it."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
