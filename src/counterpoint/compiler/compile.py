"""Compile a plan for a model to a verified program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import reduce

from counterpoint.compiler.gather_outputs import gather_outputs
from counterpoint.compiler.narrow_reductions import require_shards_of_masters, require_sums_in_narrow_dtype
from counterpoint.compiler.offload import offload, require_offloadable
from counterpoint.compiler.overlap import overlap
from counterpoint.compiler.partition_activations import partition_activations
from counterpoint.compiler.prefetch import prefetch
from counterpoint.compiler.recompute import recompute
from counterpoint.errors import ProgramError
from counterpoint.model.spec import ModelSpec
from counterpoint.plan.plan import Plan
from counterpoint.plan.source import plan_error_at
from counterpoint.program.comm_volume import SizeFn, sent_bytes
from counterpoint.program.edges import edge_endpoints
from counterpoint.program.instruction import ACTIVATIONS, UNIT_SIZES, TensorRef
from counterpoint.program.program import Program
from counterpoint.program.step_variants import StepVariant, body_as_step, prologue_as_step
from counterpoint.program.verify.symbolic import SymbolicResult
from counterpoint.program.verify.verifier import Bounds, verify
from counterpoint.strategies.output_gather import GATHER_OUTPUTS_PASS, estimate_gather_cost
from counterpoint.strategies.single_device import single_device_cost, single_device_program
from counterpoint.strategies.strategy import CostEstimate, Strategy


@dataclass(frozen=True, slots=True)
class CompiledPlan:
    """A program with the model that it is for and the cost that its strategies predict.

    Args:
        plan: the plan.
        model: the model, with the blocks that the plan needs.
        program: the instructions of every rank.
        cost: the closed formulas of the strategies.
        symbolic: result of the symbolic execution; empty if the program was not verified.
        step_variants: the kinds of steps, one for a synchronous plan. ``program`` is that of the last one, or the
            asynchronous pipeline whose prologue and body are kinds of steps.
    """

    plan: Plan
    model: ModelSpec
    program: Program
    cost: CostEstimate
    symbolic: SymbolicResult
    step_variants: tuple[StepVariant, ...]

    def variant_at(self, step: int, *, has_delayed_grads: bool = True) -> StepVariant:
        """Return the kind of a step; see :meth:`counterpoint.strategies.sync_schedule.SyncSchedule.variant_at`."""
        if len(self.step_variants) == 1:
            return self.step_variants[0]
        name = self.plan.sync_schedule.kind_at(step, has_delayed_grad=has_delayed_grads)
        return next(variant for variant in self.step_variants if variant.name == name)

    @property
    def is_synchronous(self) -> bool:
        """Whether it gives the same results as training on a single device."""
        return self.cost.staleness == 0 and len(self.step_variants) == 1

    def sent_bytes(self) -> tuple[Fraction, ...]:
        """Return the bytes that each rank sends per step, averaged over all steps in the long run."""
        parts = ([variant.frequency * bytes_ for bytes_ in variant.sent_bytes] for variant in self.step_variants)
        return tuple(sum(rank_bytes, Fraction(0)) for rank_bytes in zip(*parts, strict=True))


def compile(  # noqa: A001 - read as cp.compile
    plan: Plan, model: ModelSpec, *, samples_per_micro: int = 1, verified: bool = True
) -> CompiledPlan:
    """Apply the plan's strategies to the single-device program, run the passes, and verify the result.

    Args:
        plan: the plan.
        model: the model with its finest blocks.
        samples_per_micro: samples in one microbatch, for the size of activations.
        verified: whether to verify the program; otherwise it can be printed and simulated, but not run.

    Raises:
        PlanError: the strategies cannot be combined like this, or not on this model.
        ProgramError: the result violates a rule.
    """
    frequencies, request = plan.sync_schedule.step_fractions, _CompileRequest(model, samples_per_micro, verified)
    if plan.sync_schedule.staleness:
        compiled = _compile_one(plan, request)
        sent = compiled.cost.sent_bytes()
        prologue = prologue_as_step(compiled.program)
        prologue_bytes = count_bytes(prologue, compiled.model, samples_per_micro)
        first = StepVariant("fill", prologue, compiled.symbolic, prologue_bytes, frequencies["fill"])
        return replace(
            compiled,
            step_variants=(
                first,
                StepVariant("steady", body_as_step(compiled.program), compiled.symbolic, sent, frequencies["steady"]),
            ),
        )
    variants = [(name, _compile_one(plan.variant(name), request)) for name in frequencies]
    return replace(
        variants[-1][1],
        plan=plan,
        step_variants=tuple(_build_step_variant(name, compiled, frequencies[name]) for name, compiled in variants),
    )


@dataclass(frozen=True, slots=True)
class _CompileRequest:
    """The arguments of :func:`compile` that are the same for all kinds of steps."""

    model: ModelSpec
    samples_per_micro: int
    verified: bool


def _build_step_variant(name: str, compiled: CompiledPlan, frequency: Fraction) -> StepVariant:
    """Return a kind of step: the program itself, or the body of an asynchronous pipeline."""
    sent = compiled.cost.sent_bytes()
    if not compiled.program.is_async_pipeline:
        return StepVariant(name, compiled.program, compiled.symbolic, sent, frequency)
    return StepVariant(
        name, body_as_step(compiled.program), compiled.symbolic, sent, frequency, async_pipeline=compiled.program
    )


def _compile_one(plan: Plan, request: _CompileRequest) -> CompiledPlan:
    """Return the program of one kind of step, or an asynchronous pipeline."""
    with plan_error_at(plan.source, "strategy"):
        return _apply_strategies(plan, request)


def _apply_strategies(plan: Plan, request: _CompileRequest) -> CompiledPlan:
    samples = request.samples_per_micro
    refined = reduce(lambda spec, strategy: strategy.split_model(spec), plan.strategies, request.model)
    gathers_outputs = GATHER_OUTPUTS_PASS in plan.passes
    program = single_device_program(refined, plan.num_microbatches, forwards_first=gathers_outputs)
    cost = single_device_cost(refined, plan.num_microbatches, samples, forwards_first=gathers_outputs)
    for strategy in plan.strategies:
        num_ranks = strategy.num_ranks(program.num_ranks)
        num_micros = len(program.micros) * (strategy.degree if strategy.splits_batch else 1)
        program = require_lowered(strategy, strategy.lower(program, refined), num_ranks, num_micros)
        cost = require_estimated(strategy, strategy.estimate_cost(cost, refined), num_ranks)
    if gathers_outputs:
        with plan_error_at(plan.source, "passes"):
            program, cost = gather_outputs(program, refined, plan), estimate_gather_cost(cost, refined)
    if "overlap" in plan.passes:
        program = overlap(program)
    recomputation = plan.recomputation
    if recomputation is not None:
        with plan_error_at(plan.source, "passes"):
            blocks = recomputation.select_blocks(refined)
        program, cost = recompute(program, recomputation, blocks), recomputation.estimate_cost(cost, blocks)
    if plan.partition_selector is not None:
        before = program
        with plan_error_at(plan.source, "passes"):
            program = partition_activations(program, refined, plan)
        cost = add_counted_bytes(cost, *(count_bytes(one, refined, samples) for one in (before, program)))
    if plan.prefetch_depth:
        before, program = program, prefetch(program, plan.prefetch_depth)
        cost = add_counted_bytes(cost, *(count_bytes(one, refined, samples) for one in (before, program)))
    if plan.offloading is not None:
        with plan_error_at(plan.source, "passes"):
            require_offloadable(plan, program, plan.offloading, refined)
        program = offload(program, plan.offloading, refined)
    require_sums_in_narrow_dtype(plan, program, cost, refined)
    require_shards_of_masters(plan, program, refined)
    symbolic = SymbolicResult()
    if request.verified:
        sent = count_bytes(program, refined, samples)
        symbolic = verify(program, bounds_from(cost), refined.units, sent, refined.sparse_units)
    return CompiledPlan(plan, refined, program, cost, symbolic, ())


def add_counted_bytes(cost: CostEstimate, before: Sequence[Fraction], after: Sequence[Fraction]) -> CostEstimate:
    """Return the cost with the bytes of collectives that a pass has added, or without those that it has removed.

    Args:
        cost: of the program before.
        before: the bytes that each rank sent.
        after: the bytes that it sends now.
    """
    added = [new - old for old, new in zip(before, after, strict=True)]
    ranks = zip(cost.ranks, added, strict=True)
    return replace(cost, ranks=tuple(replace(rank, other_bytes=rank.other_bytes + one) for rank, one in ranks))


def require_lowered(strategy: Strategy, program: object, num_ranks: int, num_micros: int) -> Program:
    """Return what a strategy has lowered a program to.

    Raises:
        ProgramError: it is not a program, or for another number of ranks or microbatches than the strategy says.
    """
    if not isinstance(program, Program):
        raise ProgramError(
            f"lower of {strategy} returned a {type(program).__name__}; it returns the Program of all ranks, as "
            "map_replicas(program, degree, rewrite) does"
        )
    if program.num_ranks != num_ranks:
        raise ProgramError(
            f"lower of {strategy} returned a program of {program.num_ranks} ranks, but its num_ranks(inner) is "
            f"{num_ranks}; return one rank program for each rank, or define num_ranks"
        )
    if len(program.micros) != num_micros:
        raise ProgramError(
            f"lower of {strategy} returned a program of {len(program.micros)} microbatches, but with "
            f"splits_batch={strategy.splits_batch} it has {num_micros}; define splits_batch: True if each of the "
            f"{strategy.degree} ranks along its axis has samples of its own, False if they have the same ones"
        )
    return program


def require_estimated(strategy: Strategy, cost: object, num_ranks: int) -> CostEstimate:
    """Return the cost that a strategy has estimated.

    Raises:
        ProgramError: it is not an estimate, or of another number of ranks.
    """
    if not isinstance(cost, CostEstimate) or len(cost.ranks) != num_ranks:
        given = f"{len(cost.ranks)} ranks" if isinstance(cost, CostEstimate) else f"a {type(cost).__name__}"
        raise ProgramError(
            f"estimate_cost of {strategy} returned {given}; it returns a CostEstimate of its {num_ranks} ranks, as "
            "inner.replicate(degree) is"
        )
    return cost


def bounds_from(cost: CostEstimate) -> Bounds:
    """Return the bounds that the program must stay within so that the predicted cost is right."""
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


def value_bytes(tensor: TensorRef, model: ModelSpec, samples_per_micro: int, codec: str = "") -> int:
    """Return the bytes of a whole tensor on one rank, encoded by a codec if one is given."""
    if tensor.name in UNIT_SIZES:
        return model.unit_bytes(tensor.blocks, codec, tensor.name)
    block = tensor.blocks[0]
    split = model.blocks[block].tp
    if tensor.name == "y":
        return split.output_bytes * samples_per_micro if split is not None else 0
    if tensor.name == "dx":
        return split.input_bytes * samples_per_micro if split is not None else 0
    if tensor.name == "out":
        return model.outgoing_bytes(block) * samples_per_micro
    edge = model.find_edge(edge_endpoints(tensor))
    if edge is None:  # an output of the model that no block consumes
        return model.outgoing_bytes(block) * samples_per_micro if tensor.name == "g" else 0
    size = edge.num_bytes if tensor.name in ACTIVATIONS else edge.grad_bytes
    return (size or 0) * samples_per_micro


def storage_size_fn(model: ModelSpec, samples_per_micro: int) -> SizeFn:
    """Return the function for the sizes of tensors in memory: for ``g``, the size of all outputs of the block."""
    size_of = message_size_fn(model, samples_per_micro)

    def held(tensor: TensorRef, codec: str = "") -> int:
        return (
            model.outgoing_bytes(tensor.blocks[0]) * samples_per_micro if tensor.name == "g" else size_of(tensor, codec)
        )

    return held


def count_bytes(program: Program, model: ModelSpec, samples_per_micro: int) -> tuple[Fraction, ...]:
    """Return the bytes that each rank's instructions send in one step."""
    return sent_bytes(program, message_size_fn(model, samples_per_micro))


def message_size_fn(model: ModelSpec, samples_per_micro: int) -> SizeFn:
    """Return the function for the sizes of tensors in messages, which caches them without their microbatch."""
    sizes: dict[tuple[str, tuple[int, ...], str], int] = {}

    def size_of(tensor: TensorRef, codec: str = "") -> int:
        key = (tensor.name, tensor.blocks, codec)
        if key not in sizes:
            sizes[key] = value_bytes(tensor, model, samples_per_micro, codec)
        return sizes[key]

    return size_of
