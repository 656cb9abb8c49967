"""The training step on a single rank: the reference that every synchronous strategy must reproduce."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from counterpoint.model.spec import ModelSpec
from counterpoint.program.instruction import Backward, Commit, Forward, Instruction, Update
from counterpoint.program.program import Program, RankProgram
from counterpoint.strategies.strategy import CostEstimate, RankCost


def single_device_program(model: ModelSpec, num_microbatches: int) -> Program:
    """Return the program of one rank: each microbatch forward and backward, then the commit and all updates."""
    return Program((RankProgram(tuple(_instructions(model, num_microbatches))),))


def _instructions(model: ModelSpec, num_microbatches: int) -> Iterator[Instruction]:
    for micro in range(num_microbatches):
        for block in range(model.num_blocks):
            yield Forward(block, micro)
        for block in reversed(range(model.num_blocks)):
            yield Backward(block, micro)
    yield Commit((0,))
    for unit in model.units:
        yield Update(unit)


def single_device_cost(model: ModelSpec, num_microbatches: int, samples_per_microbatch: int) -> CostEstimate:
    """Return the cost of one rank, which sends nothing.

    Cost:
        Bytes sent: none.

    Source:
        The training step of any framework.
    """
    updates = {unit: Fraction(model.unit_bytes(unit)) for unit in model.units}
    rank = RankCost(tuple(range(model.num_blocks)), num_microbatches, updates)
    return CostEstimate((rank,), num_microbatches, samples_per_microbatch, edges=model.edges)
