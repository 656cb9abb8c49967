"""Suggest changes if no plan fits into memory; each suggestion is a compiled plan whose memory was counted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from counterpoint.errors import PlanError
from counterpoint.model.model_profile import ModelProfile
from counterpoint.model.spec import ModelSpec
from counterpoint.plan.plan import DEFAULT_PASSES, PREFETCH_PASS, Plan
from counterpoint.planner.activations import choose_activations, describe_activations
from counterpoint.planner.enumerate import enumerate_plans
from counterpoint.planner.prepare import resolve_partition
from counterpoint.planner.ranking import (
    Prediction,
    build_simulator,
    format_plan,
    is_activation_pass,
    predict_rank_bytes,
)
from counterpoint.strategies.data import Data
from counterpoint.strategies.offload import OFFLOAD_ACTIVATIONS_PASS, OFFLOAD_PASS
from counterpoint.strategies.pipeline.pipeline import Pipeline
from counterpoint.strategies.recomputation import RECOMPUTE_PASS
from counterpoint.strategies.tensor import Tensor
from counterpoint.strategies.zero import Zero
from counterpoint.world.cluster import Cluster

NUM_SMALLEST = 6
"""Plans with the least memory that are modified, to see which change makes them fit."""
MAX_RANKS_FACTOR = 8
"""Ranks are added up to this multiple of the number that the kept values need."""


@dataclass(frozen=True, slots=True)
class PlanningProblem:
    """What a plan is for.

    Args:
        model: in its finest blocks.
        cluster: where it would run.
        batch_size: samples of one global batch.
        profile: measured times of the model's layers; None to use operation counts.
        has_offload_folder: whether ranks have a folder on disk, so that plans may keep activations there.
        may_recompute: whether blocks may be recomputed; those of a model with synchronized batch norm may not.
    """

    model: ModelSpec
    cluster: Cluster
    batch_size: int
    profile: ModelProfile | None = None
    has_offload_folder: bool = False
    may_recompute: bool = True


def resolve_partitions(plans: Iterable[Plan], problem: PlanningProblem) -> tuple[Plan, ...]:
    """Return plans without duplicates, with explicit partitions where the problem determines them."""
    return tuple(dict.fromkeys(_resolve(plan, problem) for plan in plans))


def _resolve(plan: Plan, problem: PlanningProblem) -> Plan:
    model, cluster = problem.model, problem.cluster
    try:
        return resolve_partition(plan, model, cluster, batch_size=problem.batch_size, profile=problem.profile)
    except PlanError:
        return plan  # the ranking reports why it cannot be executed


@dataclass(frozen=True, slots=True)
class MemorySuggestion:
    """A change after which a model fits.

    Args:
        change: as text.
        plan: the plan that fits then.
        batch_size: samples of the global batch then.
        memory_bytes: peak memory of the rank that needs most then.
    """

    change: str
    plan: Plan
    batch_size: int
    memory_bytes: int

    def __str__(self) -> str:
        """Format the change, the plan and its bytes."""
        others = (name for name in self.plan.passes if name not in DEFAULT_PASSES and not is_activation_pass(name))
        passes = "".join(f" + {name}" for name in others)
        return f"{self.change} ({format_plan(self.plan)}{passes}: {self.memory_bytes} bytes)"


def explain_no_fit(predictions: Sequence[Prediction], plans: Sequence[Plan], problem: PlanningProblem) -> str:
    """Return how many bytes are missing for the smallest plan, and the changes that would fit.

    Args:
        predictions: of synchronous plans, at least one.
        plans: all plans to choose from.
        problem: what a plan is for.
    """
    least = min(predictions, key=lambda prediction: prediction.memory_bytes)
    device = problem.cluster.device
    reserve = f" (and {device.reserve_bytes} more that are reserved)" if device.reserve_bytes else ""
    excess = least.memory_bytes - least.capacity_bytes
    suggestions = list(suggest_changes(predictions, plans, problem))
    if suggestions:
        first, *others = map(str, suggestions)
        advice = f"the smallest change that fits: {'; or '.join([first, *others])}"
    else:
        advice = (
            "neither recomputation nor more microbatches, offloaded optimizer state, a smaller batch, more ranks or "
            "weights on disk make any of the plans fit; take devices with more memory, or a smaller model"
        )
    return (
        f"no plan fits: {least.plan} needs least, {least.memory_bytes} of {least.capacity_bytes} bytes{reserve} on the "
        f"rank with most, {excess} bytes too many; {advice}"
    )


def suggest_changes(
    predictions: Sequence[Prediction], plans: Sequence[Plan], problem: PlanningProblem
) -> Iterator[MemorySuggestion]:
    """Yield what would fit, the smallest change first.

    These are weights that are gathered less early, another plan, what blocks keep of their activations, more
    microbatches, optimizer state elsewhere, a smaller batch, more ranks; and if nothing else fits on the same ranks,
    weights on disk.

    Args:
        predictions: of synchronous plans, at least one.
        plans: all plans to choose from.
        problem: what a plan is for.
    """
    smallest = [
        prediction.plan
        for prediction in sorted(predictions, key=lambda prediction: prediction.memory_bytes)[:NUM_SMALLEST]
    ]
    found = list(_smaller_changes(smallest, plans, problem))
    yield from found
    has_tensor_parallelism = any(isinstance(strategy, Tensor) for plan in plans for strategy in plan.strategies)
    yield from _more_ranks(smallest[0], problem, has_tensor_parallelism=has_tensor_parallelism)
    if not found:
        yield from _weights_on_disk([*plans, *_other_plans(smallest[0], plans, problem)], problem)


def _smaller_changes(
    smallest: Sequence[Plan], plans: Sequence[Plan], problem: PlanningProblem
) -> Iterator[MemorySuggestion]:
    """Yield what would fit on the same ranks without weights on disk."""
    recomputing = [
        replace(plan, passes=(*plan.passes, RECOMPUTE_PASS)) for plan in smallest if plan.recomputation is None
    ]
    yield from _smaller_prefetch_depth(smallest, problem)
    yield from _smallest("another plan", _other_plans(smallest[0], plans, problem), problem)
    yield from _activations_per_block(smallest, problem)
    for change in (_more_microbatches, _offloaded_state, _smaller_batch):
        suggestions = list(change(smallest, problem))
        yield from suggestions or change(recomputing, problem)


def _activations_per_block(plans: Sequence[Plan], problem: PlanningProblem) -> Iterator[MemorySuggestion]:
    """Yield the fastest choice of what blocks keep, with inputs on disk only if nothing else fits."""
    simulator = build_simulator(problem.model, problem.cluster, problem.batch_size, problem.profile)
    for allows_disk in (False, True):
        chosen = [choose_activations(plan, simulator, allows_disk=allows_disk) for plan in plans]
        found = [one for one in chosen if one is not None]
        if found:
            best = min(found, key=lambda one: one.step_s)
            yield MemorySuggestion(describe_activations(best.plan), best.plan, problem.batch_size, best.memory_bytes)
            return


def _weights_on_disk(plans: Iterable[Plan], problem: PlanningProblem) -> Iterator[MemorySuggestion]:
    """Yield the plan that fits with shards of weights on disk, alone or with what else may be there."""
    sharding = [plan for plan in plans if any(isinstance(one, Zero) and one.level == 3 for one in plan.strategies)]
    state, inputs = f"{OFFLOAD_PASS}:state=disk", (RECOMPUTE_PASS, OFFLOAD_ACTIVATIONS_PASS)
    for change, others in {
        "weights on disk": (),
        "weights and optimizer state on disk": (state,),
        "weights, optimizer state and inputs of recomputed blocks on disk": (state, *inputs),
    }.items():
        passes = (*others, f"{OFFLOAD_PASS}:params=disk")
        moved = [
            replace(plan, passes=(*plan.passes, *passes))
            for plan in sharding
            if plan.offloading is None and (plan.recomputation is None or not set(inputs) & set(others))
        ]
        suggestions = list(_smallest(change, moved, problem))
        yield from suggestions
        if suggestions:
            return


def _smallest(change: str, plans: Iterable[Plan], problem: PlanningProblem) -> Iterator[MemorySuggestion]:
    """Yield the plan with the least memory, if it fits."""
    fitting = {plan: size for plan in plans if (size := _fitting_peak_bytes(plan, problem)) is not None}
    if fitting:
        plan = min(fitting, key=fitting.__getitem__)
        yield MemorySuggestion(change, plan, problem.batch_size, fitting[plan])


def _smaller_prefetch_depth(plans: Sequence[Plan], problem: PlanningProblem) -> Iterator[MemorySuggestion]:
    """Yield the plan that fits with a half of the depth of the pass ``prefetch``, a quarter, and so on down to 0."""
    largest = depth = max(plan.prefetch_depth for plan in plans)
    early = [plan for plan in plans if plan.prefetch_depth == largest]
    while depth:
        depth //= 2
        later = (replace(plan, passes=tuple(_with_depth(name, depth) for name in plan.passes)) for plan in early)
        change = f"{PREFETCH_PASS}:{depth} instead of {PREFETCH_PASS}:{largest}"
        for suggestion in _smallest(change, later, problem):
            yield suggestion
            return


def _with_depth(name: str, depth: int) -> str:
    return f"{PREFETCH_PASS}:{depth}" if name.partition(":")[0] == PREFETCH_PASS else name


def _more_microbatches(plans: Iterable[Plan], problem: PlanningProblem) -> Iterator[MemorySuggestion]:
    """Yield the plan that fits with the fewest additional microbatches."""
    for factor in _powers(problem.batch_size):
        more = (replace(plan, num_microbatches=factor * plan.num_microbatches) for plan in plans)
        for suggestion in _smallest("", more, problem):
            count = suggestion.plan.num_microbatches
            yield replace(suggestion, change=f"{count} microbatches instead of {count // factor}")
            return


def _offloaded_state(plans: Sequence[Plan], problem: PlanningProblem) -> Iterator[MemorySuggestion]:
    """Yield the plan that fits with optimizer state in the memory of an accelerator's host, else on disk."""
    has_host_memory = problem.cluster.device.roofline is not None  # of an accelerator; CPUs are measured
    places = {"host": "optimizer state in the memory of the host"} if has_host_memory else {}
    for place, change in {**places, "disk": "optimizer state on disk"}.items():
        passes = f"{OFFLOAD_PASS}:state={place}"
        offloading = [replace(plan, passes=(*plan.passes, passes)) for plan in plans if plan.offloading is None]
        suggestions = list(_smallest(change, offloading, problem))
        yield from suggestions
        if suggestions:
            return


def _smaller_batch(plans: Iterable[Plan], problem: PlanningProblem) -> Iterator[MemorySuggestion]:
    """Yield the plan that fits with the largest smaller batch."""
    best: MemorySuggestion | None = None
    for plan in plans:
        # bisection between samples of a microbatch that fit and that do not
        low, high = 0, -(-problem.batch_size // plan.global_num_microbatches)
        peak_bytes = 0
        while high - low > 1:
            middle = (low + high) // 2
            size = _fitting_peak_bytes(plan, replace(problem, batch_size=middle * plan.global_num_microbatches))
            low, high, peak_bytes = (middle, high, size) if size is not None else (low, middle, peak_bytes)
        batch_size = low * plan.global_num_microbatches
        if low and (best is None or batch_size > best.batch_size):
            best = MemorySuggestion(
                f"a batch of {batch_size} samples instead of {problem.batch_size}", plan, batch_size, peak_bytes
            )
    if best is not None:
        yield best


def _other_plans(lean: Plan, plans: Sequence[Plan], problem: PlanningProblem) -> Iterator[Plan]:
    """Yield plans that were not among those to choose from: stages, shards and replicas in other compositions."""
    given = {plan.strategies for plan in plans}
    candidates = (
        replace(plan, passes=lean.passes)
        for plan in enumerate_plans(lean.num_ranks, problem.model)
        if all(
            isinstance(strategy, Zero) or strategy in {Data(strategy.degree), Pipeline(strategy.degree)}
            for strategy in plan.strategies
        )
    )
    yield from (plan for plan in resolve_partitions(candidates, problem) if plan.strategies not in given)


def _more_ranks(lean: Plan, problem: PlanningProblem, *, has_tensor_parallelism: bool) -> Iterator[MemorySuggestion]:
    """Yield the plan that fits with the fewest additional ranks, among those that shard all kept values."""
    kept_bytes = sum(
        param.num_elements * param.element_bytes(held_as)
        for param in problem.model.params
        for held_as in ("weight", "state")
    )
    least = max(lean.num_ranks + 1, math.ceil(kept_bytes / problem.cluster.device.usable_bytes))
    for count in range(least, MAX_RANKS_FACTOR * least):
        candidates = [
            Plan((Zero(count, level=3),)),
            *(Plan((Pipeline(count),), factor * count) for factor in (1, 2, 4)),
        ]
        candidates += [Plan((Tensor(count),))] if has_tensor_parallelism else []
        with_passes = (replace(plan, passes=lean.passes) for plan in candidates)
        for suggestion in _smallest(f"{count} ranks instead of {lean.num_ranks}", with_passes, problem):
            yield suggestion
            return


def _fitting_peak_bytes(plan: Plan, problem: PlanningProblem) -> int | None:
    """Return the peak memory of the rank that needs most; None if it does not fit or cannot be executed."""
    try:
        rank_bytes = predict_rank_bytes(
            plan, problem.model, problem.cluster, batch_size=problem.batch_size, profile=problem.profile
        )
        size = max(rank_bytes)
    except PlanError:
        return None
    return size if size <= problem.cluster.device.usable_bytes else None


def _powers(most: int) -> Iterator[int]:
    factor = 2
    while factor <= most:
        yield factor
        factor *= 2
