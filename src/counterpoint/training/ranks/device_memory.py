"""Explain a device whose memory is full: what a step needs by prediction, what there is, and the change that fits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from counterpoint.device.accelerator import Accelerator
from counterpoint.errors import PlanError
from counterpoint.model.precision import Precision
from counterpoint.model.spec import ModelSpec
from counterpoint.partitioning.partitioned_model import as_call_args
from counterpoint.plan.plan import Plan
from counterpoint.runtime.microbatches import slice_samples
from counterpoint.runtime.optimizer_spec import OptimizerSpec
from counterpoint.strategies.recomputation import RECOMPUTE_PASS
from counterpoint.training.model_partition import describe_trained, finest_partition
from counterpoint.training.plan_resolution import MAX_TRACE_SAMPLES
from counterpoint.viz.number_format import format_bytes
from counterpoint.world.cluster import Cluster

USABLE = 0.9
"""Share of a device's memory that predictions may fill: they do not count what operators use inside, and gaps."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What the ranks of this process need of a device.

    Args:
        accelerator: that they all compute on.
        plan: theirs.
        model: the user's.
        inputs: of a microbatch.
        microbatch_size: samples of it.
        optimizer_spec: which parameters are trained.
        precision: whose casts the model has; None for the dtypes of its parameters.
    """

    accelerator: Accelerator
    plan: Plan
    model: nn.Module
    inputs: Any
    microbatch_size: int
    optimizer_spec: OptimizerSpec
    precision: Precision | None = None

    def find_layers(self) -> ModelSpec | None:
        """Return the layers of the model, found on a copy in host memory; None if they cannot be found."""
        memo = {id(tensor): _on_host(tensor) for tensor in (*self.model.parameters(), *self.model.buffers())}
        inputs = slice_samples(as_call_args(self.inputs), 0, min(self.microbatch_size, MAX_TRACE_SAMPLES))
        try:
            with self.accelerator.preserve_rng():
                model = copy.deepcopy(self.model, memo)
                partition = finest_partition(model, tree_map(_on_host, inputs), ("blocks", "tensor_parallel"))
        except (PlanError, RuntimeError, TypeError):  # a forward, or a copy, of any model
            return None
        return describe_trained(partition, model, self.optimizer_spec, self.precision)

    def describe(self) -> str:
        """Return what a step needs, and the smallest change that fits."""
        plan, batch_size = self.plan, self.microbatch_size * self.plan.global_num_microbatches
        stats, spec = self.accelerator.memory_stats(), self.find_layers()
        usable_bytes = USABLE * (stats.free_bytes + stats.reserved_bytes)
        needed_bytes = predict_bytes(plan, spec, batch_size)
        text = f"a step of {batch_size} samples under {plan} needs "
        text += f"{'an unknown size' if needed_bytes is None else format_bytes(needed_bytes)} by prediction"
        if needed_bytes is not None and needed_bytes < stats.free_bytes + stats.reserved_bytes:
            text += ", without what operators, and the checks of the first steps, take for a moment"
        if plan.num_ranks > 1:
            text += f", for all {plan.num_ranks} ranks, which share the device"
        for change, changed, samples in possible_changes(plan, batch_size):
            changed_bytes = predict_bytes(changed, spec, samples)
            if changed_bytes is not None and changed_bytes < min(usable_bytes, needed_bytes or usable_bytes):
                return f"{text}; the smallest change that fits: {change} ({format_bytes(changed_bytes)})"
        return (
            f"{text}; neither recomputation nor more microbatches or a smaller batch fit: take a smaller model, or a "
            "device with more memory"
        )


def describe_model(modules: Iterable[nn.Module]) -> str:
    """Return what modules need, and the remedy, if a device has not even room for them."""
    tensors = {id(one): one for module in modules for one in (*module.parameters(), *module.buffers())}
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return (
        f"its parameters and buffers need {format_bytes(num_bytes)}, and training more than that: take a smaller "
        "model, or a device with more memory"
    )


def predict_bytes(plan: Plan, spec: ModelSpec | None, batch_size: int) -> int | None:
    """Return the peak memory of all ranks of a plan together; None if it cannot be executed."""
    from counterpoint.planner.ranking import predict_rank_bytes

    if spec is None:
        return None
    try:
        return sum(predict_rank_bytes(plan, spec, Cluster(), batch_size=batch_size))
    except PlanError:
        return None


def possible_changes(plan: Plan, batch_size: int) -> Iterator[tuple[str, Plan, int]]:
    """Yield what may fit, the smallest change first: text, plan, and samples of a batch."""
    recomputing = plan if plan.recomputation is not None else replace(plan, passes=(*plan.passes, RECOMPUTE_PASS))
    if recomputing is not plan:
        yield f"passes={recomputing.passes!r}", recomputing, batch_size
    for count in _multiples(plan.num_microbatches, batch_size * plan.num_microbatches // plan.global_num_microbatches):
        yield f"num_microbatches={count}", replace(plan, num_microbatches=count), batch_size
        if recomputing is not plan:
            both = replace(recomputing, num_microbatches=count)
            yield f"num_microbatches={count} and passes={recomputing.passes!r}", both, batch_size
    size = batch_size // 2
    while size >= plan.global_num_microbatches:
        samples = size - size % plan.global_num_microbatches
        yield f"a batch of {samples} samples", plan, samples
        size //= 2


def _on_host(value: Any) -> Any:  # noqa: ANN401 - any leaf of inputs
    if isinstance(value, nn.Parameter):
        return nn.Parameter(value.detach().cpu(), requires_grad=value.requires_grad)
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _multiples(count: int, most: int) -> Iterator[int]:
    while (count := 2 * count) <= most:
        yield count


@contextmanager
def explain_full_device(accelerator: Accelerator, describe_need: Callable[[], str], when: str) -> Iterator[None]:
    """Explain the error of a device that has no memory left.

    Args:
        accelerator: the device.
        describe_need: returns what is needed of it, and the remedy.
        when: what is done inside, for the message.

    Raises:
        PlanError: in place of torch's.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        stats = accelerator.memory_stats()
        text = (
            f"the memory of {accelerator.device} is full {when}: this process has allocated "
            f"{format_bytes(stats.allocated_bytes)} of {format_bytes(stats.total_bytes)}, and "
            f"{format_bytes(stats.free_bytes)} are free"
        )
        raise PlanError(f"{text}; {describe_need()}") from error
