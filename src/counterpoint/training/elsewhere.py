"""Weights of the user's model that only ranks in other processes train: until they come back they take no memory."""

from __future__ import annotations

import mmap
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from counterpoint.runtime.build import Rank

LEAST = 64 << 10
"""The bytes from which on a parameter is worth a mapping of its own."""


class Elsewhere:
    """The parameters of a model that no rank of this process computes with.

    Every process has built the whole model and trains some stages of it. What it has of the others is as old as the
    model, and is made anew where the trained weights come back. Until then these parameters are zeros in memory of the
    right size that nobody has written to: the kernel gives pages to it when somebody does.

    Args:
        model: the user's.
        ranks: those of this process; where there are several the model is all that others of them start from.
    """

    def __init__(self, model: nn.Module, ranks: Mapping[int, Rank]) -> None:
        here = {name for rank in ranks.values() for name in rank.interpreter.store.params}
        params = model.named_parameters() if len(ranks) == 1 else ()
        self.params = [param for name, param in params if name not in here and is_apart(param)]
        self.versions = [-1 for _ in self.params]
        self.leave()

    def leave(self) -> None:
        """What was written into them since the last time is forgotten, and its memory is free."""
        for index, param in enumerate(self.params):
            if param._version != self.versions[index]:  # noqa: SLF001 - there is no other way to see it
                param.data = unwritten(param.data)
                self.versions[index] = param._version  # noqa: SLF001 - as above

    def lose(self) -> None:
        """Those that have not come back never will: they are nan, so that nobody takes them for weights."""
        for param, version in zip(self.params, self.versions, strict=True):
            if param._version == version:  # noqa: SLF001 - as above
                param.detach().fill_(torch.nan)


def is_apart(param: nn.Parameter) -> bool:
    """Tell whether a parameter is plain memory of this process alone, with nothing else in it."""
    value, size = param.data, param.numel() * param.element_size()
    return (
        type(param) is nn.Parameter
        and type(value) is Tensor
        and value.device.type == "cpu"
        and value.is_floating_point()
        and value.is_contiguous()
        and not value.is_shared()  # type: ignore[no-untyped-call]
        and LEAST <= size == value.untyped_storage().nbytes()
    )


def unwritten(like: Tensor) -> Tensor:
    """Return zeros of a tensor's shape that take no memory until they are written to."""
    memory = mmap.mmap(-1, like.numel() * like.element_size(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)
