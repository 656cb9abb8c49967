"""A plan and a model as they run together: cut, with a batch of so many samples, and by a timing if there is one."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from counterpoint.compiler.compile import Compiled, compile, value_bytes  # noqa: A004 - read as cp.compile
from counterpoint.model.spec import Block, ModelSpec
from counterpoint.model.timing import Timing
from counterpoint.plan import Plan
from counterpoint.planner.settled import settled
from counterpoint.planner.unlike import balanced
from counterpoint.program.instruction import Value
from counterpoint.program.traffic import Sizes
from counterpoint.strategies.written import blamed
from counterpoint.world.cluster import Cluster


def compiled_for(
    plan: Plan, model: ModelSpec, cluster: Cluster, batch_size: int, timing: Timing | None = None
) -> tuple[Compiled, int]:
    """Return a plan's program, unproved, and the samples of its microbatches; with a timing, cut by its seconds.

    Raises:
        PlanError: it cannot be compiled for this model or this batch, or the timing is of another model.
    """
    plan, given, samples = cut_as_it_runs(plan, model, cluster, batch_size, timing)
    return compile(plan, given, samples_per_micro=samples, proves=False), samples


def settle(plan: Plan, model: ModelSpec, cluster: Cluster, *, batch_size: int, timing: Timing | None = None) -> Plan:
    """Return the plan with its cut written into it where that depends on more than the model: on speeds, or a timing.

    Raises:
        PlanError: it cannot be cut for this model or this batch, or the timing is of another model.
    """
    return cut_as_it_runs(plan, model, cluster, batch_size, fitted_to(plan, model, timing))[0]


def cut_as_it_runs(
    plan: Plan, model: ModelSpec, cluster: Cluster, batch_size: int, timing: Timing | None
) -> tuple[Plan, ModelSpec, int]:
    """Return a plan with its cut, the model as it gets it, and the samples of its microbatches."""
    plan.require_batch(batch_size)
    samples = batch_size // plan.num_micros
    given = model_for(plan, model, samples, timing)
    plan = balanced(plan, given, cluster)
    return (plan if timing is None else settled(plan, given)), given, samples


def fitted_to(plan: Plan, model: ModelSpec, timing: Timing | None) -> Timing | None:
    """Return the times of the pieces of a model as a plan gets it: those given, or else those that the plan came with.

    Raises:
        PlanError: the timing is of another model.
    """
    if timing is None and plan.timing is not None:
        with blamed(plan.written, "timing"):
            return plan.timing.fitted(_cut_for(plan, model))
    return None if timing is None else timing.fitted(_cut_for(plan, model))


def model_for(plan: Plan, model: ModelSpec, samples: int, timing: Timing | None = None) -> ModelSpec:
    """Return a model as a plan gets it: in one block where nothing has to be cut, with seconds where it was timed.

    Raises:
        PlanError: the timing is of another model.
    """
    given = _cut_for(plan, model)
    weighed = given if timing is None else timing.weigh(given, samples)
    return weighed if plan.need != "none" else in_one_block(weighed)


def _cut_for(plan: Plan, model: ModelSpec) -> ModelSpec:
    return model if plan.need == "regions" else model.unsliced


def in_one_block(model: ModelSpec) -> ModelSpec:
    """Return the model as one block, as the runtime takes it where nothing has to be cut."""
    return replace(model, blocks=(Block(model.pieces, 0),))


def held_bytes(model: ModelSpec, samples: int, timing: Timing | None = None) -> Sizes:
    """Return the bytes of values where they are kept: for its backward, a block keeps what was seen to stay.

    Where nothing was, it keeps what each of its pieces gave.
    """
    point = timing.at(samples) if timing is not None else None

    @cache
    def size_of(value: Value, code: str) -> int:
        if value.name == "g":
            block = model.blocks[value.blocks[0]]
            if point is not None:
                return int(point.over(block).kept_bytes)
            return samples * sum(piece.output_bytes for piece in block.pieces)
        return value_bytes(value, model, samples, code)

    return lambda value, code="": size_of(Value(value.name, value.blocks), code)  # the microbatch changes no size
