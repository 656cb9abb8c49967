"""What instructions cost: seconds of computing, seconds of a link."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

from counterpoint.model.spec import ModelSpec, Unit
from counterpoint.program.instruction import (
    Backward,
    Collective,
    Commit,
    Compute,
    Forward,
    Instruction,
    Push,
    Recompute,
    Release,
    Send,
    Update,
    Value,
    weight,
)
from counterpoint.program.traffic import Sizes
from counterpoint.simulator.network import Message, Network, Talk
from counterpoint.world.cluster import Cluster, Device

ADAM_PASSES = 7
"""How often an update goes over its parameters: it reads weight, gradient and two states, and writes three back."""


class Costs(Protocol):
    """Seconds of an instruction, where nothing else is in its way; the same for all microbatches."""

    def compute_s(self, word: Compute | Update, part: Fraction) -> float:
        """Return how long a rank as fast as the device computes; an update applies to ``part`` of its unit."""
        ...

    def call_s(self, word: Instruction) -> float:
        """Return what it costs to begin a call with a word, once for all words that the call carries out."""
        ...

    def add_s(self, block: int) -> float:
        """Return how long it takes to add a block's gradient of one microbatch to what earlier ones have left."""
        ...

    def link_s(self, word: Send | Push | Collective | Commit, part: Fraction, rank: int) -> float:
        """Return how long a word of a rank occupies the links of those who send; ``part`` of the value is at hand."""
        ...

    def crossing_s(self, word: Send | Push | Collective | Commit, part: Fraction, rank: int) -> float:
        """Return how many of these seconds it is on links that ranks of a host share."""
        ...

    def hand_s(self, word: Talk, part: Fraction, rank: int, *, has_one_copy: bool = False) -> float:
        """Return for how long a word of a rank that talks to others keeps its own processor busy.

        Args:
            word: what it says or hears.
            part: of the value that is at hand.
            rank: whose word it is.
            has_one_copy: whether weights and gradients of its members are one and the same memory.
        """
        ...

    def is_streamed(self, word: Message, rank: int) -> bool:
        """Tell whether a message of a rank is taken out while it is still being put in, by two that are both busy."""
        ...

    def pass_s(self, word: Talk | Release) -> float:
        """Return how long a rank takes to go once over as much of its own memory as what the word is about takes."""
        ...

    def serve_s(self, unit: Unit, server: int, worker: int) -> tuple[float, float]:
        """Return how long a server takes to apply one push, and how long its answer occupies the link."""
        ...


@dataclass(frozen=True, slots=True)
class UnitCosts:
    """Every forward takes one tick, also a repeated one, every backward as many as said, a part of one half of them.

    All else takes none.
    """

    backward_ticks: float = 1.0

    def compute_s(self, word: Compute | Update, part: Fraction) -> float:
        """Return the ticks of a word."""
        match word:
            case Forward() | Recompute():
                return 1.0
            case Backward():
                return self.backward_ticks / (2 if word.part else 1)
            case Update():
                return 0.0

    def add_s(self, block: int) -> float:
        """Return nothing."""
        return 0.0

    def call_s(self, word: Instruction) -> float:
        """Return nothing."""
        return 0.0

    def link_s(self, word: Send | Push | Collective | Commit, part: Fraction, rank: int) -> float:
        """Return nothing."""
        return 0.0

    def crossing_s(self, word: Send | Push | Collective | Commit, part: Fraction, rank: int) -> float:
        """Return nothing."""
        return 0.0

    def hand_s(self, word: Talk, part: Fraction, rank: int, *, has_one_copy: bool = False) -> float:
        """Return nothing."""
        return 0.0

    def is_streamed(self, word: Message, rank: int) -> bool:
        """Tell that none is."""
        return False

    def pass_s(self, word: Talk | Release) -> float:
        """Return nothing."""
        return 0.0

    def serve_s(self, unit: Unit, server: int, worker: int) -> tuple[float, float]:
        """Return nothing."""
        return 0.0, 0.0


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """Costs of a model on a cluster; a backward costs two forwards, one for each of its two products and parts.

    Args:
        model: the model with the blocks that the program names.
        cluster: where it runs.
        samples_per_micro: samples in one microbatch.
        size_of: bytes of a whole value on one rank.
    """

    model: ModelSpec
    cluster: Cluster
    samples_per_micro: int
    size_of: Sizes

    def compute_s(self, word: Compute | Update, part: Fraction) -> float:
        """Return work by the device's speed."""
        match word:
            case Forward(block) | Recompute(block):
                return self._block_s(block)
            case Backward(block):
                return (1 if word.part else 2) * self._block_s(block)
            case Update(unit):
                return self._update_s(unit) * float(part)

    def add_s(self, block: int) -> float:
        """Return nothing: it is not counted."""
        return 0.0

    def call_s(self, word: Instruction) -> float:
        """Return nothing: counted operations say nothing of calls."""
        return 0.0

    def link_s(self, word: Send | Push | Collective | Commit, part: Fraction, rank: int) -> float:
        """Return what :class:`counterpoint.simulator.network.Network` says."""
        return self.network.load(word, part, rank).seconds

    def crossing_s(self, word: Send | Push | Collective | Commit, part: Fraction, rank: int) -> float:
        """Return what :class:`counterpoint.simulator.network.Network` says."""
        return self.network.load(word, part, rank).crossing_s

    def hand_s(self, word: Talk, part: Fraction, rank: int, *, has_one_copy: bool = False) -> float:
        """Return what :class:`counterpoint.simulator.network.Network` says."""
        return self.network.hand_s(word, part, rank, has_one_copy=has_one_copy)

    def is_streamed(self, word: Message, rank: int) -> bool:
        """Tell what :class:`counterpoint.simulator.network.Network` says."""
        return self.network.is_streamed(word, rank)

    def pass_s(self, word: Talk | Release) -> float:
        """Return nothing: it is not counted."""
        return 0.0

    def serve_s(self, unit: Unit, server: int, worker: int) -> tuple[float, float]:
        """Return an update by the memory's speed, and the weights by that of the link to the worker."""
        answer = Send(weight(unit), worker)
        return self._update_s(unit), self.network.load(answer, Fraction(1), server).seconds

    @property
    def network(self) -> Network:
        """How long words are on the cluster's links."""
        return Network(self.cluster, self.size_of)

    def _block_s(self, block: int) -> float:
        return self.model.blocks[block].cost * self.samples_per_micro / self.cluster.device.cost_per_s

    def _update_s(self, unit: Unit) -> float:
        return update_s(self.size_of(weight(unit)), self.cluster.device)


def update_s(weight_bytes: float, device: Device) -> float:
    """Return how long a device takes to update parameters of so many bytes, which its memory decides."""
    return ADAM_PASSES * weight_bytes / device.memory_bytes_per_s


def unit_costs(*, backward_ticks: float = 1.0) -> Costs:
    """Return costs in ticks: a forward takes one, all communication and every update take none."""
    return UnitCosts(backward_ticks)


def model_costs(model: ModelSpec, cluster: Cluster, size_of: Sizes, *, samples_per_micro: int = 1) -> Costs:
    """Return the costs of a model on a cluster; see :class:`ModelCosts`."""
    sizes: dict[tuple[str, tuple[int, ...], str], int] = {}

    def remembered(value: Value, code: str = "") -> int:
        key = (value.name, value.blocks, code)  # the microbatch changes no size
        if key not in sizes:
            sizes[key] = size_of(value, code) if code else size_of(value)
        return sizes[key]

    return ModelCosts(model, cluster, samples_per_micro, remembered)
