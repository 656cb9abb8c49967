"""What instructions cost: seconds of computing, seconds of a link."""

from __future__ import annotations

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
    Forward,
    Free,
    Instruction,
    Push,
    Recompute,
    Send,
    TensorRef,
    Update,
    weight,
)
from counterpoint.simulator.network import CommInstruction, NetworkModel, P2PInstruction
from counterpoint.world.cluster import Cluster, Device

ADAM_PASSES = 7
"""How often an update goes over its parameters: it reads weight, gradient and two states, and writes three back."""


class CostModel(Protocol):
    """Seconds of an instruction, where nothing else is in its way; the same for all microbatches."""

    def compute_s(self, instruction: Compute | Update, fraction: Fraction) -> float:
        """Return how long a rank as fast as the device computes; an update applies to ``part`` of its unit."""
        ...

    def launch_overhead_s(self, instruction: Instruction) -> float:
        """Return what it costs to begin a call with a word, once for all words that the call carries out."""
        ...

    def grad_accumulate_s(self, block: int) -> float:
        """Return how long it takes to add a block's gradient of one microbatch to what earlier ones have left."""
        ...

    def link_s(self, instruction: Send | Push | Collective | Commit, fraction: Fraction, rank: int) -> float:
        """Return how long a word of a rank occupies the links of those who send; ``part`` of the value is at hand."""
        ...

    def shared_link_s(self, instruction: Send | Push | Collective | Commit, fraction: Fraction, rank: int) -> float:
        """Return how many of these seconds it is on links that ranks of a host share."""
        ...

    def cpu_s(
        self, instruction: CommInstruction, fraction: Fraction, rank: int, *, shares_memory: bool = False
    ) -> float:
        """Return for how long a word of a rank that talks to others keeps its own processor busy.

        Args:
            word: what it says or hears.
            part: of the value that is at hand.
            rank: whose word it is.
            has_one_copy: whether weights and gradients of its members are one and the same memory.
        """
        ...

    def is_streamed(self, instruction: P2PInstruction, rank: int) -> bool:
        """Tell whether a message of a rank is taken out while it is still being put in, by two that are both busy."""
        ...

    def memory_pass_s(self, instruction: CommInstruction | Free) -> float:
        """Return how long a rank takes to go once over as much of its own memory as what the word is about takes."""
        ...

    def server_update_s(self, unit: Unit, server: int, worker: int) -> tuple[float, float]:
        """Return how long a server takes to apply one push, and how long its answer occupies the link."""
        ...


@dataclass(frozen=True, slots=True)
class UnitCosts:
    """Every forward takes one tick, also a repeated one, every backward as many as said, a part of one half of them.

    All else takes none.
    """

    backward_ticks: float = 1.0

    def compute_s(self, instruction: Compute | Update, fraction: Fraction) -> float:
        """Return the ticks of a word."""
        match instruction:
            case Forward() | Recompute():
                return 1.0
            case Backward():
                return self.backward_ticks / (2 if instruction.part else 1)
            case Update():
                return 0.0

    def grad_accumulate_s(self, block: int) -> float:
        """Return nothing."""
        return 0.0

    def launch_overhead_s(self, instruction: Instruction) -> float:
        """Return nothing."""
        return 0.0

    def link_s(self, instruction: Send | Push | Collective | Commit, fraction: Fraction, rank: int) -> float:
        """Return nothing."""
        return 0.0

    def shared_link_s(self, instruction: Send | Push | Collective | Commit, fraction: Fraction, rank: int) -> float:
        """Return nothing."""
        return 0.0

    def cpu_s(
        self, instruction: CommInstruction, fraction: Fraction, rank: int, *, shares_memory: bool = False
    ) -> float:
        """Return nothing."""
        return 0.0

    def is_streamed(self, instruction: P2PInstruction, rank: int) -> bool:
        """Tell that none is."""
        return False

    def memory_pass_s(self, instruction: CommInstruction | Free) -> float:
        """Return nothing."""
        return 0.0

    def server_update_s(self, unit: Unit, server: int, worker: int) -> tuple[float, float]:
        """Return nothing."""
        return 0.0, 0.0


@dataclass(frozen=True, slots=True)
class AnalyticCosts:
    """Costs of a model on a cluster; a backward costs two forwards, one for each of its two products and parts.

    Args:
        model: the model with the blocks that the program names.
        cluster: where it runs.
        samples_per_micro: samples in one microbatch.
        size_of: bytes of a whole value on one rank.
    """

    model: ModelSpec
    cluster: Cluster
    samples_per_microbatch: int
    size_of: SizeFn

    def compute_s(self, instruction: Compute | Update, fraction: Fraction) -> float:
        """Return work by the device's speed."""
        match instruction:
            case Forward(block) | Recompute(block):
                return self._block_s(block)
            case Backward(block):
                return (1 if instruction.part else 2) * self._block_s(block)
            case Update(unit):
                return self._update_s(unit) * float(fraction)

    def grad_accumulate_s(self, block: int) -> float:
        """Return nothing: it is not counted."""
        return 0.0

    def launch_overhead_s(self, instruction: Instruction) -> float:
        """Return nothing: counted operations say nothing of calls."""
        return 0.0

    def link_s(self, instruction: Send | Push | Collective | Commit, fraction: Fraction, rank: int) -> float:
        """Return what :class:`counterpoint.simulator.network.Network` says."""
        return self.network.link_load(instruction, fraction, rank).seconds

    def shared_link_s(self, instruction: Send | Push | Collective | Commit, fraction: Fraction, rank: int) -> float:
        """Return what :class:`counterpoint.simulator.network.Network` says."""
        return self.network.link_load(instruction, fraction, rank).shared_s

    def cpu_s(
        self, instruction: CommInstruction, fraction: Fraction, rank: int, *, shares_memory: bool = False
    ) -> float:
        """Return what :class:`counterpoint.simulator.network.Network` says."""
        return self.network.cpu_s(instruction, fraction, rank, shares_memory=shares_memory)

    def is_streamed(self, instruction: P2PInstruction, rank: int) -> bool:
        """Tell what :class:`counterpoint.simulator.network.Network` says."""
        return self.network.is_streamed(instruction, rank)

    def memory_pass_s(self, instruction: CommInstruction | Free) -> float:
        """Return nothing: it is not counted."""
        return 0.0

    def server_update_s(self, unit: Unit, server: int, worker: int) -> tuple[float, float]:
        """Return an update by the memory's speed, and the weights by that of the link to the worker."""
        answer = Send(weight(unit), worker)
        return self._update_s(unit), self.network.link_load(answer, Fraction(1), server).seconds

    @property
    def network(self) -> NetworkModel:
        """How long words are on the cluster's links."""
        return NetworkModel(self.cluster, self.size_of)

    def _block_s(self, block: int) -> float:
        return self.model.blocks[block].cost * self.samples_per_microbatch / self.cluster.device.cost_per_s

    def _update_s(self, unit: Unit) -> float:
        return update_s(self.size_of(weight(unit)), self.cluster.device)


def update_s(weight_bytes: float, device: Device) -> float:
    """Return how long a device takes to update parameters of so many bytes, which its memory decides."""
    return ADAM_PASSES * weight_bytes / device.memory_bytes_per_s


def unit_costs(*, backward_ticks: float = 1.0) -> CostModel:
    """Return costs in ticks: a forward takes one, all communication and every update take none."""
    return UnitCosts(backward_ticks)


def analytic_costs(
    model: ModelSpec, cluster: Cluster, size_of: SizeFn, *, samples_per_microbatch: int = 1
) -> CostModel:
    """Return the costs of a model on a cluster; see :class:`AnalyticCosts`."""
    sizes: dict[tuple[str, tuple[int, ...], str], int] = {}

    def remembered(value: TensorRef, code: str = "") -> int:
        key = (value.name, value.blocks, code)  # the microbatch changes no size
        if key not in sizes:
            sizes[key] = size_of(value, code) if code else size_of(value)
        return sizes[key]

    return AnalyticCosts(model, cluster, samples_per_microbatch, remembered)
