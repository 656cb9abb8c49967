"""Prepare a model to be timed as the runtime runs it: whole, in one call, and layer by layer."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map

from counterpoint.compiler.compile import compile  # noqa: A004 - read as cp.compile
from counterpoint.device.select import accelerator_for, model_device
from counterpoint.fabric.local import LocalWorld
from counterpoint.model.compilation import Compilation
from counterpoint.model.spec import Block, ModelSpec
from counterpoint.partitioning.partition import partition_model
from counterpoint.partitioning.partitioned_model import PartitionedModel, as_call_args
from counterpoint.plan.plan import Plan
from counterpoint.program.instruction import Backward, Forward, Instruction
from counterpoint.runtime.autograd.deferred_weight_grad import WeightGradQueue
from counterpoint.runtime.autograd.segment_executor import SegmentExecutor
from counterpoint.runtime.batch_norm.deferred import find_batch_norm_buffers
from counterpoint.runtime.commit.step_commit import StepGuard
from counterpoint.runtime.interpreter import Interpreter
from counterpoint.runtime.loss.loss_reduction import LossFunction
from counterpoint.runtime.microbatches import SlicedBatch
from counterpoint.runtime.optimizer_spec import OptimizerSpec
from counterpoint.runtime.rank_builder import RunSpec, bind_segments, build_rank
from counterpoint.runtime.rng.draw_sites import DrawSites, find_draw_sites
from counterpoint.runtime.sample_layout import SamplePart, first_length

NUM_MICROBATCHES = 2
"""Microbatches of a step: the gradient of the second one is added to that of the first."""


@dataclass(frozen=True, slots=True)
class ProfileTarget:
    """A model with all that is needed to time it.

    Args:
        model: is not modified.
        partitioned: the same model in layers.
        spec: of these layers, with the trainable parameters.
        loss: from the model's output and the targets to the mean loss.
        optimizer_spec: of the user's optimizer.
        batch: inputs and targets of some samples, with marks where these do not lie along dim 0.
        compilation: that the layers are compiled by; None if they run eagerly.
    """

    model: nn.Module
    partitioned: PartitionedModel
    spec: ModelSpec
    loss: LossFunction
    optimizer_spec: OptimizerSpec
    batch: tuple[Any, Any]
    compilation: Compilation | None = None

    def batches(self, samples: int, num_microbatches: int = NUM_MICROBATCHES) -> SlicedBatch:
        """Return microbatches of the given size, repeating the given samples if they are too few."""
        count = first_length(self.batch[0])
        sample_indices = torch.arange(samples * num_microbatches) % count

        def resize(leaf: Any) -> Any:  # noqa: ANN401 - whatever is in a nest
            if isinstance(leaf, SamplePart):
                return leaf.take(sample_indices.tolist())
            has_samples = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == count
            return leaf[sample_indices.to(leaf.device)].contiguous() if has_samples else leaf

        inputs, targets = (tree_map(resize, nest) for nest in self.batch)
        return SlicedBatch(
            (inputs, targets), tuple((index * samples, (index + 1) * samples) for index in range(num_microbatches))
        )

    def draw_sites(self) -> DrawSites:
        """Return where the model draws random numbers, which graphs have to know before."""
        return find_draw_sites(self.model, as_call_args(self.batches(2, 1).inputs(0)))

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.model.parameters()).device


@dataclass(frozen=True, slots=True)
class ProfileHarness:
    """A target on one rank, twice: whole and in layers.

    Args:
        whole: a rank that calls the unpartitioned model.
        single_microbatch: the same with one microbatch per step; the same object without batch-norm statistics.
        layers: a rank whose model is partitioned into layers, all of which run in one call.
        separate: an executor of the same layers in a call each.
        split_backward: the same with the backward in two parts.
    """

    whole: Interpreter
    single_microbatch: Interpreter
    layers: Interpreter
    separate: SegmentExecutor
    split_backward: SegmentExecutor

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.separate.by_first)


def build_harness(target: ProfileTarget, samples: int) -> ProfileHarness:
    """Return the target on one rank; its model is not modified.

    Args:
        target: what is timed.
        samples: in its microbatches.
    """
    blocks = tuple(Block((layer,), index) for index, layer in enumerate(target.spec.layers))
    layers, run_spec = _build_interpreter(
        target, target.partitioned, replace(target.spec, blocks=blocks, chunk_starts=()), target.model, NUM_MICROBATCHES
    )
    if target.partitioned.compiles_blocks:
        whole = single = layers
    else:
        whole = single = _whole_model(target, samples, NUM_MICROBATCHES)
        if find_batch_norm_buffers(target.model):
            single = _whole_model(target, samples, 1)
    model = bind_segments(run_spec, target.partitioned, _separate_blocks(len(blocks)), training=True)
    separate, split_backward = (
        SegmentExecutor(model, layers.store, layers.rng, queue, layers.batch_norm, accelerator=layers.accelerator)
        for queue in (None, WeightGradQueue())
    )
    return ProfileHarness(whole, single, layers, separate, split_backward)


def _whole_model(target: ProfileTarget, samples: int, num_microbatches: int) -> Interpreter:
    """Return a rank that calls a copy of the unpartitioned model."""
    model = copy.deepcopy(target.model)
    inputs = as_call_args(target.batches(samples, 1).inputs(0))
    partitioned = partition_model(model, inputs, granularity="whole", compilation=target.compilation)
    return _build_interpreter(
        target, partitioned, replace(partitioned.spec, params=target.spec.params), model, num_microbatches
    )[0]


def _build_interpreter(
    target: ProfileTarget, partitioned: PartitionedModel, spec: ModelSpec, model: nn.Module, num_microbatches: int
) -> tuple[Interpreter, RunSpec]:
    compiled = compile(Plan((), num_microbatches), spec)
    run_spec = RunSpec(
        compiled.step_variants,
        compiled.model,
        target.loss,
        target.optimizer_spec,
        StepGuard(),
        seed=0,
        unused_params="zero",
        draw_sites=DrawSites() if target.compilation is None else target.draw_sites(),
    )
    accelerator = accelerator_for(model_device(model))
    return build_rank(
        run_spec, partitioned, model, LocalWorld(1).fabrics[0], accelerator=accelerator
    ).interpreter, run_spec


def _separate_blocks(num_blocks: int) -> Sequence[Instruction]:
    """Return instructions in which no two blocks are adjacent, so that each is a segment of its own."""
    return [instruction for block in range(num_blocks) for instruction in (Forward(block, 0), Backward(block, 0))]


def storage_sizes(values: Any) -> dict[int, int]:  # noqa: ANN401 - any nest of tensors
    """Return the bytes of the storages of tensors by their identity; also of fake tensors."""
    leaf_storages = (
        leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and not leaf.is_sparse
    )
    return {StorageWeakRef(storage).cdata: storage.nbytes() for storage in leaf_storages}  # type: ignore[no-untyped-call]
