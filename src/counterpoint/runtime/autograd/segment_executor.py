"""Forward and backward of one rank: segments of the model, each with an autograd graph of its own.

A segment's inputs are detached leaves (1), so that autograd stops there; its outputs are stored detached (2) for the
segments that read them. Backward starts from the outputs with the gradients that their readers have added up (3), and
adds the gradients of its own leaves to those of the values that it read (4)::

    values[v] --detach--> leaves (1) --segment--> outputs --detach--> values[w] (2)
    grads[v]  <---(4)---- leaf.grad <--autograd-- outputs <---(3)---- grads[w]

A value's readers may be segments of this rank or of others: sends and receives read and write the same dictionaries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import has_torch_function
from torch.utils._pytree import tree_flatten, tree_unflatten

from counterpoint.device.accelerator import Accelerator
from counterpoint.device.pending_scalars import PendingScalars
from counterpoint.errors import DataError
from counterpoint.partitioning.dry_run import add_location, raise_dtype_error
from counterpoint.partitioning.input_shapes import InputShapes
from counterpoint.partitioning.partitioned_model import FlatInputs, Segment, as_call_args
from counterpoint.partitioning.seed_hooks import no_seed
from counterpoint.program.instruction import Fetch, Offload, TensorRef
from counterpoint.runtime.autograd.deferred_weight_grad import WeightGradJob, WeightGradQueue, build_grad_sinks
from counterpoint.runtime.autograd.recompute import RecomputeStore, SavedForward
from counterpoint.runtime.batch_copies import BatchCopies, BatchPart, MicrobatchRead
from counterpoint.runtime.batch_norm.mode import BatchNormState
from counterpoint.runtime.compiled_draws import CompiledMode, write_draws
from counterpoint.runtime.gradient_code import explain_other_scale
from counterpoint.runtime.kernels.compiled_linear import CompiledSinks
from counterpoint.runtime.kernels.function_mode import InterceptFunctions
from counterpoint.runtime.kernels.weight_grad import GradSinks, in_place_grad_functions, run_backward
from counterpoint.runtime.loss.batch_loss import (
    EncodedSamples,
    MicrobatchOutput,
    flatten_output,
    merge_microbatches,
    split_grads,
    unflatten_batch,
)
from counterpoint.runtime.loss.loss_check import LateLossCheck, LossCheck, LossSamples, count_in_place_changes
from counterpoint.runtime.loss.loss_parameters import LossParameters
from counterpoint.runtime.loss.loss_reduction import LossFunction, PartTotal, ReductionRecorder, compute_mean_loss
from counterpoint.runtime.microbatches import (
    AsyncPipelineBatches,
    LossFactors,
    MicrobatchSource,
    autocast_as,
    is_copied,
)
from counterpoint.runtime.offload.offloaded_inputs import OffloadedInputs
from counterpoint.runtime.offload.partitioned_values import ValuePart, split_value
from counterpoint.runtime.params.grad_check import ParamGroup
from counterpoint.runtime.params.param_store import ParamStore
from counterpoint.runtime.rng.sample_rng import SampleRange, SampleRNG


@dataclass(frozen=True, slots=True)
class BoundModel:
    """The partitioned model's functions that a rank runs, and how to enter and leave them.

    Args:
        segments: by first block and one past the last.
        num_blocks: blocks of the whole model.
        num_inputs: number of values that are the model's own inputs; they come first.
        edge_values: the values of each edge, by its producer and its consumers.
        flatten: from a microbatch's inputs, as the arguments of a call, to their values and shapes.
        unflatten: from the outputs of the last segment, and the shapes of the inputs, to the model's output.
        loss: from the model's output and the targets to a scalar, the mean over the samples, or a
            :class:`counterpoint.runtime.loss.loss_reduction.WeightedMean`.
        uses_rng: whether the model draws random numbers.
        loss_is_sum: whether the loss is a sum over samples.
        checks_loss: whether the first loss is checked to be what the losses of its samples' halves add up to.
        checks_loss_state: whether it is checked that a loss that is called several times in a step keeps no state.
        num_loss_calls: how often this process calls the loss in a step.
        gathers_outputs: whether the loss is evaluated on the gathered outputs of the whole batch.
        loss_params: evaluates a loss with parameters; None for one without.
        autocast: torch's dtype of the plan's own autocast; None for that of the caller.
        read_dtypes: of the parameters that all segments read in a narrower dtype.
        scaling_code: code of the model whose gradients are not proportional to those of its outputs; empty for none.
    """

    segments: Mapping[tuple[int, int], Segment]
    num_blocks: int
    num_inputs: int
    edge_values: Mapping[tuple[int, ...], Sequence[int]]
    flatten: Callable[[Any], FlatInputs]
    unflatten: Callable[..., Any]
    loss: LossFunction
    uses_rng: bool
    loss_is_sum: bool = False
    checks_loss: bool = False
    checks_loss_state: bool = False
    num_loss_calls: int = 1
    gathers_outputs: bool = False
    loss_params: LossParameters | None = None
    autocast: torch.dtype | None = None
    read_dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    scaling_code: str = ""


class StoredValue(NamedTuple):
    """A detached value, and whether it needs a gradient."""

    value: Tensor
    requires_grad: bool


def values_freed_by_backward(segments: Mapping[tuple[int, int], Segment]) -> dict[int, list[int]]:
    """Return for each segment, by first block, the values that no segment here needs after its backward."""
    first_consumer: dict[int, int] = {}
    for first, stop in sorted(segments):
        for value in segments[first, stop].inputs:
            first_consumer.setdefault(value, first)
    return {first: [value for value, consumer in first_consumer.items() if consumer == first] for first, _ in segments}


OptionalGrads = list["Tensor | None"]


CHANGED_TARGETS = (
    "the loss changes its targets or the output in place ({what}), but several ranks of this process compute it from "
    "the same tensors, and each would change them again; change a copy, as by targets * 0.9 instead of "
    "targets.mul_(0.9), or train with one rank in each process"
)
CHANGED_COPIES = (
    "the loss changes its targets in place ({what}), as a plain loop would see, but accumulated batches, and those in "
    "flight in an asynchronous pipeline, are copies; change a copy, as by targets * 0.9 instead of targets.mul_(0.9)"
)
INNER_MEAN = (
    "the model computes a mean over class indices (F.cross_entropy, F.nll_loss) of {what} inside of a graph of "
    "compile= that is not its last one, so that its output is not such a mean, and the losses of microbatches do not "
    "add up; return the mean itself, or the logits and compute it in loss="
)


class SegmentExecutor:
    """Runs the compute instructions of one rank.

    Args:
        model: the functions to run.
        store: the rank's parameters and buffers.
        rng: the rank's random state.
        weight_grad_queue: defers weight gradients; None if all backwards are whole.
        batch_norm: the rank's batch norm modules; None where the plan changes nothing about them.
        accelerator: that the rank computes on.

    Attributes:
        copies: of its batches, started ahead; None to copy each microbatch when it is read.
        offloaded_inputs: where the inputs of blocks that are recomputed are on disk; None if they stay in memory.
    """

    def __init__(
        self,
        model: BoundModel,
        store: ParamStore,
        rng: SampleRNG,
        weight_grad_queue: WeightGradQueue | None = None,
        batch_norm: BatchNormState | None = None,
        *,
        accelerator: Accelerator,
    ) -> None:
        self.model = model
        self.store = store
        self.rng = rng
        self.weight_grad_queue = weight_grad_queue
        self.grad_sinks = GradSinks()
        self.deferred_jobs: dict[tuple[int, int], list[WeightGradJob]] = {}
        self.batch: MicrobatchSource | None = None
        self.loss_factors = LossFactors({})
        self.microbatches_per_batch = 0
        self.values: dict[tuple[int, int], StoredValue] = {}  # (2), by value and microbatch
        self.grads: dict[tuple[int, int], Tensor] = {}  # (3), by value and microbatch
        self.saved: dict[tuple[int, int], tuple[list[Tensor], Sequence[Tensor]]] = {}  # leaves (1) and outputs
        self.input_shapes: dict[int, InputShapes] = {}  # of the model's inputs, by microbatch
        self.sample_ranges: dict[int, tuple[int, int, SampleRange]] = {}  # step, index and samples, by microbatch
        self.outputs: dict[int, MicrobatchOutput] = {}  # of the last block, until they are gathered
        self.output_grads: dict[int, list[Tensor | None]] = {}  # from gathering them to their backward
        self.losses: dict[int, float] = {}
        self.accelerator = accelerator
        self.copies: BatchCopies | None = None
        self.offloaded_inputs: OffloadedInputs | None = None
        self.pending_losses = PendingScalars(accelerator)
        self.loss_weights: dict[int, float] = {}  # of microbatches whose loss is a weighted mean
        self.pending_loss_weights = PendingScalars(accelerator)
        self.loss_parts: dict[int, dict[str, PartTotal]] = {}  # of losses that are dicts, by microbatch
        self.loss_check = self.make_loss_check()
        self.rng.checks_loss = self.loss_check is not None
        self.weights: Mapping[str, Tensor] = {}  # of the version that the last segment read
        self.reduces_inside = True  # whether the last segment may itself compute a loss; known after its first run
        self.last_loss: Sequence[Tensor] = ()  # kept, so that its freed graph is destroyed after the next forward
        self.batch_norm = batch_norm
        self.recompute_store = RecomputeStore()  # inputs of forwards that are recomputed
        self.parts: dict[tuple[int, int], tuple[ValuePart, bool]] = {}  # of values, and whether these need a gradient
        self.by_first = {first: (stop, segment) for (first, stop), segment in model.segments.items()}
        self.by_stop = {stop: (first, segment) for (first, stop), segment in model.segments.items()}
        self.freed_by_backward = values_freed_by_backward(model.segments)
        self.compiled_parts = {  # of each compiled segment, with their draws in order
            first: [(part, rng.sites_of(part.drawing_calls)) for part in segment.parts or (segment,)]
            for first, (_, segment) in self.by_first.items()
            if segment.is_compiled
        }
        self.compiled_sinks = CompiledSinks() if self.compiled_parts else None
        self.trainable_params = {  # of each segment, by first block
            first: ParamGroup(
                {name: store.params[name] for name in segment.params if store.params[name].requires_grad},
                store.grad_check.products,
            )
            for first, (_, segment) in self.by_first.items()
        }

    def make_loss_check(self) -> LossCheck | None:
        """Return what checks the loss; None if each microbatch may be a batch of its own."""
        model = self.model
        if not model.checks_loss and not model.checks_loss_state:
            return None
        return LossCheck(model.loss, is_sum=model.loss_is_sum, checks_parts=model.checks_loss, may_be_late=True)

    def segments_in(self, first: int, last: int) -> Iterator[Segment]:
        """Yield the segments of a range of blocks."""
        block = first
        while block <= last:
            block, segment = self.by_first[block]
            yield segment

    def begin_step(self, batch: MicrobatchSource, loss_factors: LossFactors, microbatches_per_batch: int = 0) -> None:
        """Start a step on a global batch.

        Args:
            batch: the batch, or those in flight.
            loss_factors: of each microbatch.
            microbatches_per_batch: in an asynchronous pipeline, where what is in flight is kept; else 0.
        """
        self.batch = batch
        self.loss_factors = loss_factors
        self.microbatches_per_batch = microbatches_per_batch
        self.sample_ranges.clear()
        self.grad_sinks = build_grad_sinks(self.store, self.weight_grad_queue)
        if self.compiled_sinks is not None:
            self.compiled_sinks.begin_step(self.store.params.values(), self.grad_sinks.weight_sinks)
        for scalars in (
            self.losses,
            self.pending_losses,
            self.loss_weights,
            self.pending_loss_weights,
            self.loss_parts,
        ):
            scalars.clear()
        if self.batch_norm is not None:
            self.batch_norm.begin_step(is_async_pipeline=bool(microbatches_per_batch))
        if not microbatches_per_batch:
            self.clear_values()
        for micro in self.input_shapes.keys() - batch.sizes.keys():
            del self.input_shapes[micro]

    def clear_values(self) -> None:
        """Drop everything that forwards have stored."""
        for stored in (
            self.values,
            self.grads,
            self.saved,
            self.deferred_jobs,
            self.recompute_store.saved,
            self.parts,
            self.input_shapes,
            self.outputs,
            self.output_grads,
        ):
            stored.clear()
        if self.offloaded_inputs is not None:
            self.offloaded_inputs.clear()

    def clear(self) -> None:
        """Drop everything in flight."""
        self.clear_values()
        self.last_loss = ()
        if self.batch_norm is not None:
            self.batch_norm.clear()

    def is_empty(self, micro: int) -> bool:
        """Return whether a microbatch has no samples, so that nothing is computed for it."""
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
                saved_forward = SavedForward(
                    segment, leaves, self.store.buffers, self.recompute_store.changed_buffers.get(block)
                )
                with saved_forward.no_saved_tensors():
                    outputs = self.run_segment(block, leaves, micro, version)
                self.recompute_store.save(
                    (block, micro), saved_forward, outputs, self.describe_location(block, stop, micro, leaves)
                )
                if self.recompute_store.input_is_recomputed(block, micro):
                    self.drop_recomputed_inputs(
                        saved_forward, self.model.edge_values.get((block - 1, block), ()), micro
                    )
            else:
                outputs = self.run_segment(block, leaves, micro, version)
                self.saved[block, micro] = (leaves, outputs)
            if stop < self.model.num_blocks:
                for index, output in zip(segment.outputs, outputs, strict=True):
                    self.values[index, micro] = StoredValue(output.detach(), output.requires_grad)
            elif self.model.gathers_outputs:
                self.outputs[micro] = self.flatten_output(outputs, micro)
            block = stop
        self.sync_running_stats(first, last, micro)

    def drop_recomputed_inputs(self, saved_forward: SavedForward, recomputed: Sequence[int], micro: int) -> None:
        """Drop inputs that only this block reads, and that exist again before its recomputation."""
        saved_forward.drop_inputs(recomputed)
        for index in recomputed:
            self.values.pop((index, micro), None)

    def recompute(self, first: int, last: int, micro: int, version: int = 0) -> None:
        """Run blocks forward again for their backward, from the saved inputs of their forward."""
        block = first
        produced: dict[int, Tensor] = {}
        while block <= last and not self.is_empty(micro):
            stop, segment = self.by_first[block]
            with self.recompute_store.replay((block, micro)) as saved_forward:
                leaves = saved_forward.make_leaves({**self.gathered_inputs(segment, micro), **produced})
                outputs = self.run_segment(block, leaves, micro, version, saved_forward.buffers)
                self.recompute_store.check_outputs(
                    saved_forward, outputs, self.describe_location(block, stop, micro, leaves)
                )
            self.saved[block, micro] = (leaves, outputs)
            produced = dict(zip(segment.outputs, outputs, strict=stop < self.model.num_blocks))
            block = stop

    def keep_part(self, tensor: TensorRef, rank: int) -> None:
        """Keep this rank's part of a block's input, which its group gathers before the block is recomputed."""
        block, micro = tensor.blocks[0], tensor.micro
        assert micro is not None, "the input of a microbatch"
        if self.is_empty(micro):
            return
        group = self.recompute_store.recompute_set.partitioned[tensor]
        for index in self.model.edge_values[block - 1, block]:
            stored = self.values[index, micro]
            part = split_value(stored.value, group.index(rank), len(group))
            if part is not None:
                self.parts[index, micro] = part, stored.requires_grad
                self.drop_recomputed_inputs(self.recompute_store.saved[block, micro], [index], micro)

    def allocate_inputs(self, tensor: TensorRef) -> Iterator[tuple[Tensor, Sequence[int]]]:
        """Yield for each input of a block, of which parts are kept, a buffer to gather them in, and their bounds.

        The input is stored, in the memory of this buffer.
        """
        block, micro = tensor.blocks[0], tensor.micro
        assert micro is not None, "the input of a microbatch"
        for index in self.model.edge_values[block - 1, block]:
            if (index, micro) in self.parts:
                part, requires_grad = self.parts.pop((index, micro))
                whole = part.allocate_whole()
                self.values[index, micro] = StoredValue(part.view_value(whole), requires_grad)
                yield whole, part.bounds

    def move_input(self, instruction: Fetch | Offload) -> None:
        """Start to write a block's input to disk and drop it, or start to read it."""
        block, micro = instruction.tensor.blocks[0], instruction.tensor.micro
        assert micro is not None, "the input of a microbatch"
        assert self.offloaded_inputs is not None, "the plan offloads inputs"
        if self.is_empty(micro):
            return
        for index in self.model.edge_values[block - 1, block]:
            if isinstance(instruction, Fetch):
                self.offloaded_inputs.start_read((index, micro))
                continue
            value, requires_grad = self.values[index, micro]
            if self.offloaded_inputs.start_write((index, micro), value, requires_grad=requires_grad):
                self.drop_recomputed_inputs(self.recompute_store.saved[block, micro], [index], micro)

    def gathered_inputs(self, segment: Segment, micro: int) -> dict[int, Tensor]:
        """Return the stored inputs of a segment, by value; wait for those that are read from disk."""
        for index in segment.inputs:
            fetched = None if self.offloaded_inputs is None else self.offloaded_inputs.take((index, micro))
            if fetched is not None:
                self.values[index, micro] = StoredValue(*fetched)
        found = ((index, self.values.get((index, micro))) for index in segment.inputs)
        return {
            index: stored.value.detach().requires_grad_(stored.requires_grad)
            for index, stored in found
            if stored is not None
        }

    def run_segment(
        self,
        block: int,
        leaves: Sequence[Tensor],
        micro: int,
        version: int,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> Sequence[Tensor]:
        """Run one segment on leaves; return its outputs; of the last one the loss, unless outputs are gathered."""
        self.begin_microbatch(micro)
        stop, segment = self.by_first[block]
        seed = self.rng if self.model.uses_rng else no_seed
        weights = self.store.weights_for_forward(version)
        is_whole = self.model.gathers_outputs or micro in self.loss_factors.is_whole
        recorder = ReductionRecorder(is_whole=is_whole) if stop == self.model.num_blocks else None
        try:
            if segment.is_compiled:
                outputs = self.run_compiled(block, leaves, micro, weights, buffers or self.store.buffers, recorder)
            else:
                with self.autocast(micro), self.function_mode(block, micro, recorder, is_recompute=buffers is not None):
                    outputs = segment(leaves, weights, buffers or self.store.buffers, seed, self.shapes_of(micro))
        except Exception as error:
            location = self.describe_location(block, stop, micro, leaves)
            if block == 0:
                params = [weights[name] for name in segment.params if name in weights]
                raise_dtype_error(error, f"the forward of {location}", leaves, params)
            add_location(error, location)
            raise
        if recorder is not None:
            self.reduces_inside, self.weights = bool(recorder.found), self.store.weights(version)
        if recorder is not None and not self.model.gathers_outputs:
            outputs = self.last_loss = (self.compute_loss(outputs, micro, recorder),)
        return outputs

    def run_compiled(
        self,
        block: int,
        leaves: Sequence[Tensor],
        micro: int,
        weights: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        recorder: ReductionRecorder | None,
    ) -> tuple[Tensor, ...]:
        """Run the compiled parts of one segment; random numbers are an input, weights of means an output of graphs."""
        segment = self.by_first[block][1]
        outputs: tuple[Tensor, ...] = ()
        values = dict(zip(segment.inputs, leaves, strict=False))  # a whole model may have more leaves
        is_whole = self.model.gathers_outputs or micro in self.loss_factors.is_whole
        for part, sites in self.compiled_parts[block]:
            draws = write_draws(self.rng.list_draws(sites)) if self.model.uses_rng else None
            mode = CompiledMode(draws, self.make_sinks_handle(part), is_whole=is_whole)
            inputs = [values[index] for index in part.inputs] if segment.parts else leaves
            with self.autocast(micro):
                outputs = part(inputs, weights, buffers, mode, self.shapes_of(micro))
            mode.require_complete()
            if recorder is not None:
                recorder.add_found(mode.means)
            elif mode.means and not is_whole:
                raise DataError(INNER_MEAN.format(what=f"microbatch {self.step_and_micro(micro)[1]}"))
            values.update(zip(part.outputs, outputs, strict=bool(part.outputs)))
        return tuple(values[index] for index in segment.outputs) or outputs

    def make_sinks_handle(self, part: Segment) -> Tensor | None:
        """Return what a graph finds the sinks of its large weights by; None to return all gradients from the graph."""
        if self.compiled_sinks is None or self.store.weight_versions is not None or not torch.is_grad_enabled():
            return None
        return self.compiled_sinks.make_handle(self.store.params[name] for name in part.params)

    def begin_microbatch(self, micro: int) -> None:
        """Let random numbers be for the samples of this microbatch."""
        if micro not in self.sample_ranges:
            self.sample_ranges[micro] = *self.step_and_micro(micro), self.find_samples(micro)
        self.rng.begin_microbatch(*self.sample_ranges[micro])

    def find_samples(self, micro: int) -> SampleRange:
        """Return which samples of its batch a microbatch has."""
        assert self.batch is not None, "a step has begun"
        _, index = self.step_and_micro(micro)
        sizes, first = self.batch.sizes, micro - index
        before = sum(sizes[earlier] for earlier in range(first, micro))
        num_micros = self.microbatches_per_batch or len(sizes)
        batch_size = before + sum(sizes[later] for later in range(micro, first + num_micros))
        return SampleRange(before, sizes[micro], batch_size)

    def shapes_of(self, micro: int) -> InputShapes:
        """Return the shapes of a microbatch's inputs, which messages bring to ranks that do not read these."""
        if micro not in self.input_shapes:
            assert self.batch is not None, "a step has begun"
            self.input_shapes[micro] = self.model.flatten(as_call_args(self.batch.inputs(micro))).shapes
        return self.input_shapes[micro]

    def step_and_micro(self, micro: int) -> tuple[int, int]:
        """Return the step of a microbatch, and its index in that step."""
        return divmod(micro, self.microbatches_per_batch) if self.microbatches_per_batch else (self.rng.step, micro)

    def autocast(self, micro: int) -> AbstractContextManager[object]:
        """Enter the autocasts under which the microbatch was submitted, which may have been in an earlier step."""
        if self.model.autocast is not None or not isinstance(self.batch, AsyncPipelineBatches):
            return nullcontext()
        return autocast_as(self.batch.autocasts(micro))

    def function_mode(
        self, block: int, micro: int, recorder: ReductionRecorder | None = None, *, is_recompute: bool = False
    ) -> AbstractContextManager[object]:
        """Return the function mode for a segment: weight gradients, batch norm, losses in the model, random numbers.

        Args:
            block: the first of the segment.
            micro: the microbatch.
            recorder: of the losses in the last segment; None for others.
            is_recompute: whether the segment runs for a backward.
        """
        assert self.batch is not None, "a step has begun"
        replacements = (
            self.batch_norm.replacements(block, micro, self.batch.sizes, is_recompute=is_recompute)
            if self.batch_norm is not None
            else {}
        )
        if self.model.uses_rng:
            replacements = {**replacements, **self.rng.functions}
        if recorder is not None and (self.reduces_inside or any(self.grad_sinks)):
            replacements = {**replacements, **recorder.replacements}
        if any(self.grad_sinks):
            replacements = {**replacements, **in_place_grad_functions(self.grad_sinks)}
        return InterceptFunctions(replacements) if replacements else nullcontext()

    def sync_running_stats(self, first: int, last: int, micro: int) -> None:
        """Send running statistics of synchronized batch norm to members without samples."""
        if self.batch_norm is not None:
            assert self.batch is not None, "a step has begun"
            names = [name for segment in self.segments_in(first, last) for name in segment.buffers]
            self.batch_norm.broadcast_stats(names, first, micro, self.batch.sizes)

    def describe_location(self, block: int, stop: int, micro: int, values: Sequence[Tensor]) -> str:
        """Return which blocks run on which samples, as text for errors."""
        assert self.batch is not None, "a step has begun"
        blocks = f"block {block}" if stop == block + 1 else f"blocks {block} to {stop - 1}"
        shapes = ", ".join(str(tuple(value.shape)) for value in values)
        step, index = self.step_and_micro(micro)
        return (
            f"{blocks} of {self.model.num_blocks} on microbatch {index} of step {step}, which has "
            f"{self.batch.sizes[micro]} of the batch's {self.batch_size_of(step)} samples, with inputs of the shapes "
            f"{shapes}"
        )

    def batch_size_of(self, step: int) -> int:
        """Return the number of samples of a step's batch."""
        assert self.batch is not None, "a step has begun"
        return sum(size for micro, size in self.batch.sizes.items() if self.step_and_micro(micro)[0] == step)

    def make_leaves(self, segment: Segment, micro: int) -> list[Tensor]:
        """Return a segment's inputs as leaves: the model's own from the batch, without gradient, then stored values."""
        count = sum(index < self.model.num_inputs for index in segment.inputs)
        leaves: list[Tensor] = []
        if count:
            assert self.batch is not None, "a step has begun"
            inputs, self.input_shapes[micro] = self.model.flatten(as_call_args(self.batch.inputs(micro)))
            is_all = count == self.model.num_inputs  # a whole model may have more of them than in the first batch
            positions = range(len(inputs)) if is_all else segment.inputs[:count]
            leaves = [inputs[index] for index in positions]
            if not self.accelerator.is_host:
                leaves = self.move_to_device("inputs", micro, leaves, positions)
        for value, requires_grad in (self.values[index, micro] for index in segment.inputs[count:]):
            leaves.append(value.detach().requires_grad_() if requires_grad else value)
        return leaves

    def loss_function(self, share: float = 1.0) -> LossFunction:
        """Return the loss with this rank's parameters of it.

        Args:
            share: of the gradients of these parameters that this rank computes.
        """
        params = self.model.loss_params
        return self.model.loss if params is None else partial(params.call, self.weights, self.model.loss, share=share)

    def read_targets(self, micro: int) -> Any:  # noqa: ANN401 - whatever the loss takes
        """Return the targets of a microbatch, on the model's device."""
        assert self.batch is not None, "a step has begun"
        targets = self.batch.targets(micro)
        if self.accelerator.is_host:
            return targets
        leaves, spec = tree_flatten(targets)
        return tree_unflatten(self.move_to_device("targets", micro, leaves, range(len(leaves))), spec)

    def move_to_device(self, part: BatchPart, micro: int, values: Sequence[Any], positions: Iterable[int]) -> list[Any]:
        """Return values of a microbatch with all tensors on the device, copied ahead or now.

        Args:
            part: of the batch.
            micro: the microbatch.
            values: some of its inputs or targets.
            positions: of the values among all of them.
        """
        if self.copies is None:
            return self.accelerator.to_device([*values])
        step, index = self.step_and_micro(micro)
        copies = self.copies.find(step, MicrobatchRead(part, index))
        found = [self.copies.stream.take(copies, position) for position in positions]
        return [
            self.accelerator.to_device(value) if copy is None else copy
            for value, copy in zip(values, found, strict=True)
        ]

    def flatten_output(self, outputs: Sequence[Tensor], micro: int) -> MicrobatchOutput:
        """Return what a loss of the whole batch needs of a microbatch."""
        assert self.batch is not None, "a step has begun"
        output = self.model.unflatten(outputs, input_shapes=self.shapes_of(micro))
        return flatten_output(output, self.read_targets(micro), self.batch.sizes[micro], f"microbatch {micro}")

    def compute_batch_loss(self, microbatches: Mapping[int, EncodedSamples]) -> None:
        """Evaluate the loss on the outputs of the whole batch; keep the gradients of this rank's outputs.

        Args:
            microbatches: of all ranks, those with samples.

        Raises:
            DataError: they cannot be put together, or the loss is not a number.
        """
        assert self.batch is not None, "a step has begun"
        if not self.outputs:
            return
        sizes, first = {micro: self.batch.sizes[micro] for micro in sorted(microbatches)}, min(self.outputs)
        merged, own = merge_microbatches(microbatches, sizes), self.outputs[first]
        leaves = [self.accelerator.to_device(leaf.value) for leaf in merged]
        tensors = [index for index, flag in enumerate(own.requires_grad) if flag is not None]
        for index in tensors:
            requires_grad = any(part.requires_grad[index] for part in self.outputs.values())
            leaves[index] = leaves[index].detach().requires_grad_(requires_grad)
        output, targets = unflatten_batch(leaves, own.spec)
        num_samples = sum(sizes.values())
        self.rng.begin_microbatch(self.rng.step, 0, SampleRange(0, num_samples, num_samples))
        self.rng.begin_loss(seeds=self.model.uses_rng)
        loss = compute_mean_loss(
            self.loss_function(sum(sizes[micro] for micro in self.outputs) / num_samples),
            output,
            targets,
            "the batch",
            is_whole=True,
            random_functions=self.rng.functions,
        )
        if self.loss_check is not None and self.model.num_loss_calls > 1 and torch.is_grad_enabled():
            samples = LossSamples(output, targets, num_samples, "the batch")
            self.loss_check.check_state(self.loss_function(), self.rng.step, samples)
        if torch.is_grad_enabled() and loss.mean.requires_grad:
            with self.store.grad_check.check_backward(first, ParamGroup({})):
                self.run_autograd([self.scale_loss(loss.mean)], [None])
        grads = [leaves[index].grad for index in tensors]
        loss_weight = 0.0 if loss.weight is not None and float(loss.weight) == 0 else None  # which no target has
        for micro in self.outputs:
            self.output_grads[micro] = split_grads([merged[index] for index in tensors], grads, sizes, micro)
            self.record_loss(
                micro, loss.mean.detach(), loss_weight, {name: (part, None) for name, (part, _) in loss.parts.items()}
            )
        self.outputs.clear()

    def record_loss(
        self,
        micro: int,
        mean: Tensor,
        loss_weight: Tensor | float | None,
        parts: Mapping[str, tuple[Tensor, Tensor | float | None]],
    ) -> None:
        """Record the loss of a microbatch for the commit: mean, weight of a weighted mean, and parts."""
        assert self.batch is not None, "a step has begun"
        for pending, read, value in (
            (self.pending_losses, self.losses, mean),
            (self.pending_loss_weights, self.loss_weights, loss_weight),
        ):
            if isinstance(value, Tensor) and value.device.type != "cpu":
                pending.add(micro, value)
            elif value is not None:
                read[micro] = float(value)
        default = self.loss_factors.sample_fractions[micro] if self.model.loss_is_sum else self.batch.sizes[micro]
        for name, (part, part_weight) in parts.items():
            count = float(default if part_weight is None else part_weight)
            total = float(part) * (1.0 if self.model.loss_is_sum else count)
            self.loss_parts.setdefault(micro, {})[name] = PartTotal(total, count)

    def compute_loss(self, outputs: Sequence[Tensor], micro: int, recorder: ReductionRecorder) -> Tensor:
        """Return what backward starts from: the microbatch's part of the batch's loss; record its mean and weight.

        Args:
            outputs: of the last segment.
            micro: the microbatch.
            recorder: has the means over class indices that the model itself has computed.

        Raises:
            DataError: the loss is neither a scalar nor a weighted mean.
        """
        assert self.batch is not None, "a step has begun"
        targets = self.read_targets(micro)
        what = f"microbatch {self.step_and_micro(micro)[1]}"
        model, size = self.model, self.batch.sizes[micro]
        output = model.unflatten(outputs, input_shapes=self.shapes_of(micro))
        is_whole = micro in self.loss_factors.is_whole
        with self.autocast(micro):
            self.rng.begin_loss(seeds=self.model.uses_rng)
            loss_function = self.loss_function()
            is_shared = is_whole and model.num_loss_calls > 1  # by ranks of this process
            watches = (self.loss_check is not None and not is_whole) or is_shared or is_copied(self.batch)
            versions = [count_in_place_changes(values) for values in (output, targets)] if watches else []
            loss, loss_weight, parts = compute_mean_loss(
                loss_function,
                output,
                targets,
                what,
                recorder,
                is_whole=is_whole,
                is_sum=model.loss_is_sum,
                random_functions=self.rng.functions,
            )
            is_changed = watches and self.require_own_targets(versions, output, targets, what, is_shared=is_shared)
            if self.loss_check is not None and torch.is_grad_enabled() and not is_changed:
                step = self.step_and_micro(micro)[0]
                if is_shared:
                    self.loss_check.check_state(loss_function, step, LossSamples(output, targets, size, what))
                elif not is_whole and self.loss_check.is_due(step, targets, size, loss_weight):
                    batch_size = self.batch_size_of(step)
                    self.loss_check.check(loss_function, step, output, targets, loss.detach(), size, what, batch_size)
        if model.scaling_code and not is_whole and (model.loss_is_sum or loss_weight is not None):
            raise DataError(explain_other_scale(model.scaling_code, what))
        if model.loss_is_sum:
            loss = loss / size
        self.record_loss(micro, loss.detach(), loss_weight, parts)
        return self.scale_loss(loss, self.backward_factor(micro, loss_weight))

    def require_own_targets(
        self,
        versions: Sequence[int],
        output: Any,  # noqa: ANN401 - whatever the model returns
        targets: Any,  # noqa: ANN401 - whatever the loss takes
        what: str,
        *,
        is_shared: bool,
    ) -> bool:
        """Return whether a loss has changed its output or targets in place, which nobody else may read.

        Args:
            versions: of output and targets before it was computed.
            output: of the model.
            targets: of the samples.
            what: the samples, for the error.
            is_shared: whether other ranks of this process compute the loss from the same tensors.

        Raises:
            DataError: it has, and others read them, or the caller does, whose tensors are not changed.
        """
        assert self.batch is not None, "a step has begun"
        changed = [
            count_in_place_changes(values) != before for values, before in zip((output, targets), versions, strict=True)
        ]
        if is_shared and any(changed):
            raise DataError(CHANGED_TARGETS.format(what=what))
        if changed[1] and is_copied(self.batch):
            raise DataError(CHANGED_COPIES.format(what=what))
        return any(changed)

    def scale_loss(self, loss: Tensor, factor: Tensor | float = 1.0) -> Tensor:
        """Return the loss times a factor and the loss scale, which backward starts from."""
        scale = self.loss_factors.loss_scale
        if isinstance(scale, Tensor) or scale != 1.0:
            loss = loss.float() if loss.dtype == torch.float16 else loss  # which holds the scaled loss
            factor = factor * (scale.to(loss.dtype) if isinstance(scale, Tensor) else scale)
        scaled: Tensor = loss * factor if isinstance(factor, Tensor) or factor != 1.0 else loss
        return scaled

    def backward_factor(self, micro: int, loss_weight: Tensor | float | None) -> Tensor | float:
        """Return what a microbatch's mean loss is multiplied with in backward.

        It is its samples / S for a mean over samples, where S are those of the whole batch, and loss_weight / (S *
        weight_unit) for a weighted mean, whose total weight is known at the commit only: ``step_commit.decide_step``
        does the rest.

        Args:
            micro: the microbatch.
            loss_weight: of its weighted mean; None if it is a mean over samples.
        """
        share = self.loss_factors.sample_fractions[micro]
        if loss_weight is None or micro in self.loss_factors.is_whole:
            return share
        assert self.batch is not None, "a step has begun"
        return loss_weight / self.batch.sizes[micro] * share / self.loss_factors.weight_unit

    def read_losses(self) -> dict[int, float]:
        """Return the mean losses of this step's microbatches; wait for the device if they are not read yet."""
        self.losses.update(self.pending_losses.read())
        return self.losses

    def take_late_checks(self) -> list[LateLossCheck]:
        """Return the checks of this step's loss whose figures are on a device, and forget them."""
        return [] if self.loss_check is None else self.loss_check.take_late_checks()

    def read_loss_weights(self) -> dict[int, float]:
        """Return the weights of this step's weighted means, by microbatch."""
        self.loss_weights.update(self.pending_loss_weights.read())
        return self.loss_weights

    def backward(self, first: int, last: int, micro: int, version: int = 0, *, accumulates: bool = False) -> None:
        """Run blocks ``last`` down to ``first`` backward; gradients are added to those of the parameters.

        Args:
            first: block.
            last: block.
            micro: the microbatch.
            version: of the weights.
            accumulates: whether a later backward adds to all these gradients before anything else uses them.
        """
        if self.is_empty(micro):
            return
        stop = last + 1
        while stop > first:
            block, segment = self.by_stop[stop]
            leaves, outputs = self.saved.pop((block, micro))
            roots, grads = self.take_backward_roots(segment, outputs, micro)
            if any(root.requires_grad for root in roots):
                self.begin_microbatch(micro)
                # the modes of the forward, because torch.utils.checkpoint recomputes inside backward
                with (
                    self.store.grad_check.check_backward(micro, self.trainable_params[block], accumulates=accumulates),
                    self.autocast(micro),
                    self.function_mode(block, micro, is_recompute=True),
                    self.swap_in(segment, version),
                ):
                    self.run_autograd(roots, grads)
                    self.store.fold_version_grads(version)
            for index, leaf in zip(segment.inputs, leaves, strict=False):  # a whole model may have more leaves
                if leaf.grad is not None and index >= self.model.num_inputs:  # (4)
                    self.add_grad(index, micro, leaf.grad)
            for index in (*segment.outputs, *self.freed_by_backward[block]):
                self.values.pop((index, micro), None)
            stop = block

    def swap_in(self, segment: Segment, version: int) -> AbstractContextManager[None]:
        """Return a context in which modules of the segment have the weights of a version."""
        if segment.swap_in is None:
            return nullcontext()
        seed = self.rng if self.model.uses_rng else no_seed
        return segment.swap_in(self.store.weights_for_forward(version), self.store.buffers, seed)

    def backward_input(self, first: int, last: int, micro: int) -> None:
        """Run blocks backward as :meth:`backward` does, but defer computations of weight gradients."""
        assert self.weight_grad_queue is not None, "split backwards need it"
        for start, stop in self.segment_bounds_reversed(first, last):
            with self.weight_grad_queue.recording() as jobs:
                self.backward(start, stop - 1, micro, accumulates=True)
            self.deferred_jobs[start, micro] = jobs

    def backward_weight(self, first: int, last: int, micro: int, *, accumulates: bool = False) -> None:
        """Compute the weight gradients that blocks have deferred; see :meth:`backward`."""
        for start, _ in self.segment_bounds_reversed(first, last):
            params = self.trainable_params[start]
            with torch.no_grad(), self.store.grad_check.check_backward(micro, params, accumulates=accumulates):
                for job in self.deferred_jobs.pop((start, micro)):
                    job()

    def segment_bounds_reversed(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield the first block and one past the last of each segment in a range, the last segment first."""
        stop = last + 1
        while stop > first:
            start, _ = self.by_stop[stop]
            yield start, stop
            stop = start

    def run_autograd(self, roots: Sequence[Tensor], grads: OptionalGrads) -> None:
        """Run autograd; gradients are added to those of the parameters."""
        self.store.begin_backward()
        try:
            # synchronized batch norm waits for other ranks; elsewhere another thread launches faster
            with self.accelerator.calling_thread() if self.batch_norm is not None else nullcontext():
                intercepts = any(self.grad_sinks) or self.batch_norm is not None or self.model.uses_rng
                # torch.autograd.backward imports sympy, 34 MB, to compare the shapes of gradients that it is given
                has_grads = any(grad is not None for grad in grads) and not has_torch_function(tuple(roots))
                if intercepts or has_grads:
                    run_backward(roots, grads)
                else:
                    torch.autograd.backward(roots, grads)
        finally:
            self.store.end_backward()

    def take_backward_roots(
        self, segment: Segment, outputs: Sequence[Tensor], micro: int
    ) -> tuple[list[Tensor], OptionalGrads]:
        """Remove and return the gradients of a segment's outputs, with the outputs that autograd starts from."""
        if not segment.outputs and not (outputs and self.model.gathers_outputs):
            return list(outputs), [None] * len(outputs)  # of the last segment, the loss, or of one without consumers
        if not segment.outputs:
            pairs = zip(outputs, self.output_grads.pop(micro), strict=True)
            found = [(output, grad) for output, grad in pairs if grad is not None and output.requires_grad]
            return [output for output, _ in found], [grad for _, grad in found]
        roots: list[Tensor] = []
        grads: OptionalGrads = []
        for index, output in zip(segment.outputs, outputs, strict=True):
            grad = self.grads.pop((index, micro), None)
            if grad is not None and output.requires_grad:
                roots.append(output)
                grads.append(grad)
        return roots, grads

    def add_grad(self, index: int, micro: int, grad: Tensor) -> None:
        """Add what a reader of a value contributes to its gradient."""
        before = self.grads.get((index, micro))
        self.grads[index, micro] = grad if before is None else before + grad

    def pack_loss(self, micro: int) -> list[Tensor]:
        """Return what is sent with a gradient to the previous stage: loss and weight, in an asynchronous pipeline."""
        if not self.microbatches_per_batch:
            return []
        loss_weight = self.read_loss_weights().get(micro, math.nan)
        return [torch.tensor([self.read_losses()[micro], loss_weight], dtype=torch.float64)]

    def receive_loss(self, micro: int, peer: int, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Record loss and weight that came with a gradient; return the gradient, rescaled to this rank's loss scope."""
        if not self.microbatches_per_batch:
            return tensors
        loss, loss_weight = tensors[0].tolist()
        self.losses[micro] = loss
        if not math.isnan(loss_weight):
            self.loss_weights[micro] = loss_weight
        ratio = self.loss_factors.upstream_ratios.get((micro, peer), 1.0)
        return [tensor * ratio for tensor in tensors[1:]] if ratio != 1.0 else tensors[1:]

    def partial_output(self, block: int, micro: int) -> Tensor | None:
        """Return the partial output of a row-parallel block, to be reduced in place; None for an empty microbatch."""
        if self.is_empty(micro):
            return None
        _, segment = self.by_stop[block + 1]
        (index,) = segment.partial_outputs
        stored = self.values[index, micro]
        contiguous = stored.value.clone(memory_format=torch.contiguous_format)
        self.values[index, micro] = StoredValue(contiguous, stored.requires_grad)
        return contiguous

    def partial_input_grad(self, block: int, micro: int) -> Tensor | None:
        """Return the partial input gradient of a column-parallel block, reduced in place; None if there is none."""
        if self.is_empty(micro):
            return None
        _, segment = self.by_first[block]
        (index,) = segment.partial_inputs
        grad = self.grads.get((index, micro))
        if grad is None:
            return None
        self.grads[index, micro] = grad.contiguous()
        return self.grads[index, micro]
