"""The specification of a training that each task receives, and the model replica that a Python worker caches.

The closure of a task carries the model's modules with their parameters on the ``meta`` device, the loss, and the
optimizer's class and options. Weights are sent as bytes; what never changes (buffers and frozen parameters) is
broadcast once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from counterpoint.errors import PlanError
from counterpoint.partitioning.batch_statistics import modules_with_running_stats
from counterpoint.partitioning.meta_copy import copy_to_meta
from counterpoint.runtime.loss.loss_reduction import LossFunction
from counterpoint.runtime.params.flat_layout import FlatLayout
from counterpoint.runtime.params.grad_check import ParamGroup
from counterpoint.spark.failures import serialization_error
from counterpoint.spark.weight_slices import SliceCodec, SliceOptimizer
from counterpoint.value_codec import decode_value, encode_value

UnusedParameters: TypeAlias = Literal["error", "zero"]
"""What a training does about parameters without a gradient."""


class BroadcastBytes(Protocol):
    """Bytes that are constant during the run, such as the value of a Spark broadcast."""

    @property
    def value(self) -> bytes:
        """The bytes."""


@dataclass(frozen=True, slots=True)
class LocalBytes:
    """Bytes in this process, without a broadcast."""

    value: bytes


@dataclass(frozen=True, slots=True)
class TrainingSpec:
    """Specification of the training that every task receives.

    Args:
        run_id: unique name of the run.
        model: on the ``meta`` device.
        constants: values of buffers and frozen parameters.
        loss: from the model's output and the targets to the mean loss of the samples.
        slice_optimizer: how slices are updated.
        layout: of the trained parameters in the flat vector.
        codec: of weights and gradients in messages.
        seed: of the model's random numbers.
    """

    run_id: str
    model: nn.Module
    constants: BroadcastBytes
    loss: LossFunction
    slice_optimizer: SliceOptimizer
    layout: FlatLayout
    codec: SliceCodec = ""
    seed: int = 0


def meta_copy(model: nn.Module) -> nn.Module:
    """Return a copy of the model with parameters and buffers on the ``meta`` device; tied ones stay tied.

    Raises:
        PlanError: a part of it cannot be copied, so it cannot be serialized.
    """
    try:
        return copy_to_meta(model)
    except TypeError as error:
        raise PlanError(serialization_error(str(error))) from error


def serialize_constants(model: nn.Module, trained: Mapping[str, int]) -> bytes:
    """Return buffers and frozen parameters, which no step changes, as bytes."""
    return encode_value({name: tensor for name, tensor in _all_tensors(model) if name not in trained}, "constants")


def check_no_running_stats(model: nn.Module) -> None:
    """Check that a forward does not change the model.

    Raises:
        PlanError: a module keeps running statistics.
    """
    for path in modules_with_running_stats(model):
        raise PlanError(
            f"{path} keeps running statistics, but Spark may run a task again, so its forward must not change the "
            "model; use track_running_stats=False, or a GroupNorm"
        )


class SparkReplica:
    """A model replica in a Python worker; its trained parameters are views of one flat vector."""

    def __init__(self, spec: TrainingSpec) -> None:
        self.model = spec.model
        layout = spec.layout
        self.flat = torch.empty(layout.num_elements, dtype=layout.dtype)
        views = {slot.name: self.flat[slot.start : slot.stop].view(slot.shape) for slot in layout.slots}
        load_values(self.model, {**decode_value(spec.constants.value), **views}, trained=views)
        self.model.train()
        known = dict(self.model.named_parameters())
        self.params = {slot.name: known[slot.name] for slot in layout.slots}
        self.param_group = ParamGroup(self.params)

    def clear_grads(self) -> None:
        """Remove the gradients of all parameters."""
        for param in self.params.values():
            param.grad = None

    def flat_grad(self) -> Tensor:
        """Return the gradients of all trained parameters as one vector; zeros for a missing one."""
        grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in self.params.values()]
        return torch.cat([grad.detach().reshape(-1) for grad in grads])

    def params_without_grad(self, layout: FlatLayout) -> list[str]:
        """Return the names of trained parameters without a gradient."""
        return [slot.name for slot in layout.slots if self.params[slot.name].grad is None]


def load_values(model: nn.Module, values: Mapping[str, Tensor], trained: Collection[str] = ()) -> None:
    """Replace the ``meta`` tensors of a model by values, which the model then owns.

    Args:
        model: from :func:`meta_copy`; changed in place.
        values: of every parameter and buffer, by the first of its names.
        trained: names of the parameters that require a gradient.
    """
    replacements: dict[int, Tensor] = {}
    for name, tensor in _all_tensors(model):
        is_parameter = isinstance(tensor, nn.Parameter)
        replacements[id(tensor)] = (
            nn.Parameter(values[name], requires_grad=name in trained) if is_parameter else values[name]
        )
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):  # noqa: SLF001 - replaced by tensors of the same shape
            tensors.update({key: replacements[id(old)] for key, old in tensors.items() if old is not None})  # type: ignore[misc]


class _ReplicaSlot:
    """Cache slot for the replica of a run."""

    def __init__(self) -> None:
        self.replica: SparkReplica | None = None


@lru_cache(maxsize=1)
def _replica_slot(run_id: str) -> _ReplicaSlot:
    """Return the cache slot of a run in this process; it evicts that of another run."""
    del run_id
    return _ReplicaSlot()


def get_replica(spec: TrainingSpec) -> SparkReplica:
    """Return this process's replica, built on first use."""
    slot = _replica_slot(spec.run_id)
    if slot.replica is None:
        slot.replica = SparkReplica(spec)
    return slot.replica


def _all_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and buffer by the first of its names."""
    yield from model.named_parameters()
    yield from model.named_buffers()
