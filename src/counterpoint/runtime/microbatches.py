"""What a rank reads in one step: the microbatches of a global batch, their autocasts, and their loss factors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import SUPPORTED_NODES, tree_leaves, tree_map

from counterpoint.errors import DataError
from counterpoint.fabric.rank_scheduler import DEVICES
from counterpoint.runtime.fusion import LoweredProgram
from counterpoint.runtime.sample_layout import SamplePart

Autocasts: TypeAlias = tuple[tuple[str, bool, torch.dtype], ...]
"""Device type, whether its autocast is enabled, and its dtype."""


def current_autocasts() -> Autocasts:
    """Return the autocast state of this thread."""
    return tuple((device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in DEVICES)


@contextmanager
def autocast_as(autocasts: Autocasts | None) -> Iterator[None]:
    """Enter exactly these autocasts; None keeps the current ones."""
    with ExitStack() as stack:
        if autocasts is not None:
            for (device, is_enabled, dtype), now in zip(autocasts, current_autocasts(), strict=True):
                if (device, is_enabled, dtype) != now and (is_enabled or now[1]):
                    stack.enter_context(torch.autocast(device, dtype, enabled=is_enabled))
        yield


class MicrobatchSource(Protocol):
    """One global batch; a rank reads only the microbatches that its program needs."""

    @property
    def sizes(self) -> Mapping[int, int]:
        """Number of samples of each microbatch; 0 for an empty one."""
        ...

    def inputs(self, micro: int) -> Any:  # noqa: ANN401 - whatever the model takes
        """Return the model's inputs for a microbatch."""
        ...

    def targets(self, micro: int) -> Any:  # noqa: ANN401 - whatever the loss takes
        """Return what the loss takes in addition to the model's output."""
        ...

    def undivided(self, micro: int) -> tuple[Any, Any, int]:
        """Return inputs, targets and number of samples of the batch of which this microbatch is a part."""
        ...


class Memory(NamedTuple):
    """Where a tensor lies.

    Args:
        storage: that it is in, of which this is not an owner.
        start: its first byte there.
        stop: one past its last byte.
    """

    storage: StorageWeakRef
    start: int
    stop: int

    @staticmethod
    def of(tensor: Tensor) -> Memory:
        """Return the memory of a tensor; none for a sparse or nested one."""
        if not has_strides(tensor):
            return Memory(StorageWeakRef(torch.empty(0).untyped_storage()), 0, 0)  # type: ignore[no-untyped-call]
        start = tensor.storage_offset() * tensor.element_size()
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        return Memory(storage, int(start), int(start + extent * tensor.element_size()))

    def overlaps(self, other: Memory) -> bool:
        """Tell whether another tensor has some of the same bytes."""
        return self.storage == other.storage and self.start < other.stop and other.start < self.stop


class BatchMemory(NamedTuple):
    """Where the tensors of a batch lie that the user has passed.

    Args:
        inputs: of its inputs, in their order.
        targets: of its targets.
    """

    inputs: Sequence[Memory]
    targets: Sequence[Memory]

    @staticmethod
    def of(batch: tuple[Any, Any]) -> BatchMemory:
        """Return the memory of inputs and targets, with or without marks of where samples are."""
        inputs, targets = (
            [Memory.of(leaf) for leaf in batch_leaves(values) if isinstance(leaf, Tensor)] for values in batch
        )
        return BatchMemory(inputs, targets)


class KeptBatch(NamedTuple):
    """Inputs and targets that are read after the call that has passed them.

    Args:
        values: copies, so that the caller may fill its tensors with the next batch.
        origins: where the caller's tensors are; None if these are not copies.
    """

    values: tuple[Any, Any]
    origins: BatchMemory | None = None

    @staticmethod
    def copy(batch: tuple[Any, Any]) -> KeptBatch:
        """Return copies of all tensors of a batch."""
        return KeptBatch((copy_tensors(batch[0]), copy_tensors(batch[1])), BatchMemory.of(batch))


@dataclass(frozen=True, slots=True)
class SlicedBatch:
    """A global batch in memory, of which microbatches are slices.

    Args:
        batch: inputs and targets; each a tensor, or a tuple or dict of tensors, with the samples along dim 0.
        sample_ranges: for each microbatch its first sample and one past its last.
        autocasts: the autocasts to compute it under in an asynchronous pipeline; None for the current ones.
        origins: where the tensors were that the user has passed, if the batch has copies of them.

    Attributes:
        sizes: the number of samples of each microbatch.
    """

    batch: tuple[Any, Any]
    sample_ranges: tuple[tuple[int, int], ...]
    autocasts: Autocasts | None = None
    origins: BatchMemory | None = None
    sizes: Mapping[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Count the samples once: a step asks for them often."""
        sizes = {micro: stop - start for micro, (start, stop) in enumerate(self.sample_ranges)}
        object.__setattr__(self, "sizes", sizes)

    def inputs(self, micro: int) -> Any:  # noqa: ANN401 - whatever the model takes
        """Return the model's inputs for a microbatch."""
        return slice_samples(self.batch[0], *self.sample_ranges[micro])

    def targets(self, micro: int) -> Any:  # noqa: ANN401 - whatever the loss takes
        """Return the targets of a microbatch."""
        return slice_samples(self.batch[1], *self.sample_ranges[micro])

    def undivided(self, micro: int) -> tuple[Any, Any, int]:
        """Return inputs, targets and number of samples of the batch."""
        count = self.sample_ranges[-1][1]
        return *(slice_samples(values, 0, count) for values in self.batch), count

    def keep(self) -> SlicedBatch:
        """Return the batch with copies of its tensors, if it has none."""
        if self.origins is not None:
            return self
        kept = KeptBatch.copy(self.batch)
        return replace(self, batch=kept.values, origins=kept.origins)


def slice_samples(values: Any, start: int, stop: int) -> Any:  # noqa: ANN401 - any nest of tensors
    """Return samples ``start`` to ``stop`` of every tensor in a nest, in the same memory.

    Their version counters are their own, so that a forward may change one microbatch in place before the backward of
    another.
    """
    return map_parts(values, lambda tensor: slice_tensor(tensor, start, stop), lambda part: part.slice(start, stop))


def slice_tensor(tensor: Tensor, start: int, stop: int) -> Tensor:
    """Return samples ``start`` to ``stop`` of a tensor, as :func:`slice_samples` does."""
    if not has_strides(tensor):
        return slice_special(tensor, start, stop)
    if tensor.requires_grad:  # a loss may differentiate with respect to an undivided input
        return tensor if (start, stop) == (0, len(tensor)) else tensor[start:stop]
    return tensor.data[start:stop]


def copy_tensors(values: Any, *, detached: bool = False) -> Any:  # noqa: ANN401 - any nest of tensors
    """Return a nest with copies of its tensors, which a forward may change in place, and of its lists and dicts.

    Args:
        values: inputs or targets.
        detached: whether the copies are leaves of autograd, as a deep copy of them needs; by default those of tensors
            that need gradients pass these on to them.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> copy_tensors({"x": x})["x"].is_leaf, copy_tensors({"x": x}, detached=True)["x"].is_leaf
        (False, True)
    """

    def copy(tensor: Tensor) -> Tensor:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad) if detached else tensor.clone()

    return map_parts(values, copy, lambda part: replace(part, value=copy_tensors(part.value, detached=detached)))


def map_parts(
    values: Any,  # noqa: ANN401 - any nest of tensors
    of_tensor: Callable[[Tensor], Tensor],
    of_part: Callable[[SamplePart], Any],
) -> Any:  # noqa: ANN401 - likewise
    """Return a nest with other tensors, and others of the parts whose samples do not lie along dim 0."""
    if isinstance(values, Tensor):
        return of_tensor(values)
    if isinstance(values, SamplePart):
        return of_part(values)
    if isinstance(values, dict) and (type(values) is dict or type(values) not in SUPPORTED_NODES):
        return {key: map_parts(value, of_tensor, of_part) for key, value in values.items()}
    if isinstance(values, list | tuple):
        parts = [map_parts(value, of_tensor, of_part) for value in values]
        return type(values)(*parts) if hasattr(values, "_fields") else type(values)(parts)
    if type(values) in SUPPORTED_NODES:  # such as a dataclass, an OrderedDict, or an output of transformers
        return tree_map(lambda leaf: map_parts(leaf, of_tensor, of_part), values)
    return values


def has_strides(tensor: Tensor) -> bool:
    """Tell whether a tensor is dense, in one piece of memory."""
    return tensor.layout is torch.strided and not tensor.is_nested


def batch_leaves(values: Any) -> list[Any]:  # noqa: ANN401 - any nest of tensors
    """Return the leaves of a batch, and of the parts whose samples do not lie along dim 0."""
    return tree_leaves([leaf.value if isinstance(leaf, SamplePart) else leaf for leaf in tree_leaves(values)])


def slice_special(values: Tensor, start: int, stop: int) -> Tensor:
    """Return a sparse or nested tensor as it is, if these are all of its samples.

    Raises:
        DataError: they are not.
    """
    count = values.size(0)
    if (start, stop) == (0, count):
        return values
    kind = "a nested tensor" if values.is_nested else f"a sparse tensor ({values.layout})"
    raise DataError(
        f"the batch has {kind} of {count} samples, which cannot be divided, but a microbatch has {stop - start} of "
        "them; give a dense tensor (to_dense(), or padded), a list with a tensor for each sample, name it in "
        "shared=(NAME,) if it belongs to all samples, or train with one microbatch and without replicas"
    )


class AccumulatedBatches:
    """Several batches as one: every microbatch is a part of one of them, so that their shapes may differ.

    Args:
        batches: in the order of their samples.
    """

    def __init__(self, batches: Sequence[SlicedBatch]) -> None:
        self.batches = batches
        self._parts = [(batch, micro) for batch in batches for micro in batch.sizes]
        self.sizes: Mapping[int, int] = {micro: batch.sizes[part] for micro, (batch, part) in enumerate(self._parts)}
        self.autocasts = batches[0].autocasts

    def inputs(self, micro: int) -> Any:  # noqa: ANN401 - whatever the model takes
        """Return the model's inputs for a microbatch."""
        batch, part = self._parts[micro]
        return batch.inputs(part)

    def targets(self, micro: int) -> Any:  # noqa: ANN401 - whatever the loss takes
        """Return the targets of a microbatch."""
        batch, part = self._parts[micro]
        return batch.targets(part)

    def undivided(self, micro: int) -> tuple[Any, Any, int]:
        """Return inputs, targets and number of samples of the batch of which a microbatch is a part."""
        batch, part = self._parts[micro]
        return batch.undivided(part)


class AsyncPipelineBatches:
    """The batches in flight in an asynchronous pipeline, as one source.

    Microbatch ``m`` of batch ``k`` has the number ``k * microbatches_per_batch + m``. Batches that are not given are
    empty: those before the first one, and those after the last one before a flush.

    Args:
        batches: those in flight, by batch number.
        number: the batch that finishes in this step.
        lookahead: how many later batches have begun.
        microbatches_per_batch: of every batch.
    """

    def __init__(
        self, batches: Mapping[int, MicrobatchSource], number: int, lookahead: int, microbatches_per_batch: int
    ) -> None:
        self.batches = batches
        self.microbatches_per_batch = microbatches_per_batch
        self.sizes: Mapping[int, int] = {
            batch * microbatches_per_batch + micro: batches[batch].sizes[micro] if batch in batches else 0
            for batch in range(number, number + lookahead + 1)
            for micro in range(microbatches_per_batch)
        }

    def inputs(self, micro: int) -> Any:  # noqa: ANN401 - whatever the model takes
        """Return the model's inputs for a microbatch."""
        return self.batches[micro // self.microbatches_per_batch].inputs(micro % self.microbatches_per_batch)

    def targets(self, micro: int) -> Any:  # noqa: ANN401 - whatever the loss takes
        """Return the targets of a microbatch."""
        return self.batches[micro // self.microbatches_per_batch].targets(micro % self.microbatches_per_batch)

    def undivided(self, micro: int) -> tuple[Any, Any, int]:
        """Return inputs, targets and number of samples of the batch of which a microbatch is a part."""
        return self.batches[micro // self.microbatches_per_batch].undivided(micro % self.microbatches_per_batch)

    def autocasts(self, micro: int) -> Autocasts | None:
        """Return the autocasts that a microbatch is computed under; None for the current ones."""
        batch = self.batches[micro // self.microbatches_per_batch]
        return batch.autocasts if isinstance(batch, SlicedBatch | AccumulatedBatches) else None


def is_copied(batch: MicrobatchSource) -> bool:
    """Tell whether a batch has copies of the tensors that the user has passed."""
    if isinstance(batch, AsyncPipelineBatches):
        return any(map(is_copied, batch.batches.values()))
    if isinstance(batch, AccumulatedBatches):
        return any(map(is_copied, batch.batches))
    return isinstance(batch, SlicedBatch) and batch.origins is not None


@dataclass(frozen=True, slots=True)
class LossFactors:
    """Factors of one step that turn mean losses of microbatches into a mean over all samples.

    Args:
        sample_fractions: for each microbatch its samples divided by those of its loss scope.
        is_whole: the microbatches that are alone in their loss scope, so that their mean is that of the batch.
        weight_unit: of the weights of weighted means, see :mod:`counterpoint.runtime.loss.loss_reduction`.
        loss_scale: the factor of all losses in backward; a tensor if a device has decided it.
        upstream_ratios: by microbatch and sender of its gradient the factor from the sender's loss scope to this
            rank's;
            absent where it is 1.
    """

    sample_fractions: Mapping[int, float]
    is_whole: frozenset[int] = frozenset()
    weight_unit: float = 1.0
    loss_scale: Tensor | float = 1.0
    upstream_ratios: Mapping[tuple[int, int], float] = field(default_factory=dict)


def compute_loss_factors(
    program: LoweredProgram,
    step: int,
    sizes: Mapping[int, int],
    weight_unit: float = 1.0,
    loss_scale: Tensor | float = 1.0,
) -> LossFactors:
    """Return the loss factors of a rank in one step.

    Args:
        program: what the rank runs.
        step: its number.
        sizes: number of samples of every microbatch.
        weight_unit: of the weights of weighted means.
        loss_scale: the factor of all losses in backward.
    """
    first = step * program.microbatches_per_batch
    sample_fractions: dict[int, float] = {}
    totals: dict[int, int] = {}
    is_whole: set[int] = set()
    for scope in program.loss_scopes:
        total = _num_samples(scope, first, sizes)
        for micro in scope:
            totals[micro] = total
            sample_fractions[micro + first] = sizes[micro + first] / max(total, 1)
            if sizes[micro + first] == total:
                is_whole.add(micro + first)
    ratios = {
        (micro + first, peer): _num_samples(upstream_scope, first, sizes) / max(totals[micro], 1)
        for (micro, peer), upstream_scope in program.upstream_scopes.items()
    }
    ratios = {key: ratio for key, ratio in ratios.items() if ratio != 1.0}
    if program.microbatches_per_batch:  # whose stages decide at different times, from different batches
        return LossFactors(sample_fractions, loss_scale=loss_scale, upstream_ratios=ratios)
    return LossFactors(sample_fractions, frozenset(is_whole), weight_unit, loss_scale, ratios)


def _num_samples(scope: Sequence[int], first: int, sizes: Mapping[int, int]) -> int:
    return sum(sizes[micro + first] for micro in scope)


def commit_scope(program: LoweredProgram, step: int, commit_index: int) -> frozenset[int]:
    """Return the microbatches that a commit decides on.

    Args:
        program: what the rank runs.
        step: its number.
        commit_index: of the commits in this step.
    """
    return frozenset(micro + step * program.microbatches_per_batch for micro in program.loss_scopes[commit_index])
