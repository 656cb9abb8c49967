"""The training step on a single rank: the reference that every synchronous strategy must reproduce."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction

from counterpoint.model.spec import ModelSpec
from counterpoint.program.instruction import Backward, Commit, Forward, Instruction, Update
from counterpoint.program.program import Program, RankProgram
from counterpoint.strategies.strategy import CostEstimate, RankCost


def single_device_program(model: ModelSpec, num_microbatches: int, *, forwards_first: bool = False) -> Program:
    """Return the program of one rank: each microbatch forward and backward, then the commit and all updates.

    Args:
        model: the model.
        num_microbatches: of a batch.
        forwards_first: whether all forwards come before the first backward.
    """
    groups = [range(num_microbatches)] if forwards_first else [(micro,) for micro in range(num_microbatches)]
    return Program((RankProgram(tuple(_instructions(model, groups))),))


def _instructions(model: ModelSpec, micros_of_groups: Iterable[Sequence[int]]) -> Iterator[Instruction]:
    for micros in micros_of_groups:
        for micro in micros:
            for block in range(model.num_blocks):
                yield Forward(block, micro)
        for micro in micros:
            for block in reversed(range(model.num_blocks)):
                yield Backward(block, micro)
    yield Commit((0,))
    for unit in model.units:
        yield Update(unit)


def single_device_cost(
    model: ModelSpec, num_microbatches: int, samples_per_microbatch: int, *, forwards_first: bool = False
) -> CostEstimate:
    """Return the cost of one rank, which sends nothing.

    Cost:
        Bytes sent: none.

    Source:
        The training step of any framework.
    """
    updates = {unit: Fraction(model.unit_bytes(unit)) for unit in model.units}
    in_flight = num_microbatches if forwards_first else 1
    rank = RankCost(tuple(range(model.num_blocks)), num_microbatches, updates, in_flight=in_flight)
    return CostEstimate((rank,), num_microbatches, samples_per_microbatch, edges=model.edges)
