"""From a plan to a program."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import reduce

from counterpoint.compiler.overlap import overlap
from counterpoint.model.spec import ModelSpec
from counterpoint.plan import Plan
from counterpoint.program.instruction import Value
from counterpoint.program.laws import Promise, check
from counterpoint.program.ledger import Ledger
from counterpoint.program.program import Program
from counterpoint.program.traffic import Sizes, sent_bytes
from counterpoint.strategies.solo import solo, solo_forecast
from counterpoint.strategies.strategy import Forecast


@dataclass(frozen=True, slots=True)
class Compiled:
    """A program, proved, with the model it is for and what its strategies forecast.

    Args:
        plan: what was asked for.
        model: the model with the blocks that the plan needed.
        program: one row per rank.
        forecast: what the closed formulas say.
        ledger: which gradients entered which update.
    """

    plan: Plan
    model: ModelSpec
    program: Program
    forecast: Forecast
    ledger: Ledger


def compile(plan: Plan, model: ModelSpec, *, samples_per_micro: int = 1) -> Compiled:  # noqa: A001 - read as cp.compile
    """Fold the plan's strategies over the solo program, run the passes, and prove the laws.

    Args:
        plan: who does what.
        model: the blocks as they came from the model.
        samples_per_micro: samples in one microbatch, for the bytes of activations.

    Raises:
        PlanError: the strategies cannot be combined like this, or not on this model.
        ProgramError: the result breaks a law.
    """
    refined = reduce(lambda spec, strategy: strategy.refine(spec), plan.strategies, model)
    program = solo(refined, plan.num_microbatches)
    forecast = solo_forecast(refined, plan.num_microbatches, samples_per_micro)
    for strategy in plan.strategies:
        program = strategy.lower(program, refined)
        forecast = strategy.forecast(forecast, refined)
    if "overlap" in plan.passes:
        program = overlap(program)
    ledger = check(program, promise_of(forecast), refined.units, count_bytes(program, refined, samples_per_micro))
    return Compiled(plan, refined, program, forecast, ledger)


def promise_of(forecast: Forecast) -> Promise:
    """Return what a program must keep to be as forecast."""
    ranks = forecast.ranks
    return Promise(
        staleness=forecast.staleness,
        in_flight=tuple(rank.in_flight for rank in ranks),
        sent_bytes=forecast.sent_bytes(),
        num_blocks=1 + max(block for rank in ranks for block in rank.blocks),
        num_micros=forecast.num_micros,
        sliced=forecast.sliced,
        updated=tuple(rank.updated for rank in ranks),
        gradients=tuple(rank.gradients for rank in ranks),
    )


def value_bytes(value: Value, model: ModelSpec, samples_per_micro: int, code: str = "") -> int:
    """Return the bytes of a whole value on one rank, as it is or written in a code."""
    if value.name in {"grad", "weight"}:
        return model.unit_bytes(value.blocks, code)
    block = value.blocks[0]
    split = model.blocks[block].split
    if value.name == "y":
        return split.output_bytes * samples_per_micro if split is not None else 0
    if value.name == "dx":
        return split.input_bytes * samples_per_micro if split is not None else 0
    boundary = block - 1 if value.name == "x" else block
    return model.blocks[boundary].output_bytes * samples_per_micro


def count_bytes(program: Program, model: ModelSpec, samples_per_micro: int) -> tuple[Fraction, ...]:
    """Return the bytes that each rank's words send in one step."""
    return sent_bytes(program, sizes_in(model, samples_per_micro))


def sizes_in(model: ModelSpec, samples_per_micro: int) -> Sizes:
    """Return how large values are, each worked out once: the microbatch changes no size."""
    sizes: dict[tuple[str, tuple[int, ...], str], int] = {}

    def size_of(value: Value, code: str = "") -> int:
        key = (value.name, value.blocks, code)
        if key not in sizes:
            sizes[key] = value_bytes(value, model, samples_per_micro, code)
        return sizes[key]

    return size_of
