"""The functions of a cut model that a rank computes with, and the values that they make for each other.

Forwards and backwards of one rank: segments of the model with autograd cut at their ends.

Values that segments make for each other are kept here one by one, detached, with a note whether a gradient can come
back for them. What their readers add to a gradient is added up as it comes, from this rank's segments and from others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from counterpoint.errors import DataError
from counterpoint.partitioning.dry_run import add_location
from counterpoint.partitioning.partitioned_model import Segment
from counterpoint.runtime.autograd.deferred_weight_grad import WeightGradJob, WeightGradQueue, build_grad_sinks
from counterpoint.runtime.autograd.recompute import RecomputeStore, SavedForward
from counterpoint.runtime.batch_norm.mode import BatchNormState
from counterpoint.runtime.kernels.cross_entropy import FusedCrossEntropyMode
from counterpoint.runtime.kernels.function_mode import InterceptFunctions
from counterpoint.runtime.kernels.weight_grad import GradSinks, InPlaceGradMode, run_backward
from counterpoint.runtime.microbatches import AsyncPipelineBatches, LossWeights, MicrobatchSource, autocast_as
from counterpoint.runtime.params.param_store import ParamStore
from counterpoint.runtime.rng import ModuleRNG, make_seeder


@dataclass(frozen=True, slots=True)
class BoundModel:
    """What is computed with: the cut model's functions and its two ends.

    Args:
        segments: by first block and one past the last.
        num_blocks: blocks of the whole model.
        num_inputs: how many of the values are the model's own inputs; they come first.
        strands: the values of each strand, by its maker and its readers.
        flatten: from a feed's inputs to the values that they are.
        unflatten: from what the last segment gives to the model's output.
        loss: from the model's output and the targets to a scalar, the mean over the samples.
        draws: whether the model draws random numbers.
    """

    segments: Mapping[tuple[int, int], Segment]
    num_blocks: int
    num_inputs: int
    edge_values: Mapping[tuple[int, ...], Sequence[int]]
    flatten: Callable[[Any], tuple[Tensor, ...]]
    unflatten: Callable[[Sequence[Tensor]], Any]
    loss: Callable[[Any, Any], Tensor]
    uses_rng: bool


class StoredValue(NamedTuple):
    """A value, detached, and whether a gradient can come back for it."""

    value: Tensor
    requires_grad: bool


def values_freed_by_backward(segments: Mapping[tuple[int, int], Segment]) -> dict[int, list[int]]:
    """Return for each first block of a segment the values that no other one here needs behind its backward."""
    first_reader: dict[int, int] = {}
    for first, stop in sorted(segments):
        for at in segments[first, stop].inputs:
            first_reader.setdefault(at, first)
    return {first: [at for at, reader in first_reader.items() if reader == first] for first, _ in segments}


OptionalGrads = list["Tensor | None"]


class SegmentExecutor:
    """The compute words of one rank.

    Args:
        model: what is computed with.
        store: the rank's parameters and buffers.
        dice: the random state.
        desk: where weight gradients are put off; None where all backwards are whole.
    """

    def __init__(
        self, model: BoundModel, store: ParamStore, rng: ModuleRNG, weight_grad_queue: WeightGradQueue | None = None
    ) -> None:
        self.model = model
        self.store = store
        self.rng = rng
        self.weight_grad_queue = weight_grad_queue
        self.grad_sinks = GradSinks()
        self.deferred_jobs: dict[tuple[int, int], list[WeightGradJob]] = {}
        self.batch: MicrobatchSource | None = None
        self.loss_weights = LossWeights({})
        self.microbatches_per_batch = 0
        self.values: dict[tuple[int, int], StoredValue] = {}  # by value and microbatch
        self.grads: dict[tuple[int, int], Tensor] = {}
        self.saved: dict[tuple[int, int], tuple[list[Tensor], Sequence[Tensor]]] = {}
        self.losses: dict[int, float] = {}
        self.last_loss: Sequence[
            Tensor
        ] = ()  # the last loss: its graph, freed of tensors, is taken apart after a forward
        self.batch_norm: BatchNormState | None = None  # what modules of batch norm do, where a plan changes that
        self.recompute_store = RecomputeStore()  # what is computed again for its backward
        self.unused_params = "error"  # what a parameter without a gradient means; a commit looks
        self.by_first = {first: (stop, segment) for (first, stop), segment in model.segments.items()}
        self.by_stop = {stop: (first, segment) for (first, stop), segment in model.segments.items()}
        self.freed_by_backward = values_freed_by_backward(model.segments)

    def segments_in(self, first: int, last: int) -> Iterator[Segment]:
        """Yield the segments of a run of blocks."""
        block = first
        while block <= last:
            block, segment = self.by_first[block]
            yield segment

    def begin_step(self, batch: MicrobatchSource, loss_weights: LossWeights, microbatches_per_batch: int = 0) -> None:
        """Start a step on a global batch.

        Args:
            feed: the batch, or those under way.
            shares: the part of each microbatch's mean loss in the loss that is differentiated.
            stride: in a stream, how many microbatches a batch has; what is under way then stays.
        """
        self.batch = batch
        self.loss_weights = loss_weights
        self.microbatches_per_batch = microbatches_per_batch
        self.grad_sinks = build_grad_sinks(self.store, self.weight_grad_queue)
        self.losses.clear()
        if self.batch_norm is not None:
            self.batch_norm.begin_step(is_async_pipeline=bool(microbatches_per_batch))
        if not microbatches_per_batch:
            self.clear_values()

    def clear_values(self) -> None:
        """Forget what forwards have made."""
        for books in (self.values, self.grads, self.saved, self.deferred_jobs, self.recompute_store.saved):
            books.clear()

    def clear(self) -> None:
        """Forget all that is under way."""
        self.clear_values()
        self.last_loss = ()
        if self.batch_norm is not None:
            self.batch_norm.clear()

    def is_empty(self, micro: int) -> bool:
        """Tell whether a microbatch has no samples, so that nothing is computed for it."""
        assert self.batch is not None, "a step has begun"
        return self.batch.sizes[micro] == 0

    def forward(self, first: int, last: int, micro: int, version: int = 0) -> None:
        """Run blocks ``first`` to ``last`` forward and keep what backward needs."""
        if self.is_empty(micro):
            self.sync_running_stats(first, last, micro)
            return
        block = first
        while block <= last:
            stop, segment = self.by_first[block]
            leaves = self.make_leaves(segment, micro)
            if self.recompute_store.is_recomputed(block, micro):
                once = SavedForward(
                    segment, leaves, self.store.buffers, self.recompute_store.changed_buffers.get(block)
                )
                with once.no_saved_tensors():
                    outputs = self.run_segment(block, leaves, micro, version)
                self.recompute_store.save(
                    (block, micro), once, outputs, self.describe_location(block, stop, micro, leaves)
                )
                if self.recompute_store.input_is_recomputed(block, micro):
                    self.drop_recomputed_inputs(once, self.model.edge_values.get((block - 1, block), ()), micro)
            else:
                outputs = self.run_segment(block, leaves, micro, version)
                self.saved[block, micro] = (leaves, outputs)
            if stop < self.model.num_blocks:
                for at, output in zip(segment.outputs, outputs, strict=True):
                    self.values[at, micro] = StoredValue(output.detach(), output.requires_grad)
            block = stop
        self.sync_running_stats(first, last, micro)

    def drop_recomputed_inputs(self, saved_forward: SavedForward, recomputed: Sequence[int], micro: int) -> None:
        """Keep nothing of what the recomputation of the block before makes again, which only this block reads."""
        saved_forward.drop_inputs(recomputed)
        for at in recomputed:
            self.values.pop((at, micro), None)

    def recompute(self, first: int, last: int, micro: int, version: int = 0) -> None:
        """Run blocks forward again from what their forward has read, for their backward."""
        block = first
        made: dict[int, Tensor] = {}
        while block <= last and not self.is_empty(micro):
            stop, segment = self.by_first[block]
            with self.recompute_store.replay((block, micro)) as once:
                leaves = once.make_leaves(made)
                outputs = self.run_segment(block, leaves, micro, version, once.buffers)
                once.require_same_outputs(outputs, self.describe_location(block, stop, micro, leaves))
            self.saved[block, micro] = (leaves, outputs)
            made = dict(zip(segment.outputs, outputs, strict=stop < self.model.num_blocks))
            block = stop

    def run_segment(
        self,
        block: int,
        leaves: Sequence[Tensor],
        micro: int,
        version: int,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> Sequence[Tensor]:
        """Call one segment on leaves of autograd; return what it gives, at the end the loss."""
        self.rng.step, self.rng.micro = self.step_and_micro(micro)
        stop, segment = self.by_first[block]
        seed = make_seeder(self.rng, uses_rng=self.model.uses_rng)
        try:
            with self.autocast(micro), self.function_mode(block, micro, is_recompute=buffers is not None):
                outputs = segment(leaves, self.store.weights(version), buffers or self.store.buffers, seed)
        except Exception as error:
            add_location(error, self.describe_location(block, stop, micro, leaves))
            raise
        if stop == self.model.num_blocks:
            with self.autocast(micro), FusedCrossEntropyMode():
                outputs = self.last_loss = (self.compute_loss(outputs, micro),)
        return outputs

    def step_and_micro(self, micro: int) -> tuple[int, int]:
        """Return the step of a microbatch, and which of that it is; a stream counts those of all batches."""
        return divmod(micro, self.microbatches_per_batch) if self.microbatches_per_batch else (self.rng.step, micro)

    def autocast(self, micro: int) -> AbstractContextManager[object]:
        """Have the autocasts of the call that brought a microbatch, also where a later one comes to it."""
        return (
            autocast_as(self.batch.autocasts(micro)) if isinstance(self.batch, AsyncPipelineBatches) else nullcontext()
        )

    def function_mode(self, block: int, micro: int, *, is_recompute: bool = False) -> AbstractContextManager[object]:
        """Have gradients of weights written straight to where they belong, if there is such a place.

        Batch norm does what it does in this plan, if there is any; again, it takes in no statistics.
        """
        assert self.batch is not None, "a step has begun"
        normal = (
            self.batch_norm.replacements(block, micro, self.batch.sizes, is_recompute=is_recompute)
            if self.batch_norm is not None
            else {}
        )
        if any(self.grad_sinks):
            return InPlaceGradMode(self.grad_sinks, normal)
        return InterceptFunctions(normal) if normal else nullcontext()

    def sync_running_stats(self, first: int, last: int, micro: int) -> None:
        """Bring running statistics of what replicas normalize together to those that had no samples."""
        if self.batch_norm is not None:
            assert self.batch is not None, "a step has begun"
            names = [name for segment in self.segments_in(first, last) for name in segment.buffers]
            self.batch_norm.broadcast_stats(names, first, micro, self.batch.sizes)

    def describe_location(self, block: int, stop: int, micro: int, values: Sequence[Tensor]) -> str:
        """Return which blocks run on which samples, as text for errors."""
        assert self.batch is not None, "a step has begun"
        blocks = f"block {block}" if stop == block + 1 else f"blocks {block} to {stop - 1}"
        shapes = ", ".join(str(tuple(value.shape)) for value in values)
        step, number = self.step_and_micro(micro)
        count = sum(size for other, size in self.batch.sizes.items() if self.step_and_micro(other)[0] == step)
        return (
            f"{blocks} of {self.model.num_blocks} on microbatch {number} of step {step}, which has "
            f"{self.batch.sizes[micro]} of the batch's {count} samples, with inputs of the shapes {shapes}"
        )

    def make_leaves(self, segment: Segment, micro: int) -> list[Tensor]:
        """Return what a segment takes, each to be differentiated by itself; the model's inputs are read from the feed.

        The model's inputs come first, and there is no gradient of them.
        """
        count = sum(at < self.model.num_inputs for at in segment.inputs)
        taken: list[Tensor] = []
        if count:
            assert self.batch is not None, "a step has begun"
            inputs = self.model.flatten(self.batch.inputs(micro))
            taken = [inputs[at] for at in segment.inputs[:count]]
        for value, carries in (self.values[at, micro] for at in segment.inputs[count:]):
            taken.append(value.detach().requires_grad_() if carries else value)
        return taken

    def compute_loss(self, outputs: Sequence[Tensor], micro: int) -> Tensor:
        """Return the microbatch's part of the step's loss, and note its mean loss."""
        assert self.batch is not None, "a step has begun"
        loss: Any = self.model.loss(self.model.unflatten(outputs), self.batch.targets(micro))
        if not isinstance(loss, Tensor) or loss.dim() > 0:
            found = f"has the shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"is a {type(loss).__name__}"
            raise DataError(
                f"the loss of microbatch {self.step_and_micro(micro)[1]} {found}; it must be a tensor of one number, the "
                "mean over the samples: leave reduction='mean', and return it before item() or float()"
            )
        self.losses[micro] = float(loss.detach())
        weight = self.loss_weights.weights[micro]
        weighted: Tensor = loss * weight if weight != 1.0 else loss
        return weighted

    def backward(self, first: int, last: int, micro: int, version: int = 0) -> None:
        """Run blocks ``last`` down to ``first`` backward; gradients are added to the parameters'."""
        if self.is_empty(micro):
            return
        stop = last + 1
        while stop > first:
            block, segment = self.by_stop[stop]
            leaves, outputs = self.saved.pop((block, micro))
            roots, gradients = self.take_backward_roots(segment, outputs, micro)
            if any(root.requires_grad for root in roots):
                with (
                    self.autocast(micro),
                    self.function_mode(block, micro, is_recompute=True),
                ):  # as where it checkpoints
                    self.run_autograd(roots, gradients)
                self.store.fold_version_grads(version)
            for at, leaf in zip(segment.inputs, leaves, strict=True):
                if leaf.grad is not None and at >= self.model.num_inputs:
                    self.add_grad(at, micro, leaf.grad)
            for at in (*segment.outputs, *self.freed_by_backward[block]):
                self.values.pop((at, micro), None)
            stop = block

    def backward_input(self, first: int, last: int, micro: int) -> None:
        """Run blocks backward as :meth:`backward` does, but put off what only makes gradients of weights."""
        assert self.weight_grad_queue is not None, "a row with parts of backwards has one"
        for start, stop in self.segment_bounds_reversed(first, last):
            with self.weight_grad_queue.recording() as jobs:
                self.backward(start, stop - 1, micro)
            self.deferred_jobs[start, micro] = jobs

    def backward_weight(self, first: int, last: int, micro: int) -> None:
        """Make the gradients of weights that blocks have put off."""
        with torch.no_grad():
            for start, _ in self.segment_bounds_reversed(first, last):
                for job in self.deferred_jobs.pop((start, micro)):
                    job()

    def segment_bounds_reversed(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield the first block and one past the last of each segment of a run, the last segment first."""
        stop = last + 1
        while stop > first:
            start, _ = self.by_stop[stop]
            yield start, stop
            stop = start

    def run_autograd(self, roots: Sequence[Tensor], grads: OptionalGrads) -> None:
        """Run autograd; gradients are added to the parameters'."""
        self.store.in_backward = True
        try:
            if any(self.grad_sinks) or self.batch_norm is not None:
                run_backward(roots, grads)
            else:
                torch.autograd.backward(roots, grads)
        finally:
            self.store.in_backward = False

    def take_backward_roots(
        self, segment: Segment, outputs: Sequence[Tensor], micro: int
    ) -> tuple[list[Tensor], OptionalGrads]:
        """Return what autograd starts from, with the gradients that have come for it, which are forgotten here."""
        if not segment.outputs:  # the model's last one: its output has become the loss, or a block that nobody reads
            return list(outputs), [None] * len(outputs)
        roots: list[Tensor] = []
        gradients: OptionalGrads = []
        for at, output in zip(segment.outputs, outputs, strict=True):
            gradient = self.grads.pop((at, micro), None)
            if gradient is not None and output.requires_grad:
                roots.append(output)
                gradients.append(gradient)
        return roots, gradients

    def add_grad(self, at: int, micro: int, grad: Tensor) -> None:
        """Add what a reader of a value contributes to its gradient."""
        before = self.grads.get((at, micro))
        self.grads[at, micro] = grad if before is None else before + grad

    def attached_loss(self, micro: int) -> list[Tensor]:
        """Return what goes with a gradient to the stage before: in a stream the loss, which all stages decide by."""
        return [torch.tensor(self.losses[micro], dtype=torch.float64)] if self.microbatches_per_batch else []

    def receive_loss(self, micro: int, peer: int, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Note the loss that came with a gradient; return the gradient, as a part of what is decided on here."""
        if not self.microbatches_per_batch:
            return tensors
        self.losses[micro] = float(tensors[0])
        ratio = self.loss_weights.upstream_ratios.get((micro, peer), 1.0)
        return [tensor * ratio for tensor in tensors[1:]] if ratio != 1.0 else tensors[1:]

    def partial_output(self, block: int, micro: int) -> Tensor | None:
        """Return the partial output of a sliced block, to be summed in place; None when there is none."""
        if self.is_empty(micro):
            return None
        _, segment = self.by_stop[block + 1]
        (at,) = segment.partial_outputs
        kept = self.values[at, micro]
        fresh = kept.value.clone(memory_format=torch.contiguous_format)
        self.values[at, micro] = StoredValue(fresh, kept.requires_grad)
        return fresh

    def partial_input_grad(self, block: int, micro: int) -> Tensor | None:
        """Return the partial input gradient of a sliced block, to be summed in place; None when there is none."""
        if self.is_empty(micro):
            return None
        _, segment = self.by_first[block]
        (at,) = segment.partial_inputs
        gradient = self.grads.get((at, micro))
        if gradient is None:
            return None
        self.grads[at, micro] = gradient.contiguous()
        return self.grads[at, micro]
