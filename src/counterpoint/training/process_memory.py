"""A run has the C library keep the memory that its steps free, unless somebody else has a say in that.

Weights of the user's model that only ranks in other processes train: until they come back they take no memory.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from counterpoint.launchers.variables import allocator_variables
from counterpoint.model.spec import ModelSpec
from counterpoint.runtime.malloc import process_heap
from counterpoint.runtime.rank_builder import RankRuntime


class RetainedMemory:
    """One run's wish that freed memory is kept.

    Args:
        wanted: whether the run has it; nothing is changed all the same where the user has set up the allocator.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._heap = process_heap() if enabled and not allocator_variables() else None
        self._is_on = False

    def start(self) -> None:
        """From now on freed memory is kept."""
        if self._heap is not None and not self._is_on:
            self._is_on = True
            self._heap.retain()

    def stop(self) -> None:
        """It is given back, unless another run of this process wants it kept."""
        if self._heap is not None and self._is_on:
            self._is_on = False
            self._heap.restore()

    def mmap_separately(self) -> AbstractContextManager[None]:
        """Return in what to make memory that stays as long as the run."""
        return nullcontext() if self._heap is None else self._heap.mmap_separately()


MIN_BYTES = 64 << 10
"""The bytes from which on a parameter is worth a mapping of its own."""


class ReleasedParameters:
    """The parameters of a model that no rank of this process computes with, and that come back from others.

    Every process has built the whole model and trains some stages of it. What it has of the others is as old as the
    model, and is made anew where the trained weights come back. From the first step until then these parameters are
    zeros in memory of the right size that nobody has written to: the kernel gives pages to it when somebody does.

    Args:
        params: those by name; what is not plain memory of this process alone, or too small, stays as it is.
    """

    def __init__(self, params: Mapping[str, nn.Parameter]) -> None:
        self.params = {name: param for name, param in params.items() if is_private_cpu_tensor(param)}
        self.versions: dict[str, int] = {}

    @staticmethod
    def for_ranks(model: nn.Module, ranks: Mapping[int, RankRuntime], spec: ModelSpec) -> ReleasedParameters:
        """Return those of the user's model.

        Args:
            model: the user's.
            ranks: those of this process; where there are several the model is all that others of them start from.
            spec: of the model; what its units have comes back.
        """
        if len(ranks) > 1:
            return ReleasedParameters({})
        here = {name for rank in ranks.values() for name in rank.interpreter.store.params}
        theirs = {name for names in spec.units.values() for name in names} - here
        return ReleasedParameters({name: param for name, param in model.named_parameters() if name in theirs})

    def release(self) -> None:
        """What was written into them since the last time is forgotten, and its memory is free."""
        for name, param in self.params.items():
            if not self.is_released(name):
                param.data = lazy_zeros(param.data)
                self.versions[name] = param._version  # noqa: SLF001 - there is no other way to see what is written

    def is_released(self, name: str) -> bool:
        """Tell whether nobody has written into this one since it was left."""
        return self.versions.get(name) == self.params[name]._version  # noqa: SLF001 - as above

    def poison(self, error: BaseException | None = None) -> None:
        """Those that have not come back never will: they are nan, so that nobody takes them for weights.

        Args:
            error: what the run ended with, which gets a note that says so.
        """
        lost = [name for name in self.params if self.is_released(name)]
        for name in lost:
            self.params[name].detach().fill_(torch.nan)
        if lost and error is not None:
            error.add_note(
                f"{lost[0]}{f' and {len(lost) - 1} other parameters' if lost[1:] else ''} of the model, which only "
                "ranks in other processes train, are nan here, because the run has ended before they came back; load "
                "a checkpoint (resume=...), or build the model again"
            )


def is_private_cpu_tensor(param: nn.Parameter) -> bool:
    """Tell whether a parameter is plain memory of this process alone, with nothing else in it."""
    value, size = param.data, param.numel() * param.element_size()
    return (
        type(param) is nn.Parameter
        and type(value) is Tensor
        and value.device.type == "cpu"
        and value.is_floating_point()
        and value.is_contiguous()
        and not value.is_shared()  # type: ignore[no-untyped-call]
        and MIN_BYTES <= size == value.untyped_storage().nbytes()
    )


def lazy_zeros(like: Tensor) -> Tensor:
    """Return zeros of a tensor's shape that take no memory until they are written to."""
    memory = mmap.mmap(-1, like.numel() * like.element_size(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)
