"""What instructions cost: seconds of computing, seconds of a link."""

from __future__ import annotations

import math
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
    Send,
    Update,
    Value,
    weight,
)
from counterpoint.program.traffic import Sizes
from counterpoint.simulator.rings import collective_s
from counterpoint.world.cluster import Cluster

ADAM_PASSES = 7
"""How often an update goes over its parameters: it reads weight, gradient and two states, and writes three back."""


class Costs(Protocol):
    """Seconds of an instruction; the same for all ranks and microbatches."""

    def compute_s(self, word: Compute | Update, part: Fraction) -> float:
        """Return how long a rank computes; an update applies to ``part`` of its unit."""
        ...

    def call_s(self, word: Instruction) -> float:
        """Return what it costs to begin a call with a word, once for all words that the call carries out."""
        ...

    def link_s(self, word: Send | Push | Collective | Commit, part: Fraction) -> float:
        """Return how long a word occupies the links of those who send; ``part`` of the value is at hand."""
        ...

    def serve_s(self, unit: Unit) -> tuple[float, float]:
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

    def call_s(self, word: Instruction) -> float:
        """Return nothing."""
        return 0.0

    def link_s(self, word: Send | Push | Collective | Commit, part: Fraction) -> float:
        """Return nothing."""
        return 0.0

    def serve_s(self, unit: Unit) -> tuple[float, float]:
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

    def call_s(self, word: Instruction) -> float:
        """Return nothing: counted operations say nothing of calls."""
        return 0.0

    def link_s(self, word: Send | Push | Collective | Commit, part: Fraction) -> float:
        """Return bytes by the link's speed; a commit goes up and down a tree of its members."""
        link = self.cluster.link
        match word:
            case Send(value) | Push(value):
                return link.seconds(self.size_of(value))
            case Collective(value=value, code=code) if code:
                return collective_s(word, self.size_of(value, code), link)
            case Collective(value=value):
                return collective_s(word, self.size_of(value) * part, link)
            case Commit(group):
                return 2 * math.ceil(math.log2(len(group))) * link.latency_s

    def serve_s(self, unit: Unit) -> tuple[float, float]:
        """Return an update by the memory's speed, and the weights by the link's."""
        return self._update_s(unit), self.cluster.link.seconds(self.size_of(weight(unit)))

    def _block_s(self, block: int) -> float:
        return self.model.blocks[block].cost * self.samples_per_micro / self.cluster.device.cost_per_s

    def _update_s(self, unit: Unit) -> float:
        return ADAM_PASSES * self.size_of(weight(unit)) / self.cluster.device.memory_bytes_per_s


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
