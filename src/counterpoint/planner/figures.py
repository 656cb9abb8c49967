"""What one simulation of a plan says, in a few figures: enough to tell plans apart."""

from __future__ import annotations

from dataclasses import dataclass

from counterpoint.compiler.compile import compile, sizes_in  # noqa: A004 - read as cp.compile
from counterpoint.model.spec import ModelSpec
from counterpoint.plan import Plan
from counterpoint.planner.rank import held_bytes, in_one_block
from counterpoint.planner.unlike import balanced
from counterpoint.simulator.costs import model_costs
from counterpoint.simulator.memory import peak_bytes
from counterpoint.simulator.spent import spend
from counterpoint.world.cluster import Cluster


@dataclass(frozen=True, slots=True)
class Figures:
    """What a plan whose steps are all alike takes.

    Args:
        step_s: seconds of one step.
        compute_s: seconds of forward and backward on a rank, on average.
        update_s: seconds that a rank updates weights, on average.
        sent_bytes: what the busiest rank sends.
        memory_bytes: what the fullest rank holds at most.
    """

    step_s: float
    compute_s: float
    update_s: float
    sent_bytes: int
    memory_bytes: int


def figures_of(plan: Plan, model: ModelSpec, cluster: Cluster, *, batch_size: int) -> Figures:
    """Return the figures of a plan that has one kind of step, compiled and played from nothing.

    Raises:
        PlanError: it cannot be compiled for this model or this batch.
    """
    plan.require_batch(batch_size)
    plan = balanced(plan, model, cluster)
    samples = batch_size // plan.num_micros
    whole = model if plan.need != "none" else in_one_block(model)
    compiled = compile(plan, whole, samples_per_micro=samples, proves=False)
    costs = model_costs(compiled.model, cluster, sizes_in(compiled.model, samples), samples_per_micro=samples)
    turn = compiled.turns[-1]
    (spent,) = spend(turn, [costs], cluster)
    return Figures(
        step_s=spent.step_s,
        compute_s=spent.compute_s,
        update_s=spent.update_s,
        sent_bytes=int(max(compiled.sent_bytes())),
        memory_bytes=max(peak_bytes(turn.playable, held_bytes(compiled.model, samples))),
    )
