"""What a forward keeps that is computed again for its backward, and whether the second time is like the first.

The second time must see what the first one saw: the same inputs, whose changes in place are found by torch's own
counts of them; the same buffers, of which those that a forward changes are copied before it; the same random numbers,
which depend on step, microbatch and module alone; the same weights, which is the program's business. What else a
module may depend on shows in its results, a few of whose numbers are compared.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from counterpoint.errors import DataError
from counterpoint.partitioning.partitioned_model import Segment
from counterpoint.program.recompute_sets import RecomputeSet

NUM_SAMPLED = 64
"""So many numbers of each result are kept and compared."""


class SavedForward:
    """One segment's forward on one microbatch, as far as it is needed to run it again.

    Args:
        segment: what runs.
        leaves: what it reads.
        buffers: the rank's own; copies of those that the segment changes are kept.
        changing: which these are, as far as it is known from an earlier microbatch; None where it is not.
    """

    def __init__(
        self,
        segment: Segment,
        leaves: Sequence[Tensor],
        buffers: Mapping[str, Tensor],
        changed_buffers: Collection[str] | None = None,
    ) -> None:
        self.segment = segment
        self.leaves: list[Tensor | None] = list(leaves)
        self.live_buffers = buffers
        self.leaf_versions = [value._version for value in leaves]  # noqa: SLF001 - torch's count of changes in place
        copied = segment.buffers if changed_buffers is None else changed_buffers
        self.buffer_copies = {name: buffers[name].clone() for name in copied}
        self.buffer_versions = {name: buffers[name]._version for name in segment.buffers}  # noqa: SLF001
        self.late_changed_buffers: set[str] = set()
        self.output_samples: list[Tensor] = []
        self.output_signatures: list[tuple[object, ...]] = []

    def no_saved_tensors(self) -> AbstractContextManager[object]:
        """Have autograd note what depends on what, but keep no tensor for it."""
        return torch.autograd.graph.saved_tensors_hooks(_drop, _unreachable)

    def record_outputs(self, outputs: Sequence[Tensor]) -> None:
        """Keep a few numbers of the results, and of the copies of buffers only those that the forward has changed."""
        self.output_samples = [sample_values(output) for output in outputs]
        self.output_signatures = [tensor_signature(output) for output in outputs]
        counted = {name for name, count in self.buffer_versions.items() if self.live_buffers[name]._version != count}  # noqa: SLF001
        self.late_changed_buffers = counted - self.buffer_copies.keys()
        self.buffer_copies = {  # batch norm changes its buffers without torch's counting it
            name: copy
            for name, copy in self.buffer_copies.items()
            if name in counted or not torch.equal(self.live_buffers[name], copy)
        }

    def drop_inputs(self, recomputed: Collection[int]) -> None:
        """Keep nothing of these values, which are made again before."""
        pairs = zip(self.segment.inputs, self.leaves, strict=True)
        self.leaves = [None if at in recomputed else leaf for at, leaf in pairs]

    def make_leaves(self, recomputed: Mapping[int, Tensor]) -> list[Tensor]:
        """Return what the segment reads as new leaves of autograd.

        Args:
            made: by its place, what was made again right before.
        """
        pairs = zip(self.segment.inputs, self.leaves, strict=True)
        values = [recomputed[at] if leaf is None else leaf for at, leaf in pairs]
        return [value.detach().requires_grad_(value.requires_grad) for value in values]

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        """The buffers as they were, to be changed without a trace; as they are where a first change came late."""
        return {
            **self.live_buffers,
            **{name: self.live_buffers[name].clone() for name in self.late_changed_buffers},
            **self.buffer_copies,
        }

    def require_unchanged(self, location: str) -> None:
        """Check that what the segment reads is as it was.

        Raises:
            DataError: something has changed it in place.
        """
        for index, (value, count) in enumerate(zip(self.leaves, self.leaf_versions, strict=True)):
            if value is not None and value._version != count:  # noqa: SLF001 - as above
                raise DataError(
                    f"input {index} of {location}, was changed in place, but these blocks are computed again from it; "
                    "write x = x + 1 in the place of x += 1 and leave inplace=True away in the first layer of a stage, "
                    "or give recompute=never"
                )

    def require_same_outputs(self, outputs: Sequence[Tensor], location: str) -> None:
        """Check that the results are those of the first time, as far as they were kept.

        Raises:
            DataError: they are others.
        """
        if self.output_signatures != [tensor_signature(output) for output in outputs]:
            raise _mismatch_error(location, "tensors of another kind")
        for before, output in zip(self.output_samples, outputs, strict=True):
            if not samples_match(before, sample_values(output)):
                raise _mismatch_error(location, "other numbers")


class RecomputeStore:
    """All that one rank's forwards have kept to be computed again."""

    def __init__(self) -> None:
        self.recompute_set = RecomputeSet()
        self.saved: dict[tuple[int, int], SavedForward] = {}
        self.changed_buffers: dict[int, frozenset[str]] = {}
        self.is_recomputing = False  # whether what runs now is no new forward, and must not count as one

    def begin_step(self, recompute_set: RecomputeSet) -> None:
        """Start a step in which a row is run that computes these forwards again."""
        self.recompute_set = recompute_set

    def is_recomputed(self, block: int, micro: int) -> bool:
        """Tell whether a block's forward on a microbatch keeps only what it reads."""
        return self.recompute_set.key(block, micro) in self.recompute_set.recomputed

    def input_is_recomputed(self, block: int, micro: int) -> bool:
        """Tell whether what only this block reads of the one before is made again before it."""
        return self.recompute_set.key(block, micro) in self.recompute_set.input_recomputed

    def save(self, key: tuple[int, int], saved_forward: SavedForward, outputs: Sequence[Tensor], location: str) -> None:
        """Keep what a forward has read."""
        saved_forward.require_unchanged(location)
        saved_forward.record_outputs(outputs)
        self.changed_buffers[key[0]] = (
            self.changed_buffers.get(key[0], frozenset())
            | saved_forward.buffer_copies.keys()
            | saved_forward.late_changed_buffers
        )
        self.saved[key] = saved_forward

    @contextmanager
    def replay(self, key: tuple[int, int]) -> Iterator[SavedForward]:
        """Give back what a forward has read, and know meanwhile that it is computed again."""
        once = self.saved.pop(key)
        once.require_unchanged(f"block {key[0]} on microbatch {key[1]}")
        self.is_recomputing = True
        try:
            yield once
        finally:
            self.is_recomputing = False


def tensor_signature(tensor: Tensor) -> tuple[object, ...]:
    """Return what two results must have in common before their numbers are looked at."""
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad


def sample_values(tensor: Tensor) -> Tensor:
    """Return up to :data:`SAMPLES` numbers of a tensor, from all over it."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, math.ceil(flat.numel() / NUM_SAMPLED))].clone()


def samples_match(before: Tensor, now: Tensor) -> bool:
    """Tell whether two samples are equal but for the rounding of sums that were made in another order."""
    if not before.is_floating_point() or not before.numel():
        return bool(torch.equal(before, now))
    most = float(before.abs().nan_to_num(0.0, 0.0, 0.0).max())
    bound = math.sqrt(torch.finfo(before.dtype).eps)
    return bool(torch.allclose(before, now, rtol=bound, atol=bound * most, equal_nan=True))


def _mismatch_error(location: str, found: str) -> DataError:
    return DataError(
        f"{location}: computed again for its backward, it gave {found} than the first time; what is recomputed must do "
        "the same twice: draw random numbers from torch in a module (as nn.Dropout does) and not from Python, numpy or "
        "a generator of your own, keep what a forward remembers in buffers, or leave these blocks out: "
        "recompute=never, or a pass recompute:PATTERN that matches others"
    )


def _drop(tensor: Tensor) -> None:
    del tensor


def _unreachable(nothing: None) -> Tensor:
    raise AssertionError("what was forgotten is computed again before it is needed")
