"""Explain a device whose memory is full: what a step needs by prediction, what there is, and the change that fits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from counterpoint.device.accelerator import Accelerator
from counterpoint.errors import PlanError
from counterpoint.model.model_profile import ModelProfile
from counterpoint.model.precision import Precision
from counterpoint.model.spec import ModelSpec
from counterpoint.partitioning.partitioned_model import as_call_args
from counterpoint.plan.plan import Plan
from counterpoint.profiler.roofline import estimate_model
from counterpoint.runtime.loss.loss_reduction import LossFunction
from counterpoint.runtime.optimizer_spec import OptimizerSpec
from counterpoint.strategies.recomputation import RECOMPUTE_PASS
from counterpoint.training.model_partition import describe_trained
from counterpoint.training.profiling import build_profile_target, mean_output_loss
from counterpoint.viz.number_format import format_bytes
from counterpoint.world.cluster import Cluster, Device

USABLE = 0.9
"""Share of a device's memory that predictions may fill: they do not count what operators use inside, and gaps."""


NUM_GRADS = 2
"""Gradients of activations that a backward holds at once: what an operation reads, and what it computes."""


class LayerMemory(NamedTuple):
    """What predictions of memory know of a model.

    Args:
        spec: its layers.
        profile: with what each of them saves for its backward.
        sample_bytes: of the inputs and targets of a sample.
    """

    spec: ModelSpec
    profile: ModelProfile
    sample_bytes: float


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
        loss: from the model's output and the targets to the loss; None for a mean of the output.
        targets: of the microbatch, if there is a loss.
    """

    accelerator: Accelerator
    plan: Plan
    model: nn.Module
    inputs: Any
    microbatch_size: int
    optimizer_spec: OptimizerSpec
    precision: Precision | None = None
    loss: LossFunction | None = None
    targets: Any = None

    def estimate_layers(self) -> LayerMemory | None:
        """Return the layers of the model, and what each saves for its backward; None if they cannot be found.

        Both are found on a copy in host memory, the second by running it on tensors without memory.
        """
        memo = {id(tensor): _on_host(tensor) for tensor in (*self.model.parameters(), *self.model.buffers())}
        inputs, targets = tree_map(_on_host, (as_call_args(self.inputs), self.targets))
        try:
            with self.accelerator.preserve_rng():
                model = copy.deepcopy(self.model, memo)
                loss, spec = self.loss or mean_output_loss, self.optimizer_spec
                target = build_profile_target(model, inputs, targets, loss=loss, optimizer_spec=spec)
                layers = describe_trained(target.partitioned, model, spec, self.precision)
                sizes = sorted({max(self.microbatch_size // 8, 1), self.microbatch_size})
                estimate = partial(estimate_model, replace(target, spec=layers), "", Device(), samples=sizes)
                batch_bytes = sum(leaf.nbytes for leaf in tree_leaves((inputs, targets)) if isinstance(leaf, Tensor))
                return LayerMemory(layers, estimate(precision=self.precision), batch_bytes / self.microbatch_size)
        except Exception:  # noqa: BLE001 - code of the user; the error of the device is what counts
            return None

    def describe(self) -> str:
        """Return what a step needs, and the smallest change that fits."""
        plan, batch_size = self.plan, self.microbatch_size * self.plan.global_num_microbatches
        stats, layers = self.accelerator.memory_stats(), self.estimate_layers()
        usable_bytes = USABLE * (stats.free_bytes + stats.reserved_bytes)
        needed_bytes = predict_bytes(plan, layers, batch_size)
        text = f"a step of {batch_size} samples under {plan} needs "
        text += f"{'an unknown size' if needed_bytes is None else format_bytes(needed_bytes)} by prediction"
        if needed_bytes is not None and needed_bytes < stats.free_bytes + stats.reserved_bytes:
            text += ", without what operators, and the checks of the first steps, take for a moment"
        if plan.num_ranks > 1:
            text += f", for all {plan.num_ranks} ranks, which share the device"
        for change, changed, samples in possible_changes(plan, batch_size):
            changed_bytes = predict_bytes(changed, layers, samples)
            if changed_bytes is not None and changed_bytes < min(usable_bytes, needed_bytes or usable_bytes):
                return f"{text}; the smallest change that fits: {change} ({format_bytes(changed_bytes)})"
        return (
            f"{text}; neither recomputation nor more microbatches or a smaller batch fit: take a smaller model, or a "
            "device with more memory"
        )


def describe_model(modules: Iterable[nn.Module]) -> str:
    """Return what modules need, and the remedy, if even they do not fit on a device."""
    tensors = {id(one): one for module in modules for one in (*module.parameters(), *module.buffers())}
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return (
        f"its parameters and buffers need {format_bytes(num_bytes)}, and training more than that: take a smaller "
        "model, or a device with more memory"
    )


def predict_bytes(plan: Plan, layers: LayerMemory | None, batch_size: int) -> int | None:
    """Return the peak memory of all ranks of a plan together; None if it cannot be executed.

    Next to what the program holds, these are the batch, and the largest gradients of activations, which exist for a
    moment.
    """
    from counterpoint.planner.ranking import predict_rank_bytes

    if layers is None:
        return None
    spec, profile, sample_bytes = layers
    samples = max(-(-batch_size // plan.global_num_microbatches), 1)
    largest_bytes = max(layer.output_bytes for layer in profile.at_microbatch_size(samples).layers)
    try:
        held_bytes = sum(predict_rank_bytes(plan, spec, Cluster(), batch_size=batch_size, profile=profile))
    except PlanError:
        return None
    return int(held_bytes + sample_bytes * batch_size + plan.num_ranks * NUM_GRADS * largest_bytes)


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


def explain_full_device(
    accelerator: Accelerator, describe_need: Callable[[], str], when: str
) -> AbstractContextManager[None]:
    """Return a context that explains the error of a device that has no memory left.

    Args:
        accelerator: the device.
        describe_need: returns what is needed of it, and the remedy.
        when: what is done inside, for the message.

    Raises:
        PlanError: in place of torch's.
    """
    return nullcontext() if accelerator.is_host else _explain_out_of_memory(accelerator, describe_need, when)


@contextmanager
def _explain_out_of_memory(accelerator: Accelerator, describe_need: Callable[[], str], when: str) -> Iterator[None]:
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
