"""What instructions cost by the clock: seconds of computing that were measured, piece by piece, instead of counted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from counterpoint.model.spec import ModelSpec, Unit
from counterpoint.model.timing import Fixed, PieceTime, Timing
from counterpoint.program.instruction import (
    Backward,
    Collective,
    Commit,
    Compute,
    Forward,
    Instruction,
    Pull,
    Push,
    Recompute,
    Recv,
    Release,
    Send,
    Serve,
    Swap,
    Update,
    weight,
)
from counterpoint.program.traffic import Sizes
from counterpoint.simulator.costs import Costs
from counterpoint.simulator.moves import ADD_PASSES
from counterpoint.simulator.network import Message, Talk


@dataclass(frozen=True, slots=True)
class TimedCosts:
    """Costs of a model that was timed; what goes over links costs what it does by other costs.

    Args:
        blocks: what each block takes for a microbatch, as the program names them.
        fixed: what calls cost beside that.
        update_s_per_byte: of parameters.
        add_s_per_byte: of gradients, to add them to others.
        merges: of each block, what it takes to put together what batch norm has seen of all microbatches.
        size_of: bytes of a whole value on one rank.
        others: costs of the same model on the same cluster, for links.
    """

    blocks: tuple[PieceTime, ...]
    fixed: Fixed
    update_s_per_byte: float
    add_s_per_byte: float
    merges: tuple[float, ...]
    size_of: Sizes
    others: Costs

    def compute_s(self, word: Compute | Update, part: Fraction) -> float:
        """Return the seconds of a block's pieces, or of an update by its bytes, and what goes before it."""
        match word:
            case Forward(block) | Recompute(block):
                return self.blocks[block].forward_s
            case Backward(block, part="input"):
                return self.blocks[block].input_s
            case Backward(block, part="weight"):
                return self.blocks[block].weight_s
            case Backward(block):
                return self.blocks[block].backward_s
            case Update(unit):
                return self._update_s(unit) * float(part) + (self.merges[unit[0]] if len(unit) == 1 else 0.0)

    def call_s(self, word: Instruction) -> float:
        """Return the fixed seconds of a call.

        That of an update has those of the whole step; of a rank that updates nothing, its commit has them, and merges.
        """
        match word:
            case Forward() | Recompute():
                return self.fixed.forward_s
            case Backward():
                return self.fixed.backward_s
            case Update():
                return self.fixed.update_s + self.fixed.step_s
            case Commit():
                return self.fixed.step_s + sum(self.merges)
            case Collective() | Send() | Recv() | Push() | Pull() | Serve() | Release() | Swap():
                return 0.0

    def add_s(self, block: int) -> float:
        """Return what was measured: less than nothing where to write a gradient anew takes longer."""
        return self.blocks[block].added_s

    def link_s(self, word: Send | Push | Collective | Commit, part: Fraction, rank: int) -> float:
        """Return what it costs by the other costs."""
        return self.others.link_s(word, part, rank)

    def crossing_s(self, word: Send | Push | Collective | Commit, part: Fraction, rank: int) -> float:
        """Return what it costs by the other costs."""
        return self.others.crossing_s(word, part, rank)

    def hand_s(self, word: Talk, part: Fraction, rank: int, *, has_one_copy: bool = False) -> float:
        """Return what it costs by the other costs."""
        return self.others.hand_s(word, part, rank, has_one_copy=has_one_copy)

    def is_streamed(self, word: Message, rank: int) -> bool:
        """Tell what the other costs say."""
        return self.others.is_streamed(word, rank)

    def pass_s(self, word: Talk | Release) -> float:
        """Return a part of what it takes to add a gradient of so many bytes to another one."""
        return 0.0 if isinstance(word, Commit) else self.add_s_per_byte * self.size_of(word.value) / ADD_PASSES

    def serve_s(self, unit: Unit, server: int, worker: int) -> tuple[float, float]:
        """Return an update by its bytes and its fixed cost, and the answer by the other costs."""
        return self._update_s(unit) + self.fixed.update_s, self.others.serve_s(unit, server, worker)[1]

    def _update_s(self, unit: Unit) -> float:
        return self.update_s_per_byte * self.size_of(weight(unit))


def timed_costs(
    model: ModelSpec, timing: Timing, others: Costs, size_of: Sizes, *, samples_per_micro: int, num_micros: int
) -> Costs:
    """Return the costs of a model that was timed.

    Args:
        model: the model with the blocks that the program names.
        timing: of its pieces.
        others: costs of the same model on the same cluster, for links.
        size_of: bytes of a whole value on one rank.
        samples_per_micro: samples in one microbatch.
        num_micros: microbatches of a step, of all ranks.
    """
    point, fixed = timing.at(samples_per_micro), timing.fixed
    merging_s = 0.0
    if point.alone is not None:
        merging_s = 0.0 if num_micros == 1 else max(0.0, fixed.step_s - fixed.alone_s)
        point, fixed = point.as_alone() if num_micros == 1 else point, replace(fixed, step_s=fixed.alone_s)
    blocks = tuple(point.over(block) for block in model.blocks)
    counts = [len(block.params) for block in model.blocks]
    merges = tuple(merging_s * count / (sum(counts) or 1) for count in counts)
    return TimedCosts(blocks, fixed, timing.update_s_per_byte, timing.add_s_per_byte, merges, size_of, others)
