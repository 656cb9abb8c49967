"""Under which autocasts a batch is computed: those of the call that brought it, though later ones may come to it.

What a rank is fed in one step: the microbatches of a global batch, by number.

Which part of a microbatch's mean loss is in the loss that its gradients are of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from counterpoint.fabric.rank_scheduler import DEVICES
from counterpoint.runtime.lowering import LoweredProgram

Autocasts: TypeAlias = tuple[tuple[str, bool, torch.dtype], ...]
"""For each device whether there is an autocast, and to what."""


def current_autocasts() -> Autocasts:
    """Return the autocasts of this thread."""
    return tuple((device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in DEVICES)


@contextmanager
def autocast_as(autocasts: Autocasts | None) -> Iterator[None]:
    """Have these autocasts inside, and none besides; None leaves them as they are."""
    with ExitStack() as stack:
        if autocasts is not None:
            for (device, is_enabled, dtype), now in zip(autocasts, current_autocasts(), strict=True):
                if (device, is_enabled, dtype) != now and (is_enabled or now[1]):
                    stack.enter_context(torch.autocast(device, dtype, enabled=is_enabled))
        yield


class MicrobatchSource(Protocol):
    """One global batch; a rank asks only for the microbatches that its row reads."""

    @property
    def sizes(self) -> Mapping[int, int]:
        """How many samples each microbatch has; 0 for an empty one."""
        ...

    def inputs(self, micro: int) -> Any:  # noqa: ANN401 - whatever the model takes
        """Return the model's inputs for a microbatch."""
        ...

    def targets(self, micro: int) -> Any:  # noqa: ANN401 - whatever the loss takes
        """Return what the loss takes beside the model's output."""
        ...


@dataclass(frozen=True, slots=True)
class SlicedBatch:
    """A global batch that lies in memory, cut by position.

    Args:
        batch: inputs and targets; each a tensor, or a tuple or dict of tensors, with the samples along dim 0.
        places: for each microbatch the samples from and to.
        casts: the autocasts that it is computed under wherever a stream comes to it; None for those of that place.
    """

    batch: tuple[Any, Any]
    sample_ranges: tuple[tuple[int, int], ...]
    autocasts: Autocasts | None = None

    @property
    def sizes(self) -> dict[int, int]:
        """How many samples each microbatch has."""
        return {micro: stop - start for micro, (start, stop) in enumerate(self.sample_ranges)}

    def inputs(self, micro: int) -> Any:  # noqa: ANN401 - whatever the model takes
        """Return the model's inputs for a microbatch."""
        return slice_samples(self.batch[0], *self.sample_ranges[micro])

    def targets(self, micro: int) -> Any:  # noqa: ANN401 - whatever the loss takes
        """Return the targets of a microbatch."""
        return slice_samples(self.batch[1], *self.sample_ranges[micro])


def slice_samples(values: Any, start: int, stop: int) -> Any:  # noqa: ANN401 - any nest of tensors
    """Return samples ``start`` to ``stop`` of every tensor in a tensor, tuple, named tuple, list or dict."""
    if isinstance(values, Tensor):
        return values[start:stop]
    if isinstance(values, dict):
        return {key: slice_samples(value, start, stop) for key, value in values.items()}
    if isinstance(values, list | tuple):
        parts = [slice_samples(value, start, stop) for value in values]
        return type(values)(*parts) if hasattr(values, "_fields") else type(values)(parts)
    return values


class AsyncPipelineBatches:
    """The batches that are under way in a stream, as one feed: microbatch m of batch k is ``k * stride + m``.

    Batches that are not given are empty: before the first one, and behind the last one before a flush.

    Args:
        feeds: those under way, by the number of the batch.
        number: of the batch that is finished with this feed.
        ahead: how many batches behind it are begun.
        stride: how many microbatches a batch has.
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

    def autocasts(self, micro: int) -> Autocasts | None:
        """Return the autocasts that a microbatch is computed under; None for those that there are."""
        feed = self.batches[micro // self.microbatches_per_batch]
        return feed.autocasts if isinstance(feed, SlicedBatch) else None


@dataclass(frozen=True, slots=True)
class LossWeights:
    """The parts of one step.

    Args:
        weights: for each microbatch its part in the mean over the samples that are decided on together.
        ratios: for a microbatch and a rank that its gradient comes from and that decides on others together with it,
            what makes its part there its part here; left out where that is 1.
    """

    weights: Mapping[int, float]
    upstream_ratios: Mapping[tuple[int, int], float] = field(default_factory=dict)


def compute_loss_weights(program: LoweredProgram, step: int, sizes: Mapping[int, int]) -> LossWeights:
    """Return the parts in a step of a rank.

    Args:
        script: what the rank does.
        number: of the step.
        sizes: samples of every microbatch.
    """
    first = step * program.microbatches_per_batch
    weights: dict[int, float] = {}
    totals: dict[int, int] = {}
    for domain in program.loss_scopes:
        total = _num_samples(domain, first, sizes)
        for micro in domain:
            totals[micro] = total
            weights[micro + first] = sizes[micro + first] / max(total, 1)
    ratios = {
        (micro + first, peer): _num_samples(theirs, first, sizes) / max(totals[micro], 1)
        for (micro, peer), theirs in program.upstream_scopes.items()
    }
    return LossWeights(weights, {place: ratio for place, ratio in ratios.items() if ratio != 1.0})


def _num_samples(scope: Sequence[int], first: int, sizes: Mapping[int, int]) -> int:
    return sum(sizes[micro + first] for micro in scope)


def commit_scope(program: LoweredProgram, step: int, commit_index: int) -> frozenset[int]:
    """Return the microbatches that a commit decides on, the first, second and so on of a step."""
    return frozenset(micro + step * program.microbatches_per_batch for micro in program.loss_scopes[commit_index])
