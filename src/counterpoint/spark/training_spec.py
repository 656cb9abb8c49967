"""What every task has to know of the training, and the replica that a Python worker keeps from one task to the next.

A closure carries the model's modules with their parameters on the ``meta`` device, so without a number of theirs; the
loss; and the optimizer's class and options. Weights travel as bytes, and what never changes, buffers and frozen
parameters, is broadcast once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol, TypeAlias

import torch
from safetensors.torch import load as read_tensors, save as write_tensors
from torch import Tensor, nn

from counterpoint.errors import PlanError
from counterpoint.partitioning.sample_independence import modules_with_running_stats
from counterpoint.runtime.params.flat_layout import FlatLayout
from counterpoint.spark.failures import serialization_error
from counterpoint.spark.weight_slices import SliceCodec, SliceOptimizer

Loss: TypeAlias = Callable[[Any, Any], Tensor]


class BroadcastBytes(Protocol):
    """Bytes that are the same for the whole run; a broadcast of Spark's is one."""

    @property
    def value(self) -> bytes:
        """The bytes."""


@dataclass(frozen=True, slots=True)
class LocalBytes:
    """Bytes that need not travel."""

    value: bytes


@dataclass(frozen=True, slots=True)
class TrainingSpec:
    """The training as a task knows it.

    Args:
        run: a name that no other run has.
        model: without the numbers of its parameters and buffers.
        still: those of them that no step changes.
        loss: from the model's output and the targets to the mean loss of the samples.
        rule: how slices are updated.
        layout: where trained parameters lie in the flat vector.
        code: how weights and gradients travel.
        seed: of what the model draws.
    """

    run_id: str
    model: nn.Module
    constants: BroadcastBytes
    loss: Loss
    slice_optimizer: SliceOptimizer
    layout: FlatLayout
    codec: SliceCodec = ""
    seed: int = 0


def meta_copy(model: nn.Module) -> nn.Module:
    """Return a copy of the model whose parameters and buffers have shapes and nothing else; tied ones stay tied.

    Raises:
        PlanError: something in it cannot be copied, so it cannot be shipped.
    """
    memo: dict[int, Any] = {
        id(param): nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
        for param in model.parameters()
    }
    memo |= {id(buffer): torch.empty_like(buffer, device="meta") for buffer in model.buffers()}
    try:
        return copy.deepcopy(model, memo)
    except TypeError as error:
        raise PlanError(serialization_error(str(error))) from error


def serialize_constants(model: nn.Module, trained: Mapping[str, int]) -> bytes:
    """Return what no step changes, as bytes: buffers, and parameters that are not trained."""
    found = {name: tensor.detach().clone() for name, tensor in _all_tensors(model) if name not in trained}
    return write_tensors(found)


def check_no_running_stats(model: nn.Module) -> None:
    """Check that a forward leaves nothing behind in the model.

    Raises:
        PlanError: it has running statistics.
    """
    for path in modules_with_running_stats(model):
        raise PlanError(
            f"{path} keeps running statistics, but a task of Spark's may run again, so it must leave nothing behind; "
            "take track_running_stats=False, or a GroupNorm"
        )


class SparkReplica:
    """A model with numbers, in a worker; its trained parameters are views of one vector."""

    def __init__(self, spec: TrainingSpec) -> None:
        self.model = spec.model
        layout = spec.layout
        self.flat = torch.empty(layout.num_elements, dtype=layout.dtype)
        views = {slot.name: self.flat[slot.start : slot.stop].view(slot.shape) for slot in layout.slots}
        load_values(self.model, {**read_tensors(spec.constants.value), **views}, trained=views)
        self.model.train()
        known = dict(self.model.named_parameters())
        self.params = [known[slot.name] for slot in layout.slots]

    def clear_grads(self) -> None:
        """No parameter has a gradient."""
        for param in self.params:
            param.grad = None

    def flat_grad(self) -> Tensor:
        """Return the gradients of all trained parameters as one vector; zeros where there is none."""
        found = [torch.zeros_like(param) if param.grad is None else param.grad for param in self.params]
        return torch.cat([one.detach().reshape(-1) for one in found])

    def params_without_grad(self, layout: FlatLayout) -> list[str]:
        """Return the names of trained parameters without a gradient."""
        return [slot.name for slot, param in zip(layout.slots, self.params, strict=True) if param.grad is None]


def load_values(model: nn.Module, values: Mapping[str, Tensor], trained: Collection[str] = ()) -> None:
    """A model of ``meta_copy`` has the values, which it owns from now on.

    Args:
        model: changed in place.
        values: of every parameter and buffer, by the first of its names.
        trained: names of the parameters that get a gradient.
    """
    made: dict[int, Tensor] = {}
    for name, tensor in _all_tensors(model):
        is_parameter = isinstance(tensor, nn.Parameter)
        made[id(tensor)] = nn.Parameter(values[name], requires_grad=name in trained) if is_parameter else values[name]
    for module in model.modules():
        for own in (module._parameters, module._buffers):  # noqa: SLF001 - replaced by others of the same shape
            own.update({key: made[id(old)] for key, old in own.items() if old is not None})  # type: ignore[misc]


class _ReplicaSlot:
    """Where a worker keeps the replica of a run."""

    def __init__(self) -> None:
        self.replica: SparkReplica | None = None


@lru_cache(maxsize=1)
def _replica_slot(run_id: str) -> _ReplicaSlot:
    """Return the place of a run's replica in this process; that of another run is given up."""
    del run_id
    return _ReplicaSlot()


def get_replica(spec: TrainingSpec) -> SparkReplica:
    """Return this process's replica, made when it is first asked for."""
    kept = _replica_slot(spec.run_id)
    if kept.replica is None:
        kept.replica = SparkReplica(spec)
    return kept.replica


def _all_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and buffer by the first of its names."""
    yield from model.named_parameters()
    yield from model.named_buffers()


UnusedParameters: TypeAlias = Literal["error", "zero"]
