"""Memory of a training process: freed memory that stays mapped, and parameters of the model that ranks do not read."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from counterpoint.launchers.variables import allocator_variables
from counterpoint.model.spec import ModelSpec
from counterpoint.runtime.malloc import heap_of_process
from counterpoint.runtime.params.flat_layout import WHOLE
from counterpoint.runtime.rank_builder import RankRuntime
from counterpoint.training.between_steps.stale_weights import without_stale_reads


class RetainedMemory:
    """Keeps freed memory in the process while a run trains, unless the user has configured the allocator.

    Args:
        enabled: whether the run wants it; otherwise large blocks are returned to the system as soon as they are freed.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._heap = None if allocator_variables() else heap_of_process()
        self._is_enabled = enabled
        self._is_on = False

    def begin(self) -> None:
        """Return large blocks from now on, before ranks are built, if freed memory is not to be kept."""
        if not self._is_enabled:
            self.start()

    def start(self) -> None:
        """Keep freed memory from now on, or return it at once."""
        if self._heap is not None and not self._is_on:
            self._is_on = True
            (self._heap.retain if self._is_enabled else self._heap.return_at_once)()

    def stop(self) -> None:
        """Return freed memory to the system as usual again, unless another run of this process keeps it."""
        if self._heap is not None and self._is_on:
            self._is_on = False
            (self._heap.restore if self._is_enabled else self._heap.end_return)()

    def mmap_separately(self) -> AbstractContextManager[None]:
        """Return a context in which memory is mapped separately, for allocations that live as long as the run."""
        return nullcontext() if self._heap is None else self._heap.mmap_separately()


MIN_BYTES = 64 << 10
"""The size from which a parameter is worth a mapping of its own."""


class ReleasedParameters:
    """Parameters that the rank of this process does not read; their memory is released during training.

    Every process builds the whole model, and trains some stages of it, shards, or weights in flat memory. The model's
    own become stale with the first step, and are overwritten when the weights are exported. From the first step until
    then these parameters are zeros in memory of the right size that was never written to: the kernel allocates pages at
    the first write.

    Args:
        params: the parameters by name; small ones, and those in memory that others use too, are kept.
        has_all: whether the rank has a part of every parameter, so that the model's own could stay, for other uses.
    """

    def __init__(self, params: Mapping[str, nn.Parameter], *, has_all: bool = False) -> None:
        self.has_all = has_all
        self.params = {name: param for name, param in params.items() if is_private_cpu_tensor(param)}
        self.versions: dict[str, int] = {}

    @staticmethod
    def for_ranks(model: nn.Module, ranks: Mapping[int, RankRuntime], spec: ModelSpec) -> ReleasedParameters:
        """Return the parameters of which the rank of this process has another copy, a shard, or nothing.

        None, if it has a whole copy of each, and updates it whole.

        Args:
            model: the user's model.
            ranks: the ranks of this process; with several, the model is the source of all of them and nothing is
                released.
            spec: the model's spec; the weights of its units are exported.
        """
        if len(ranks) > 1:
            return ReleasedParameters({})
        (rank,) = ranks.values()
        store = rank.interpreter.store
        addresses = {name: param.data_ptr() for name, param in store.params.items()}
        trained = {name for names in spec.units.values() for name in names}
        unread = {
            name: param
            for name, param in model.named_parameters()
            if name in trained and param.data_ptr() != addresses.get(name)
        }
        has_all = trained <= store.params.keys()
        has_whole = (
            has_all
            and all(param.numel() == store.params[name].numel() for name, param in unread.items())
            and all(storage.local_shard is storage.weights for storage in store.flat_params())
            and all(unit.role.update_shard in {None, WHOLE} for unit in store.units.values())
        )
        return ReleasedParameters({} if has_whole else unread, has_all=has_all)

    def release(self) -> None:
        """Drop the values of the parameters, and free their memory."""
        for name, param in self.params.items():
            if not self.is_released(name):
                param.data = lazy_zeros(param.data)
                self.versions[name] = param._version  # noqa: SLF001 - the only way to detect writes

    def is_released(self, name: str) -> bool:
        """Tell whether a parameter has not been written to since it was released."""
        return self.versions.get(name) == self.params[name]._version  # noqa: SLF001 - as above

    def poison(self, error: BaseException | None = None) -> None:
        """Fill the parameters that were not exported with nan, so that they cannot be mistaken for weights.

        Args:
            error: the error that ended the run; it gets a note.
        """
        names = [name for name in self.params if self.is_released(name)]
        with without_stale_reads():  # nothing is read, and other processes, which a read would need, may have ended
            for name in names:
                self.params[name].detach().fill_(torch.nan)
        if names and error is not None:
            error.add_note(
                f"{names[0]}{f' and {len(names) - 1} other parameters' if names[1:] else ''} of the model, which no "
                "rank of this process trains whole, are nan here, because the run ended before they were exported; "
                "load a checkpoint (resume=...), or build the model again"
            )


def is_private_cpu_tensor(param: nn.Parameter) -> bool:
    """Tell whether a parameter is the only content of private CPU memory."""
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
    """Return zeros of a tensor's shape that use no memory until they are written to."""
    memory = mmap.mmap(-1, like.numel() * like.element_size(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)
