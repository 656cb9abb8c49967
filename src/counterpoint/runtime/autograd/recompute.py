"""Save what a recomputed forward needs, and check that it gives the same results the second time.

The second forward must see the same inputs, whose in-place changes are found by autograd's version counters; the same
buffers, which are copied before a forward that changes them; the same random numbers, which depend only on step,
sample and module; and the same weights, which the program ensures. Anything else that a module depends on shows in
its outputs: a sample of their values is compared.
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
"""Largest number of values of each output that are compared."""


class SavedForward:
    """One segment's forward on one microbatch, as needed to run it again.

    Args:
        segment: the function.
        leaves: its inputs.
        buffers: the rank's own; copies of those that the segment changes are kept.
        changed_buffers: the names of these, if an earlier microbatch has shown them; else None.
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
        self.leaf_versions = [value._version for value in leaves]  # noqa: SLF001 - autograd's version counter
        names = segment.buffers if changed_buffers is None else changed_buffers
        self.buffer_copies = {name: buffers[name].clone() for name in names}
        self.buffer_versions = {name: buffers[name]._version for name in segment.buffers}  # noqa: SLF001
        self.late_changed_buffers: set[str] = set()
        self.output_samples: list[Tensor] = []
        self.output_signatures: list[tuple[object, ...]] = []

    def no_saved_tensors(self) -> AbstractContextManager[object]:
        """Return a context in which autograd records the graph but saves no tensors."""
        return torch.autograd.graph.saved_tensors_hooks(_drop, _unreachable)

    def record_outputs(self, outputs: Sequence[Tensor]) -> None:
        """Sample the outputs, and keep only copies of buffers that the forward has changed."""
        self.output_samples = [sample_values(output) for output in outputs]
        self.output_signatures = [tensor_signature(output) for output in outputs]
        changed = {name for name, count in self.buffer_versions.items() if self.live_buffers[name]._version != count}  # noqa: SLF001
        self.late_changed_buffers = changed - self.buffer_copies.keys()
        self.buffer_copies = {  # batch norm changes its buffers without increasing their version
            name: copy
            for name, copy in self.buffer_copies.items()
            if name in changed or not torch.equal(self.live_buffers[name], copy)
        }

    def drop_inputs(self, recomputed: Collection[int]) -> None:
        """Drop these inputs, which are recomputed or gathered before."""
        pairs = zip(self.segment.inputs, self.leaves, strict=True)
        self.leaves = [None if value in recomputed else leaf for value, leaf in pairs]

    def make_leaves(self, recomputed: Mapping[int, Tensor]) -> list[Tensor]:
        """Return the inputs as new leaves.

        Args:
            recomputed: inputs that were just recomputed or gathered, by value.
        """
        pairs = zip(self.segment.inputs, self.leaves, strict=True)
        values = [recomputed[index] if leaf is None else leaf for index, leaf in pairs]
        return [value.detach().requires_grad_(value.requires_grad) for value in values]

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        """The buffers as they were, to be changed freely; current values for those first changed by this microbatch."""
        return {
            **self.live_buffers,
            **{name: self.live_buffers[name].clone() for name in self.late_changed_buffers},
            **self.buffer_copies,
        }

    def require_unchanged(self, location: str) -> None:
        """Raise if an input was changed in place.

        Raises:
            DataError: one was.
        """
        for index, (value, version) in enumerate(zip(self.leaves, self.leaf_versions, strict=True)):
            if value is not None and value._version != version:  # noqa: SLF001 - as above
                raise DataError(
                    f"input {index} of {location}, was changed in place, but these blocks are recomputed from it; "
                    "write x = x + 1 instead of x += 1, and no inplace=True in the first layer of a stage, or set "
                    "recompute=never"
                )

    def compare_outputs(self, outputs: Sequence[Tensor], location: str) -> Tensor | None:
        """Compare outputs with those of the first forward, as far as these were sampled.

        Returns:
            Whether those on a device are equal, which is to be read later; None if all are in host memory.

        Raises:
            DataError: those in host memory are not.
        """
        if self.output_signatures != [tensor_signature(output) for output in outputs]:
            raise mismatch_error(location, "tensors of other shapes or dtypes")
        matches = []
        for before, output in zip(self.output_samples, outputs, strict=True):
            match = samples_match(before, sample_values(output))
            if not before.is_cpu:
                matches.append(match)
            elif not match:
                raise mismatch_error(location, "other values")
        return torch.stack(matches).all() if matches else None


class RecomputeStore:
    """Everything that one rank's forwards have saved for recomputation."""

    def __init__(self) -> None:
        self.recompute_set = RecomputeSet()
        self.saved: dict[tuple[int, int], SavedForward] = {}
        self.changed_buffers: dict[int, frozenset[str]] = {}
        self.pending_matches: dict[str, Tensor] = {}  # whether outputs are the same, by location
        self.is_recomputing = False  # while set, forward hooks must not count the call as a new forward

    def begin_step(self, recompute_set: RecomputeSet) -> None:
        """Start a step in which the given forwards are recomputed."""
        self.recompute_set = recompute_set
        self.pending_matches.clear()

    def check_outputs(self, saved_forward: SavedForward, outputs: Sequence[Tensor], location: str) -> None:
        """Compare recomputed outputs with the first ones, now or, on a device, at the commit.

        Raises:
            DataError: they are not the same.
        """
        match = saved_forward.compare_outputs(outputs, location)
        if match is not None:
            self.pending_matches[location] = match

    def require_same_outputs(self) -> None:
        """Raise unless all outputs on a device that were recomputed are the same as at first; wait for the device.

        Raises:
            DataError: some are not.
        """
        if not self.pending_matches:
            return
        locations, matches = self.take_matches()
        for location, match in zip(locations, matches.tolist(), strict=True):
            if not match:
                raise mismatch_error(location, "other values")

    def take_matches(self) -> tuple[list[str], Tensor]:
        """Return the locations of recomputed outputs on a device, and whether each is the same; forget them.

        There must be some.
        """
        locations, matches = [*self.pending_matches], torch.stack([*self.pending_matches.values()])
        self.pending_matches.clear()
        return locations, matches

    def is_recomputed(self, block: int, micro: int) -> bool:
        """Return whether a block's forward on a microbatch saves only its inputs."""
        return self.recompute_set.key(block, micro) in self.recompute_set.recomputed

    def input_is_recomputed(self, block: int, micro: int) -> bool:
        """Return whether the input from the previous block is recomputed too, and only this block reads it."""
        return self.recompute_set.key(block, micro) in self.recompute_set.input_recomputed

    def save(self, key: tuple[int, int], saved_forward: SavedForward, outputs: Sequence[Tensor], location: str) -> None:
        """Save the inputs of a forward and a sample of its outputs."""
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
        """Yield a saved forward, with ``is_recomputing`` set inside the context."""
        saved_forward = self.saved.pop(key)
        saved_forward.require_unchanged(f"block {key[0]} on microbatch {key[1]}")
        self.is_recomputing = True
        try:
            yield saved_forward
        finally:
            self.is_recomputing = False


def tensor_signature(tensor: Tensor) -> tuple[object, ...]:
    """Return what two outputs must have in common before their values are compared."""
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad


def sample_values(tensor: Tensor) -> Tensor:
    """Return up to :data:`NUM_SAMPLED` evenly spaced values of a tensor."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, math.ceil(flat.numel() / NUM_SAMPLED))].clone()


def samples_match(before: Tensor, now: Tensor) -> Tensor:
    """Return whether two samples are equal up to rounding of sums in another order, as a scalar tensor."""
    if not before.is_floating_point() or not before.numel():
        return (before == now).all()
    bound = math.sqrt(torch.finfo(before.dtype).eps)
    difference, magnitude = (before - now).abs(), before.abs().nan_to_num(0.0, 0.0, 0.0).max()
    is_close = difference.isfinite() & (difference <= bound * (magnitude + now.abs()))
    return (is_close | (before == now) | (before.isnan() & now.isnan())).all()


def mismatch_error(location: str, difference: str) -> DataError:
    """Return the error for outputs that differ when they are recomputed."""
    return DataError(
        f"{location}: recomputed for its backward, it gave {difference} than the first time; recomputed blocks must be "
        "deterministic: draw random numbers from torch in a module (as nn.Dropout does), not from Python, numpy or a "
        "generator of your own, keep a forward's state in buffers, or do not recompute these blocks: recompute=never, "
        "or a pass recompute:PATTERN that matches others"
    )


def _drop(tensor: Tensor) -> None:
    del tensor


def _unreachable(_: None) -> Tensor:
    raise AssertionError("recomputation runs before backward unpacks saved tensors")
