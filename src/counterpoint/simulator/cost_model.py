"""Cost models: seconds of computing, of communication and of memory traffic for each instruction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

from counterpoint.model.spec import ModelSpec, Unit
from counterpoint.program.comm_volume import SizeFn
from counterpoint.program.instruction import (
    Backward,
    Collective,
    Commit,
    Compute,
    Fetch,
    Forward,
    Free,
    Instruction,
    Offload,
    Push,
    Recompute,
    Send,
    TensorRef,
    Update,
    grad,
    weight,
)
from counterpoint.simulator.network import CommInstruction, NetworkModel, P2PInstruction
from counterpoint.world.cluster import Cluster, Device

ADAM_PASSES = 7
"""Passes of an update over its parameters: it reads weight, gradient and two states, and writes three of them."""


class CostModel(Protocol):
    """Seconds of an instruction without contention; equal for all microbatches."""

    def compute_s(self, instruction: Compute | Update, fraction: Fraction) -> float:
        """Return how long a rank at device speed computes; an update applies to ``fraction`` of its unit."""
        ...

    def launch_overhead_s(self, instruction: Instruction) -> float:
        """Return the fixed cost of a call, which is paid once for all instructions that are fused into it."""
        ...

    def grad_accumulate_s(self, block: int) -> float:
        """Return how long it takes to add a block's gradient to that of earlier microbatches."""
        ...

    def link_s(self, instruction: Send | Push | Collective | Commit, fraction: Fraction, rank: int) -> float:
        """Return how long an instruction occupies the senders' links; it communicates ``fraction`` of its tensor."""
        ...

    def shared_link_s(self, instruction: Send | Push | Collective | Commit, fraction: Fraction, rank: int) -> float:
        """Return how many of these seconds are on links that ranks of a host share."""
        ...

    def cpu_s(
        self, instruction: CommInstruction, fraction: Fraction, rank: int, *, shares_memory: bool = False
    ) -> float:
        """Return for how long communication keeps the processor of a rank busy.

        Args:
            instruction: the instruction.
            fraction: of its tensor that is communicated.
            rank: the rank that executes it.
            shares_memory: whether parameters and gradients of its members are the same memory.
        """
        ...

    def is_streamed(self, instruction: P2PInstruction, rank: int) -> bool:
        """Return whether the receiver reads a message while the sender still writes it, so that both are busy."""
        ...

    def memory_pass_s(self, instruction: CommInstruction | Free) -> float:
        """Return how long one pass over the instruction's tensor in the rank's own memory takes."""
        ...

    def offload_s(self, instruction: Fetch | Offload, fraction: Fraction) -> float:
        """Return how long a fraction of a unit's state or weights, or a block's input, takes to or from its place."""
        ...

    def server_update_s(self, unit: Unit, server: int, worker: int) -> tuple[float, float]:
        """Return how long a server takes to apply one push, and how long its reply occupies the link."""
        ...


@dataclass(frozen=True, slots=True)
class UnitCosts:
    """Costs in ticks: 1 for a forward, ``backward_ticks`` for a backward, half as much for a part of a backward.

    A recomputation counts as a forward. Everything else costs nothing.
    """

    backward_ticks: float = 1.0

    def compute_s(self, instruction: Compute | Update, fraction: Fraction) -> float:
        """Return the ticks of an instruction."""
        match instruction:
            case Forward() | Recompute():
                return 1.0
            case Backward():
                return self.backward_ticks / (2 if instruction.part else 1)
            case Update():
                return 0.0

    def grad_accumulate_s(self, block: int) -> float:
        """Return 0."""
        return 0.0

    def launch_overhead_s(self, instruction: Instruction) -> float:
        """Return 0."""
        return 0.0

    def link_s(self, instruction: Send | Push | Collective | Commit, fraction: Fraction, rank: int) -> float:
        """Return 0."""
        return 0.0

    def shared_link_s(self, instruction: Send | Push | Collective | Commit, fraction: Fraction, rank: int) -> float:
        """Return 0."""
        return 0.0

    def cpu_s(
        self, instruction: CommInstruction, fraction: Fraction, rank: int, *, shares_memory: bool = False
    ) -> float:
        """Return 0."""
        return 0.0

    def is_streamed(self, instruction: P2PInstruction, rank: int) -> bool:
        """Return False."""
        return False

    def memory_pass_s(self, instruction: CommInstruction | Free) -> float:
        """Return 0."""
        return 0.0

    def offload_s(self, instruction: Fetch | Offload, fraction: Fraction) -> float:
        """Return 0."""
        return 0.0

    def server_update_s(self, unit: Unit, server: int, worker: int) -> tuple[float, float]:
        """Return 0 for both."""
        return 0.0, 0.0


@dataclass(frozen=True, slots=True)
class AnalyticCosts:
    """Costs from operation counts, bytes and the speeds of a cluster.

    A backward costs two forwards, one for the gradient of its inputs and one for that of its parameters. On a device
    with a roofline a forward is at least one kernel for each layer, which reads its parameters and its input and writes
    its output.

    Args:
        forward_s: seconds of a forward of each block.
        cluster: where it runs.
        size_of: bytes of a whole tensor on one rank.
    """

    forward_s: tuple[float, ...]
    cluster: Cluster
    size_of: SizeFn

    def compute_s(self, instruction: Compute | Update, fraction: Fraction) -> float:
        """Return the work divided by the device's speed, or its time at the device's roofline."""
        match instruction:
            case Forward(block) | Recompute(block):
                return self.forward_s[block]
            case Backward(block):
                return (1 if instruction.part else 2) * self.forward_s[block]
            case Update(unit):
                return self._update_s(unit) * float(fraction)

    def grad_accumulate_s(self, block: int) -> float:
        """Return 0: it is not modelled."""
        return 0.0

    def launch_overhead_s(self, instruction: Instruction) -> float:
        """Return 0: operation counts do not include the overhead of calls."""
        return 0.0

    def link_s(self, instruction: Send | Push | Collective | Commit, fraction: Fraction, rank: int) -> float:
        """Return the link time of :class:`counterpoint.simulator.network.NetworkModel`."""
        return self.network.link_load(instruction, fraction, rank).seconds

    def shared_link_s(self, instruction: Send | Push | Collective | Commit, fraction: Fraction, rank: int) -> float:
        """Return the shared part of the link time of :class:`counterpoint.simulator.network.NetworkModel`."""
        return self.network.link_load(instruction, fraction, rank).shared_s

    def cpu_s(
        self, instruction: CommInstruction, fraction: Fraction, rank: int, *, shares_memory: bool = False
    ) -> float:
        """Return the CPU time of :class:`counterpoint.simulator.network.NetworkModel`."""
        return self.network.cpu_s(instruction, fraction, rank, shares_memory=shares_memory)

    def is_streamed(self, instruction: P2PInstruction, rank: int) -> bool:
        """Return what :class:`counterpoint.simulator.network.NetworkModel` returns."""
        return self.network.is_streamed(instruction, rank)

    def memory_pass_s(self, instruction: CommInstruction | Free) -> float:
        """Return 0: it is not modelled."""
        return 0.0

    def offload_s(self, instruction: Fetch | Offload, fraction: Fraction) -> float:
        """Return the bytes on the disk, or those that travel between host and device, by the bandwidth."""
        unit, device = instruction.tensor.blocks, self.cluster.device
        if instruction.place == "disk":
            return self.size_of(instruction.tensor) * float(fraction) / device.disk_bytes_per_s
        moved = [weight(unit)] if isinstance(instruction, Offload) else [weight(unit), grad(unit)]
        return sum(map(self.size_of, moved)) * float(fraction) / device.host_bytes_per_s

    def server_update_s(self, unit: Unit, server: int, worker: int) -> tuple[float, float]:
        """Return the update at memory bandwidth, and the parameters on the link to the worker."""
        reply = Send(weight(unit), worker)
        return self._update_s(unit), self.network.link_load(reply, Fraction(1), server).seconds

    @property
    def network(self) -> NetworkModel:
        """Link times on the cluster."""
        return NetworkModel(self.cluster, self.size_of)

    def _update_s(self, unit: Unit) -> float:
        return update_s(self.size_of(TensorRef("master_weight", unit)), self.cluster.device)


def update_s(weight_bytes: float, device: Device) -> float:
    """Return how long a device takes to update ``weight_bytes`` of (master) weights, at its memory bandwidth.

    With master weights of 4 bytes an update reads gradients of 2 bytes and writes weights of 2 bytes, too, which is
    as much as reading gradients of 4.
    """
    return ADAM_PASSES * weight_bytes / device.reached_bytes_per_s


def unit_costs(*, backward_ticks: float = 1.0) -> CostModel:
    """Return costs in ticks: a forward takes one; communication and updates take none."""
    return UnitCosts(backward_ticks)


def analytic_costs(
    model: ModelSpec, cluster: Cluster, size_of: SizeFn, *, samples_per_microbatch: int = 1
) -> CostModel:
    """Return the costs of a model on a cluster; see :class:`AnalyticCosts`."""
    sizes: dict[tuple[str, tuple[int, ...], str], int] = {}

    def cached_size(tensor: TensorRef, codec: str = "") -> int:
        key = (tensor.name, tensor.blocks, codec)  # sizes do not depend on the microbatch
        if key not in sizes:
            sizes[key] = size_of(tensor, codec) if codec else size_of(tensor)
        return sizes[key]

    return AnalyticCosts(tuple(_forward_times(model, cluster.device, samples_per_microbatch)), cluster, cached_size)


def _forward_times(model: ModelSpec, device: Device, samples: int) -> Iterator[float]:
    """Yield the seconds of a forward of each block, for microbatches of a number of samples."""
    if device.roofline is None:
        yield from (block.cost * samples / device.cost_per_s for block in model.blocks)
        return
    sizes = {
        param.name: param.num_elements * (param.element_bytes("cast") or param.element_bytes("weight"))
        for param in model.params
    }
    for block in model.blocks:
        yield sum(
            device.kernel_s(
                layer.cost * samples / block.tp_degree,
                (sum(sizes.get(name, 0) for name in layer.params) + 2 * samples * layer.output_bytes) / block.tp_degree,
                model.compute_dtype,
            )
            for layer in block.layers
        )
