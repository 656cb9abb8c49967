"""From a plan to a program."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import reduce

from counterpoint.compiler.overlap import overlap
from counterpoint.compiler.recompute import recompute
from counterpoint.model.spec import ModelSpec
from counterpoint.plan import Plan
from counterpoint.program.instruction import FORWARDS, OF_UNITS, Value
from counterpoint.program.laws import Promise, check
from counterpoint.program.ledger import Ledger
from counterpoint.program.program import Program
from counterpoint.program.strands import strand_of
from counterpoint.program.traffic import Sizes, sent_bytes
from counterpoint.program.turn import Turn, beginning, steady
from counterpoint.strategies.solo import solo, solo_forecast
from counterpoint.strategies.strategy import Forecast
from counterpoint.strategies.written import blamed


@dataclass(frozen=True, slots=True)
class Compiled:
    """A program, proved if it may run, with the model it is for and what its strategies forecast.

    Args:
        plan: what was asked for.
        model: the model with the blocks that the plan needed.
        program: one row per rank.
        forecast: what the closed formulas say.
        ledger: which gradients entered which update; empty where nothing was proved.
        turns: the kinds of steps, one for a synchronous plan. ``program`` is then the last one's, or the stream whose
            prologue and body are kinds of steps.
    """

    plan: Plan
    model: ModelSpec
    program: Program
    forecast: Forecast
    ledger: Ledger
    turns: tuple[Turn, ...]

    def turn_at(self, number: int, *, has_late: bool = True) -> Turn:
        """Return the kind of a step; see :meth:`counterpoint.strategies.rhythm.Rhythm.turn_at`."""
        name = self.plan.rhythm.turn_at(number, has_late=has_late)
        return next(turn for turn in self.turns if turn.name == name)

    @property
    def is_synchronous(self) -> bool:
        """Whether it keeps solo's numbers."""
        return self.forecast.staleness == 0 and len(self.turns) == 1

    def sent_bytes(self) -> tuple[Fraction, ...]:
        """Return the bytes that each rank sends in a step, on average over all steps in the long run."""
        parts = ([turn.share * bytes_ for bytes_ in turn.sent_bytes] for turn in self.turns)
        return tuple(sum(own, Fraction(0)) for own in zip(*parts, strict=True))


def compile(  # noqa: A001 - read as cp.compile
    plan: Plan, model: ModelSpec, *, samples_per_micro: int = 1, proves: bool = True
) -> Compiled:
    """Fold the plan's strategies over the solo program, run the passes, and prove the laws.

    Args:
        plan: who does what.
        model: the blocks as they came from the model.
        samples_per_micro: samples in one microbatch, for the bytes of activations.
        proves: whether the laws are proved, without which a program can be looked at and simulated, but not run.

    Raises:
        PlanError: the strategies cannot be combined like this, or not on this model.
        ProgramError: the result breaks a law.
    """
    shares, asked = plan.rhythm.turns, _Asked(model, samples_per_micro, proves)
    if plan.rhythm.late:
        made = _compile_one(plan, asked)
        sent = made.forecast.sent_bytes()
        begun = beginning(made.program)
        begun_bytes = count_bytes(begun, made.model, samples_per_micro)
        first = Turn("first", begun, made.ledger, begun_bytes, shares["first"])
        return replace(made, turns=(first, Turn("steady", steady(made.program), made.ledger, sent, shares["steady"])))
    every = [(name, _compile_one(plan.at(name), asked)) for name in shares]
    return replace(every[-1][1], plan=plan, turns=tuple(_turn(name, made, shares[name]) for name, made in every))


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is the same for all kinds of steps; see :func:`compile`."""

    model: ModelSpec
    samples_per_micro: int
    proves: bool


def _turn(name: str, made: Compiled, share: Fraction) -> Turn:
    """Return a kind of step: the program itself, or the body of a stream."""
    sent = made.forecast.sent_bytes()
    if not made.program.is_stream:
        return Turn(name, made.program, made.ledger, sent, share)
    return Turn(name, steady(made.program), made.ledger, sent, share, stream=made.program)


def _compile_one(plan: Plan, asked: _Asked) -> Compiled:
    """Return the program of one kind of step, or a stream, proved if that is asked for."""
    with blamed(plan.written, "strategy"):
        return _fold(plan, asked)


def _fold(plan: Plan, asked: _Asked) -> Compiled:
    samples = asked.samples_per_micro
    refined = reduce(lambda spec, strategy: strategy.refine(spec), plan.strategies, asked.model)
    program = solo(refined, plan.num_microbatches)
    forecast = solo_forecast(refined, plan.num_microbatches, samples)
    for strategy in plan.strategies:
        program = strategy.lower(program, refined)
        forecast = strategy.forecast(forecast, refined)
    if "overlap" in plan.passes:
        program = overlap(program)
    again = plan.recomputation
    if again is not None:
        with blamed(plan.written, "passes"):
            blocks = again.blocks(refined)
        program, forecast = recompute(program, again, blocks), again.forecast(forecast, blocks)
    ledger = Ledger()
    if asked.proves:
        ledger = check(program, promise_of(forecast), refined.units, count_bytes(program, refined, samples))
    return Compiled(plan, refined, program, forecast, ledger, ())


def promise_of(forecast: Forecast) -> Promise:
    """Return what a program must keep to be as forecast."""
    ranks = forecast.ranks
    return Promise(
        staleness=forecast.staleness,
        in_flight=tuple(rank.in_flight for rank in ranks),
        heads=tuple(rank.heads for rank in ranks),
        sent_bytes=forecast.sent_bytes(),
        num_blocks=1 + max(block for rank in ranks for block in rank.blocks),
        num_micros=forecast.num_micros,
        sliced=forecast.sliced,
        updated=tuple(rank.updated for rank in ranks),
        gradients=tuple(rank.gradients for rank in ranks),
        apart=forecast.apart,
        versions=tuple(rank.versions for rank in ranks),
        room=forecast.room,
        tapes=forecast.tapes,
        repeats=forecast.repeats,
        strands=forecast.strands,
    )


def value_bytes(value: Value, model: ModelSpec, samples_per_micro: int, code: str = "") -> int:
    """Return the bytes of a whole value on one rank, as it is or written in a code."""
    if value.name in OF_UNITS:
        return model.unit_bytes(value.blocks, code)
    block = value.blocks[0]
    split = model.blocks[block].split
    if value.name == "y":
        return split.output_bytes * samples_per_micro if split is not None else 0
    if value.name == "dx":
        return split.input_bytes * samples_per_micro if split is not None else 0
    strand = model.find_strand(strand_of(value))
    if strand is None:  # of what only the model's output holds
        return model.made_bytes(block) * samples_per_micro if value.name == "g" else 0
    size = strand.num_bytes if value.name in FORWARDS else strand.gradient_bytes
    return (size or 0) * samples_per_micro


def held_in(model: ModelSpec, samples_per_micro: int) -> Sizes:
    """Return how large values are where they are kept: of what leaves a block, all that it makes for others."""
    size_of = sizes_in(model, samples_per_micro)

    def held(value: Value, code: str = "") -> int:
        return model.made_bytes(value.blocks[0]) * samples_per_micro if value.name == "g" else size_of(value, code)

    return held


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
