"""A model made ready to be timed as the runtime runs it: as it is, in one call, and piece by piece."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map

from counterpoint.compiler.compile import compile  # noqa: A004 - read as cp.compile
from counterpoint.fabric.local import LocalWorld
from counterpoint.model.spec import Block, ModelSpec
from counterpoint.partitioning.dry_run import num_samples
from counterpoint.partitioning.partition import partition_model
from counterpoint.partitioning.partitioned_model import PartitionedModel
from counterpoint.plan.plan import Plan
from counterpoint.program.instruction import Backward, Forward, Instruction
from counterpoint.runtime.autograd.deferred_weight_grad import WeightGradQueue
from counterpoint.runtime.autograd.segment_executor import SegmentExecutor
from counterpoint.runtime.batch_norm.deferred import find_batch_norm_buffers
from counterpoint.runtime.interpreter import Interpreter
from counterpoint.runtime.microbatches import SlicedBatch
from counterpoint.runtime.optimizer_spec import OptimizerSpec
from counterpoint.runtime.rank_builder import RunSpec, as_call_args, bind_segments, build_rank, make_batch_norm
from counterpoint.runtime.step_commit import StepGuard

LossFn = Callable[[Any, Any], Tensor]

NUM_MICROBATCHES = 2
"""Microbatches of a step: the gradient of the second one is added to that of the first."""


@dataclass(frozen=True, slots=True)
class ProfileTarget:
    """What is timed.

    Args:
        model: it stays as it is.
        cut: the same model in pieces.
        spec: these pieces, with the parameters that are trained.
        loss: from the model's output and the targets to the mean loss.
        face: the user's optimizer.
        batch: inputs and targets of some samples.
    """

    model: nn.Module
    partitioned: PartitionedModel
    spec: ModelSpec
    loss: LossFn
    optimizer_spec: OptimizerSpec
    batch: tuple[Any, Any]

    def batches(self, samples: int, num_microbatches: int = NUM_MICROBATCHES) -> SlicedBatch:
        """Return microbatches of so many samples: those there are, again and again where they are too few."""
        count = num_samples(self.batch[0])
        rows = torch.arange(samples * num_microbatches) % count

        def resized(leaf: Any) -> Any:  # noqa: ANN401 - whatever is in a nest
            has_samples = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == count
            return leaf[rows.to(leaf.device)].contiguous() if has_samples else leaf

        inputs, targets = (tree_map(resized, part) for part in self.batch)
        return SlicedBatch(
            (inputs, targets), tuple((at * samples, (at + 1) * samples) for at in range(num_microbatches))
        )

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return next(self.model.parameters()).device


@dataclass(frozen=True, slots=True)
class ProfileHarness:
    """A subject on one rank, twice: as it is, and in pieces.

    Args:
        whole: the rank that calls the model as it is.
        alone: the same where a step has one microbatch; the same rank where batch norm keeps nothing.
        pieces: the rank that has it in pieces, all of which are one call.
        apart: what it computes with where every piece is a call of its own.
        parts: the same where backwards are done in two parts.
    """

    whole: Interpreter
    single_microbatch: Interpreter
    layers: Interpreter
    separate: SegmentExecutor
    split_backward: SegmentExecutor

    @property
    def num_layers(self) -> int:
        """How many pieces there are."""
        return len(self.separate.by_first)


def build_harness(target: ProfileTarget, samples: int) -> ProfileHarness:
    """Return the subject on one rank; the model of the subject is not touched.

    Args:
        subject: what is timed.
        samples: in its microbatches.
    """
    whole = alone = _whole_model(target, samples, NUM_MICROBATCHES)
    if find_batch_norm_buffers(target.model):
        alone = _whole_model(target, samples, 1)
    blocks = tuple(Block((piece,), index) for index, piece in enumerate(target.spec.layers))
    pieces, parts = _build_interpreter(
        target, target.partitioned, replace(target.spec, blocks=blocks, heads=()), target.model, NUM_MICROBATCHES
    )
    model = bind_segments(parts, target.partitioned, _separate_blocks(len(blocks)), training=True)
    apart, in_parts = (SegmentExecutor(model, pieces.store, pieces.rng, desk) for desk in (None, WeightGradQueue()))
    apart.batch_norm = in_parts.batch_norm = pieces.executor.batch_norm
    return ProfileHarness(whole, alone, pieces, apart, in_parts)


def _whole_model(target: ProfileTarget, samples: int, num_microbatches: int) -> Interpreter:
    """Return a rank that calls the model as it is, with a copy of its own."""
    own = copy.deepcopy(target.model)
    cut = partition_model(own, as_call_args(target.batches(samples, 1).inputs(0)), granularity="whole")
    return _build_interpreter(target, cut, replace(cut.spec, params=target.spec.params), own, num_microbatches)[0]


def _build_interpreter(
    target: ProfileTarget, partitioned: PartitionedModel, spec: ModelSpec, model: nn.Module, num_microbatches: int
) -> tuple[Interpreter, RunSpec]:
    compiled = compile(Plan((), num_microbatches), spec)
    parts = RunSpec(compiled.step_variants, compiled.model, target.loss, target.optimizer_spec, StepGuard(), 0)
    rank = build_rank(parts, partitioned, model, LocalWorld(1).fabrics[0])
    rank.interpreter.executor.batch_norm = make_batch_norm(parts, model, rank.interpreter, None)
    rank.interpreter.executor.unused_params = "zero"
    return rank.interpreter, parts


def _separate_blocks(num_blocks: int) -> Sequence[Instruction]:
    """Return words in which no two blocks stand side by side, so that each is a function of its own."""
    return [word for block in range(num_blocks) for word in (Forward(block, 0), Backward(block, 0))]


def storage_sizes(values: Any) -> dict[int, int]:  # noqa: ANN401 - any nest of tensors
    """Return the memory that tensors lie in, by its identity, with its bytes; tensors may be without values."""
    found = (leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and not leaf.is_sparse)
    return {StorageWeakRef(storage).cdata: storage.nbytes() for storage in found}  # type: ignore[no-untyped-call]
