"""From a plan to a program."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import reduce

from counterpoint.compiler.overlap import overlap
from counterpoint.compiler.recompute import recompute
from counterpoint.model.spec import ModelSpec
from counterpoint.plan.plan import Plan
from counterpoint.plan.source import plan_error_at
from counterpoint.program.comm_volume import SizeFn, sent_bytes
from counterpoint.program.edges import edge_endpoints
from counterpoint.program.instruction import ACTIVATIONS, UNIT_TENSORS, TensorRef
from counterpoint.program.program import Program
from counterpoint.program.step_variants import StepVariant, body_as_step, prologue_as_step
from counterpoint.program.verify.symbolic import SymbolicResult
from counterpoint.program.verify.verifier import Bounds, verify
from counterpoint.strategies.single_device import single_device_cost, single_device_program
from counterpoint.strategies.strategy import CostEstimate


@dataclass(frozen=True, slots=True)
class CompiledPlan:
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
    cost: CostEstimate
    symbolic: SymbolicResult
    step_variants: tuple[StepVariant, ...]

    def variant_at(self, step: int, *, has_delayed_grads: bool = True) -> StepVariant:
        """Return the kind of a step; see :meth:`counterpoint.strategies.sync_schedule.SyncSchedule.kind_at`."""
        name = self.plan.sync_schedule.kind_at(step, has_delayed_grad=has_delayed_grads)
        return next(turn for turn in self.step_variants if turn.name == name)

    @property
    def is_synchronous(self) -> bool:
        """Whether it keeps solo's numbers."""
        return self.cost.staleness == 0 and len(self.step_variants) == 1

    def sent_bytes(self) -> tuple[Fraction, ...]:
        """Return the bytes that each rank sends in a step, on average over all steps in the long run."""
        parts = ([turn.frequency * bytes_ for bytes_ in turn.sent_bytes] for turn in self.step_variants)
        return tuple(sum(own, Fraction(0)) for own in zip(*parts, strict=True))


def compile(  # noqa: A001 - read as cp.compile
    plan: Plan, model: ModelSpec, *, samples_per_micro: int = 1, verified: bool = True
) -> CompiledPlan:
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
    shares, asked = plan.sync_schedule.step_fractions, _CompileRequest(model, samples_per_micro, verified)
    if plan.sync_schedule.staleness:
        made = _compile_one(plan, asked)
        sent = made.cost.sent_bytes()
        begun = prologue_as_step(made.program)
        begun_bytes = count_bytes(begun, made.model, samples_per_micro)
        first = StepVariant("fill", begun, made.symbolic, begun_bytes, shares["fill"])
        return replace(
            made,
            step_variants=(first, StepVariant("steady", body_as_step(made.program), made.symbolic, sent, shares["steady"])),
        )
    every = [(name, _compile_one(plan.variant(name), asked)) for name in shares]
    return replace(
        every[-1][1], plan=plan, step_variants=tuple(_build_step_variant(name, made, shares[name]) for name, made in every)
    )


@dataclass(frozen=True, slots=True)
class _CompileRequest:
    """What is the same for all kinds of steps; see :func:`compile`."""

    model: ModelSpec
    samples_per_micro: int
    verified: bool


def _build_step_variant(name: str, made: CompiledPlan, frequency: Fraction) -> StepVariant:
    """Return a kind of step: the program itself, or the body of a stream."""
    sent = made.cost.sent_bytes()
    if not made.program.is_async_pipeline:
        return StepVariant(name, made.program, made.symbolic, sent, frequency)
    return StepVariant(name, body_as_step(made.program), made.symbolic, sent, frequency, async_pipeline=made.program)


def _compile_one(plan: Plan, request: _CompileRequest) -> CompiledPlan:
    """Return the program of one kind of step, or a stream, proved if that is asked for."""
    with plan_error_at(plan.source, "strategy"):
        return _apply_strategies(plan, request)


def _apply_strategies(plan: Plan, request: _CompileRequest) -> CompiledPlan:
    samples = request.samples_per_micro
    refined = reduce(lambda spec, strategy: strategy.split_model(spec), plan.strategies, request.model)
    program = single_device_program(refined, plan.num_microbatches)
    forecast = single_device_cost(refined, plan.num_microbatches, samples)
    for strategy in plan.strategies:
        program = strategy.lower(program, refined)
        forecast = strategy.estimate_cost(forecast, refined)
    if "overlap" in plan.passes:
        program = overlap(program)
    again = plan.recomputation
    if again is not None:
        with plan_error_at(plan.source, "passes"):
            blocks = again.select_blocks(refined)
        program, forecast = recompute(program, again, blocks), again.estimate_cost(forecast, blocks)
    ledger = SymbolicResult()
    if request.verified:
        ledger = verify(program, bounds_from(forecast), refined.units, count_bytes(program, refined, samples))
    return CompiledPlan(plan, refined, program, forecast, ledger, ())


def bounds_from(cost: CostEstimate) -> Bounds:
    """Return what a program must keep to be as forecast."""
    ranks = cost.ranks
    return Bounds(
        staleness=cost.staleness,
        in_flight=tuple(rank.in_flight for rank in ranks),
        chunk_starts=tuple(rank.chunk_starts for rank in ranks),
        sent_bytes=cost.sent_bytes(),
        num_blocks=1 + max(block for rank in ranks for block in rank.blocks),
        num_micros=cost.num_micros,
        tp_blocks=cost.tp_blocks,
        optimizer_fraction=tuple(rank.optimizer_fraction for rank in ranks),
        grad_fraction=tuple(rank.grad_fraction for rank in ranks),
        replicas_may_diverge=cost.replicas_may_diverge,
        weight_versions=tuple(rank.weight_versions for rank in ranks),
        recv_buffer_depth=cost.recv_buffer_depth,
        max_saved_activations=cost.max_saved_activations,
        recompute=cost.recompute,
        edges=cost.edges,
    )


def value_bytes(value: TensorRef, model: ModelSpec, samples_per_micro: int, codec: str = "") -> int:
    """Return the bytes of a whole value on one rank, as it is or written in a code."""
    if value.name in UNIT_TENSORS:
        return model.unit_bytes(value.blocks, codec)
    block = value.blocks[0]
    split = model.blocks[block].tp
    if value.name == "y":
        return split.output_bytes * samples_per_micro if split is not None else 0
    if value.name == "dx":
        return split.input_bytes * samples_per_micro if split is not None else 0
    strand = model.find_edge(edge_endpoints(value))
    if strand is None:  # of what only the model's output holds
        return model.outgoing_bytes(block) * samples_per_micro if value.name == "g" else 0
    size = strand.num_bytes if value.name in ACTIVATIONS else strand.grad_bytes
    return (size or 0) * samples_per_micro


def storage_size_fn(model: ModelSpec, samples_per_micro: int) -> SizeFn:
    """Return how large values are where they are kept: of what leaves a block, all that it makes for others."""
    size_of = message_size_fn(model, samples_per_micro)

    def held(value: TensorRef, code: str = "") -> int:
        return model.outgoing_bytes(value.blocks[0]) * samples_per_micro if value.name == "g" else size_of(value, code)

    return held


def count_bytes(program: Program, model: ModelSpec, samples_per_micro: int) -> tuple[Fraction, ...]:
    """Return the bytes that each rank's words send in one step."""
    return sent_bytes(program, message_size_fn(model, samples_per_micro))


def message_size_fn(model: ModelSpec, samples_per_micro: int) -> SizeFn:
    """Return how large values are, each worked out once: the microbatch changes no size."""
    sizes: dict[tuple[str, tuple[int, ...], str], int] = {}

    def size_of(value: TensorRef, code: str = "") -> int:
        key = (value.name, value.blocks, code)
        if key not in sizes:
            sizes[key] = value_bytes(value, model, samples_per_micro, code)
        return sizes[key]

    return size_of
