"""What one simulation of a plan says, in a few figures: enough to tell plans apart."""

from __future__ import annotations

from dataclasses import dataclass

from counterpoint.model.spec import ModelSpec
from counterpoint.model.timing import Timing
from counterpoint.plan import Plan
from counterpoint.planner.given import compiled_for, fitted_to, held_bytes
from counterpoint.planner.playing import Playing
from counterpoint.simulator.memory import peak_bytes
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


def figures_of(
    plan: Plan, model: ModelSpec, cluster: Cluster, *, batch_size: int, timing: Timing | None = None
) -> Figures:
    """Return the figures of a plan that has one kind of step, compiled and played from nothing.

    Raises:
        PlanError: it cannot be compiled for this model or this batch, or the timing is of another model.
    """
    timing = fitted_to(plan, model, timing)
    compiled, samples = compiled_for(plan, model, cluster, batch_size, timing)
    (spent,) = Playing(compiled, samples, timing).spend((cluster,))
    return Figures(
        step_s=spent.step_s,
        compute_s=spent.compute_s,
        update_s=spent.update_s,
        sent_bytes=int(max(compiled.sent_bytes())),
        memory_bytes=max(peak_bytes(compiled.turns[-1].playable, held_bytes(compiled.model, samples, timing))),
    )
