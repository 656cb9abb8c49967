"""What to change where a model fits nowhere: each remedy is a plan that was compiled, and what it holds is counted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from counterpoint.errors import PlanError
from counterpoint.model.model_profile import ModelProfile
from counterpoint.model.spec import ModelSpec
from counterpoint.plan.plan import DEFAULT_PASSES, Plan
from counterpoint.planner.enumerate import enumerate_plans
from counterpoint.planner.prepare import resolve_partition
from counterpoint.planner.ranking import Prediction, format_plan, predict_rank_bytes
from counterpoint.strategies.data import Data
from counterpoint.strategies.pipeline.pipeline import Pipeline
from counterpoint.strategies.recomputation import RECOMPUTE_PASS
from counterpoint.strategies.tensor import Tensor
from counterpoint.strategies.zero import Zero
from counterpoint.world.cluster import Cluster

NUM_SMALLEST = 6
"""So many of the plans that hold least are changed, to see which change makes them fit."""
STATE_COPIES = 3
"""Values of each parameter that stay on some rank from step to step: the weight, and the two states of Adam."""
MAX_RANKS_FACTOR = 8
"""Ranks are added until there are so many times as many as the kept values alone need."""


@dataclass(frozen=True, slots=True)
class PlanningProblem:
    """What a plan is wanted for.

    Args:
        model: in its finest blocks.
        cluster: where it would run.
        batch_size: samples of one global batch.
        timing: of the model's pieces; None where their work is only counted.
    """

    model: ModelSpec
    cluster: Cluster
    batch_size: int
    profile: ModelProfile | None = None


def resolve_partitions(plans: Iterable[Plan], problem: PlanningProblem) -> tuple[Plan, ...]:
    """Return plans as they are ranked, each once: with their cuts in them where the question decides about these."""
    return tuple(dict.fromkeys(_resolve(plan, problem) for plan in plans))


def _resolve(plan: Plan, problem: PlanningProblem) -> Plan:
    model, cluster = problem.model, problem.cluster
    try:
        return resolve_partition(plan, model, cluster, batch_size=problem.batch_size, profile=problem.profile)
    except PlanError:
        return plan  # the ranking says why it cannot be carried out


@dataclass(frozen=True, slots=True)
class MemorySuggestion:
    """A change after which a model fits.

    Args:
        change: in words.
        plan: the plan that fits then.
        batch_size: samples of the global batch then.
        memory_bytes: what its fullest rank holds then.
    """

    change: str
    plan: Plan
    batch_size: int
    memory_bytes: int

    def __str__(self) -> str:
        """Write the change, the plan and its bytes."""
        passes = "".join(f" + {name}" for name in self.plan.passes if name not in DEFAULT_PASSES)
        return f"{self.change} ({format_plan(self.plan)}{passes}: {self.memory_bytes} bytes)"


def explain_no_fit(found: Sequence[Prediction], plans: Sequence[Plan], problem: PlanningProblem) -> str:
    """Return by how much nothing fits, and what would.

    Args:
        found: what was predicted of plans that keep the numbers, one at least.
        plans: those that there were to choose from.
        question: what a plan is wanted for.
    """
    least = min(found, key=lambda one: one.memory_bytes)
    excess = least.memory_bytes - least.capacity_bytes
    remedies = list(suggest_changes(found, plans, problem))
    if remedies:
        first, *others = map(str, remedies)
        advice = f"the smallest change that fits: {'; or '.join([first, *others])}"
    else:
        advice = (
            "neither recomputation nor more microbatches, a smaller batch or more ranks make any of the plans fit; "
            "take devices with more memory, or a smaller model"
        )
    return (
        f"no plan fits: {least.plan} holds least, {least.memory_bytes} of {least.capacity_bytes} bytes on its fullest "
        f"rank, {excess} bytes too many; {advice}"
    )


def suggest_changes(
    found: Sequence[Prediction], plans: Sequence[Plan], problem: PlanningProblem
) -> Iterator[MemorySuggestion]:
    """Yield what would fit, the smallest change first: another plan, recomputing, microbatches, batch, ranks.

    Args:
        found: what was predicted of plans that keep the numbers, one at least.
        plans: those that there were to choose from.
        question: what a plan is wanted for.
    """
    lean = [one.plan for one in sorted(found, key=lambda one: one.memory_bytes)[:NUM_SMALLEST]]
    again = [replace(plan, passes=(*plan.passes, RECOMPUTE_PASS)) for plan in lean if plan.recomputation is None]
    yield from _smallest("another plan", _other_plans(lean[0], plans, problem), problem)
    yield from _smallest("recomputing what backwards need", again, problem)
    for change in (_more_microbatches, _smaller_batch):
        alone = list(change(lean, problem))
        yield from alone or change(again, problem)
    may_slice = any(isinstance(one, Tensor) for plan in plans for one in plan.strategies)
    yield from _more_ranks(lean[0], problem, slices=may_slice)


def _smallest(change: str, plans: Iterable[Plan], problem: PlanningProblem) -> Iterator[MemorySuggestion]:
    """Yield the one of the plans that holds least, if it fits."""
    held = {plan: size for plan in plans if (size := _fitting_peak_bytes(plan, problem)) is not None}
    if held:
        plan = min(held, key=held.__getitem__)
        yield MemorySuggestion(change, plan, problem.batch_size, held[plan])


def _more_microbatches(plans: Iterable[Plan], problem: PlanningProblem) -> Iterator[MemorySuggestion]:
    """Yield the plan that fits with fewest microbatches more."""
    for times in _powers(problem.batch_size):
        more = (replace(plan, num_microbatches=times * plan.num_microbatches) for plan in plans)
        for remedy in _smallest("", more, problem):
            count = remedy.plan.num_microbatches
            yield replace(remedy, change=f"{count} microbatches instead of {count // times}")
            return


def _smaller_batch(plans: Iterable[Plan], problem: PlanningProblem) -> Iterator[MemorySuggestion]:
    """Yield the plan that fits with the largest batch below the one that is wanted."""
    best: MemorySuggestion | None = None
    for plan in plans:
        low, high = (
            0,
            -(-problem.batch_size // plan.global_num_microbatches),
        )  # samples of a microbatch that fit, that do not
        kept = 0
        while high - low > 1:
            middle = (low + high) // 2
            size = _fitting_peak_bytes(plan, replace(problem, batch_size=middle * plan.global_num_microbatches))
            low, high, kept = (middle, high, size) if size is not None else (low, middle, kept)
        batch_size = low * plan.global_num_microbatches
        if low and (best is None or batch_size > best.batch_size):
            best = MemorySuggestion(
                f"a batch of {batch_size} samples instead of {problem.batch_size}", plan, batch_size, kept
            )
    if best is not None:
        yield best


def _other_plans(lean: Plan, plans: Sequence[Plan], problem: PlanningProblem) -> Iterator[Plan]:
    """Yield what there was not to choose from: stages, shares and copies in other compositions."""
    known = {plan.strategies for plan in plans}
    plain = (
        replace(plan, passes=lean.passes)
        for plan in enumerate_plans(lean.num_ranks, problem.model)
        if all(isinstance(one, Zero) or one in {Data(one.degree), Pipeline(one.degree)} for one in plan.strategies)
    )
    yield from (plan for plan in resolve_partitions(plain, problem) if plan.strategies not in known)


def _more_ranks(lean: Plan, problem: PlanningProblem, *, slices: bool) -> Iterator[MemorySuggestion]:
    """Yield the plan that fits with fewest ranks more, among those that spread what is kept over all of them."""
    kept_bytes = STATE_COPIES * sum(param.num_bytes for param in problem.model.params)
    least = max(lean.num_ranks + 1, math.ceil(kept_bytes / problem.cluster.device.memory_bytes))
    for count in range(least, MAX_RANKS_FACTOR * least):
        spread = [Plan((Zero(count, level=3),)), *(Plan((Pipeline(count),), times * count) for times in (1, 2, 4))]
        spread += [Plan((Tensor(count),))] if slices else []
        passed = (replace(plan, passes=lean.passes) for plan in spread)
        for remedy in _smallest(f"{count} ranks instead of {lean.num_ranks}", passed, problem):
            yield remedy
            return


def _fitting_peak_bytes(plan: Plan, problem: PlanningProblem) -> int | None:
    """Return what the fullest rank holds; None where that is too much, or the plan cannot be carried out."""
    try:
        held = predict_rank_bytes(
            plan, problem.model, problem.cluster, batch_size=problem.batch_size, profile=problem.profile
        )
        size = max(held)
    except PlanError:
        return None
    return size if size <= problem.cluster.device.memory_bytes else None


def _powers(most: int) -> Iterator[int]:
    times = 2
    while times <= most:
        yield times
        times *= 2
