"""Rank plans by their predicted step time, with what the time goes to and why each loses to the first.

Schedules other than the enumerated ones are tried only where a pipeline is idle for long enough that they could win.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from counterpoint.compiler.compile import CompiledPlan
from counterpoint.errors import PlanError, first_line
from counterpoint.model.model_profile import ModelProfile
from counterpoint.model.spec import ModelSpec
from counterpoint.plan.plan import Plan
from counterpoint.planner.deadline import NO_DEADLINE, Deadline
from counterpoint.planner.incremental_simulator import IncrementalSimulator, PlanSimResult, StepTooSlow
from counterpoint.planner.plan_simulation import PlanSimulation
from counterpoint.planner.prepare import compile_for, fit_profile, resolve_partition, storage_sizes
from counterpoint.program.trace import Trace
from counterpoint.simulator.memory import peak_memory_bytes
from counterpoint.strategies.offload import OFFLOAD_ACTIVATIONS_PASS
from counterpoint.strategies.pipeline.pipeline import Pipeline
from counterpoint.strategies.pipeline.schedules.registry import SCHEDULES
from counterpoint.strategies.recomputation import PARTITION_PASS, RECOMPUTE_PASS
from counterpoint.viz.number_format import format_seconds
from counterpoint.world.cluster import Cluster, Link

RankedT = TypeVar("RankedT")

FREE_LINK = Link(latency_s=0.0, bytes_per_s=float("inf"))
ROUNDING = 1e-9
"""Times that differ by less than this fraction of a step are equal."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Prediction for one step of a plan.

    ``compute_s``, ``update_s``, ``communication_s`` and ``idle_s`` add up to ``step_s``, once the time has been
    attributed.

    Args:
        plan: the plan.
        samples_per_microbatch: so that all plans have the same global batch.
        step_s: seconds of one step.
        compute_s: seconds of forward and backward, averaged over ranks.
        update_s: seconds of updates, averaged over ranks.
        sent_bytes: sent by the rank that sends most.
        memory_bytes: peak memory of the rank that needs most.
        capacity_bytes: memory of a rank.
        is_synchronous: whether it gives the same results as single-process training.
        rank_bytes: peak memory of each rank.
        free_links_s: seconds of one step if links took no time; None until :func:`attribute_time` has simulated it.
    """

    plan: Plan
    samples_per_microbatch: int
    step_s: float
    compute_s: float
    update_s: float
    sent_bytes: int
    memory_bytes: int
    capacity_bytes: int
    is_synchronous: bool
    rank_bytes: tuple[int, ...] = ()
    free_links_s: float | None = None

    @property
    def fits(self) -> bool:
        """Whether no rank needs more memory than it has."""
        return self.memory_bytes <= self.capacity_bytes

    @property
    def communication_s(self) -> float:
        """Seconds by which free links would make the step shorter: exposed communication."""
        assert self.free_links_s is not None, "the time has been attributed"
        exposed_s = self.step_s - self.free_links_s
        return exposed_s if exposed_s > ROUNDING * self.step_s else 0.0

    @property
    def idle_s(self) -> float:
        """Seconds that a rank would wait even with free links, on average: pipeline bubble, or waiting servers."""
        idle_s = self.waiting_s - self.communication_s
        return idle_s if idle_s > ROUNDING * self.step_s else 0.0

    @property
    def waiting_s(self) -> float:
        """Seconds that a rank neither computes nor updates, on average."""
        return self.step_s - self.compute_s - self.update_s

    def why_not(self, first: Prediction) -> str:
        """Return the largest difference by which the plan loses to the first one; empty for the first itself.

        Example: ``1.2 ms more of exposed communication``.
        """
        if self == first:
            return ""
        if not self.fits:
            return f"does not fit: {self.memory_bytes} of {self.capacity_bytes} bytes"
        more_s, category = max(
            (self.communication_s - first.communication_s, "exposed communication"),
            (self.idle_s - first.idle_s, "waiting"),
            (self.compute_s - first.compute_s, "computing"),
            (self.update_s - first.update_s, "updating"),
        )
        if self.step_s - first.step_s > ROUNDING * first.step_s:
            return f"{format_seconds(more_s)} more of {category}"
        if self.memory_bytes > first.memory_bytes:
            return "as fast, but needs more memory"
        return "as fast, but sends more" if self.sent_bytes > first.sent_bytes else "as fast, but less simple"


@dataclass(frozen=True, slots=True)
class RejectedPlan:
    """A plan that cannot be executed, and why."""

    plan: Plan
    reason: str


@dataclass(frozen=True, slots=True)
class PlanRanking:
    """Plans that can be executed, the fastest first and those that do not fit last; and all others.

    Args:
        predictions: of plans that can be executed.
        rejected: plans that cannot.
        not_evaluated: plans that were skipped because the deadline had passed.
        pruned: plans that were not simulated, because a lower bound of their step is already too slow.
    """

    predictions: tuple[Prediction, ...]
    rejected: tuple[RejectedPlan, ...]
    not_evaluated: tuple[Plan, ...] = ()
    pruned: tuple[Plan, ...] = ()

    @property
    def eligible(self) -> list[Prediction]:
        """Synchronous plans that fit."""
        return [prediction for prediction in self.predictions if prediction.is_synchronous and prediction.fits]


def format_plan(plan: Plan) -> str:
    """Return the plan's text with its number of microbatches, if it has more than one, and what blocks keep."""
    microbatches = f" with {plan.num_microbatches} microbatches" if plan.num_microbatches > 1 else ""
    return f"{plan}{microbatches}{format_activation_passes(plan)}"


def format_activation_passes(plan: Plan) -> str:
    """Return the passes of a plan that say what blocks keep between forward and backward, each after a ``+``."""
    return "".join(f" + {name}" for name in plan.passes if is_activation_pass(name))


def is_activation_pass(name: str) -> bool:
    """Return whether a pass says what blocks keep between forward and backward."""
    return name.partition(":")[0] in {RECOMPUTE_PASS, PARTITION_PASS} or name.startswith(OFFLOAD_ACTIVATIONS_PASS)


def rank_plans(
    plans: Iterable[Plan],
    model: ModelSpec,
    cluster: Cluster,
    *,
    batch_size: int,
    profile: ModelProfile | None = None,
    deadline: Deadline = NO_DEADLINE,
) -> PlanRanking:
    """Rank plans by their predicted seconds for the same global batch.

    Of equally fast plans the one with less memory comes first, then the one that sends less, then the one that was
    listed first. The result does not depend on the machine.

    Args:
        plans: what is compared.
        model: the model in its finest blocks; plans that do not partition it get it as one block.
        cluster: where they would run.
        batch_size: samples of one global batch.
        profile: measured times of the model's layers; None to use operation counts.
        deadline: when to end; the first plan that can be executed is evaluated in any case.
    """
    return rank_with_simulator(plans, build_simulator(model, cluster, batch_size, profile), deadline)


def rank_with_simulator(
    plans: Iterable[Plan],
    simulator: IncrementalSimulator,
    deadline: Deadline = NO_DEADLINE,
    tolerance: float | None = None,
) -> PlanRanking:
    """Rank plans as :func:`rank_plans`, reusing what the simulator knows from other plans.

    Args:
        plans: what is compared.
        simulator: for one model, cluster and batch, from :func:`build_simulator`.
        deadline: when to end; the first plan that can be executed is evaluated in any case.
        tolerance: allows pruning of plans whose step is at least this multiple of the fastest eligible one; then
            time is not attributed, and promising plans are simulated first. None to predict all plans in full.
    """
    predictions: dict[int, Prediction] = {}
    rejected: dict[int, RejectedPlan] = {}
    not_evaluated: dict[int, Plan] = {}
    pruned: dict[int, Plan] = {}
    max_step_s = math.inf
    indexed_plans = list(enumerate(plans))
    if tolerance is not None:
        indexed_plans.sort(key=lambda entry: simulator.lower_bound_s(entry[1]))
    for index, plan in indexed_plans:
        if predictions and deadline.is_past:
            not_evaluated[index] = plan
            continue
        try:
            prediction = predict_with_simulator(plan, simulator, max_step_s, attributes_time=tolerance is None)
        except PlanError as error:
            rejected[index] = RejectedPlan(plan, first_line(error))
        except StepTooSlow:
            pruned[index] = plan
        else:
            predictions[index] = prediction
            if tolerance is not None and prediction.is_synchronous and prediction.fits:
                max_step_s = min(max_step_s, tolerance * prediction.step_s)
    fastest = sorted(_in_order(predictions), key=_rank_key)
    return PlanRanking(tuple(fastest), _in_order(rejected), _in_order(not_evaluated), _in_order(pruned))


def _in_order(values: Mapping[int, RankedT]) -> tuple[RankedT, ...]:
    """Return values in the order of the given plans."""
    return tuple(values[index] for index in sorted(values))


def merge_rankings(one: PlanRanking, other: PlanRanking) -> PlanRanking:
    """Return two rankings for one model as one, in which each plan occurs once."""
    predictions = {prediction.plan: prediction for prediction in (*one.predictions, *other.predictions)}
    rejected = {rejection.plan: rejection for rejection in (*one.rejected, *other.rejected)}
    not_evaluated = dict.fromkeys(
        plan for plan in (*one.not_evaluated, *other.not_evaluated) if plan not in predictions | rejected
    )
    pruned = dict.fromkeys(plan for plan in (*one.pruned, *other.pruned) if plan not in predictions)
    ranked = tuple(sorted(predictions.values(), key=_rank_key))
    return PlanRanking(ranked, tuple(rejected.values()), tuple(not_evaluated), tuple(pruned))


def _rank_key(prediction: Prediction) -> tuple[bool, float, int, int]:
    return not prediction.fits, float(f"{prediction.step_s:.9g}"), prediction.memory_bytes, prediction.sent_bytes


def predict_plan(
    plan: Plan, model: ModelSpec, cluster: Cluster, *, batch_size: int, profile: ModelProfile | None = None
) -> Prediction:
    """Return the prediction for a plan, with attributed time.

    If ranks differ in speed, pipelines are partitioned by speed; with a profile, by its seconds, and memory is what was
    measured. The program is not verified; that happens before it runs.

    Raises:
        PlanError: it cannot be compiled for this model or this batch, or the profile is of another model.
    """
    profile = fit_profile(plan, model, profile)
    compiled, samples = compile_for(plan, model, cluster, batch_size, profile)
    breakdowns = PlanSimulation(compiled, samples, profile).simulate_steps((cluster, with_free_links(cluster)))
    rank_bytes = _rank_bytes(compiled, samples, profile)
    result = PlanSimResult(compiled.plan, samples, tuple(breakdowns), int(max(compiled.sent_bytes())), rank_bytes)
    return _build_prediction(result, cluster, is_synchronous=compiled.is_synchronous)


def predict_with_simulator(
    plan: Plan, simulator: IncrementalSimulator, max_step_s: float = math.inf, *, attributes_time: bool = True
) -> Prediction:
    """Return the prediction of :func:`predict_plan`, reusing what the simulator knows from other plans.

    Args:
        plan: one of many for a model, a cluster and a batch.
        simulator: for these, from :func:`build_simulator`.
        max_step_s: upper limit of a step.
        attributes_time: whether to simulate the step with free links, too.

    Raises:
        StepTooSlow: the lower bound of a step exceeds ``max_step_s``.
        PlanError: it cannot be compiled for this model or this batch, or the profile is of another model.
    """
    result = None
    with suppress(PlanError):  # the complete prediction raises it again, with details
        result = simulator.simulate(plan, max_step_s, _ALL_LINKS if attributes_time else _REAL_LINKS)
    if result is not None:
        return _build_prediction(result, simulator.cluster, is_synchronous=True)
    return predict_plan(
        plan, simulator.model, simulator.cluster, batch_size=simulator.batch_size, profile=simulator.profile
    )


def attribute_time(prediction: Prediction, simulator: IncrementalSimulator) -> Prediction:
    """Return a prediction with the step on free links, so that communication and idle time are known.

    Args:
        prediction: for a model, a cluster and a batch.
        simulator: for these, from :func:`build_simulator`.
    """
    if prediction.free_links_s is not None:
        return prediction
    result = simulator.simulate(prediction.plan, at=_FREE_LINKS)
    if result is None:
        return predict_with_simulator(prediction.plan, simulator)
    (free,) = result.breakdowns
    return replace(prediction, free_links_s=free.step_s)


_REAL_LINKS, _FREE_LINKS = (0,), (1,)
_ALL_LINKS = (*_REAL_LINKS, *_FREE_LINKS)
"""Indices of the simulator's clusters: real links, and free ones."""


def build_simulator(
    model: ModelSpec, cluster: Cluster, batch_size: int, profile: ModelProfile | None = None
) -> IncrementalSimulator:
    """Return a simulator that reuses rank programs among plans; see :func:`predict_with_simulator`."""
    return IncrementalSimulator(model, (cluster, with_free_links(cluster)), batch_size, profile)


def _build_prediction(result: PlanSimResult, cluster: Cluster, *, is_synchronous: bool) -> Prediction:
    """Return the prediction from a simulation on a cluster, and perhaps on the same one with free links."""
    breakdown, *free = result.breakdowns
    return Prediction(
        plan=result.plan,
        samples_per_microbatch=result.samples,
        step_s=breakdown.step_s,
        compute_s=breakdown.compute_s,
        update_s=breakdown.update_s,
        sent_bytes=result.sent_bytes,
        memory_bytes=max(result.rank_bytes),
        capacity_bytes=cluster.device.usable_bytes,
        is_synchronous=is_synchronous,
        rank_bytes=result.rank_bytes,
        free_links_s=free[0].step_s if free else None,
    )


def predict_trace(
    plan: Plan, model: ModelSpec, cluster: Cluster, *, batch_size: int, profile: ModelProfile | None = None
) -> Trace:
    """Return the trace of the step that :func:`predict_plan` predicts, of the last of several step variants.

    Raises:
        PlanError: it cannot be compiled for this model or this batch, or the profile is of another model.
    """
    profile = fit_profile(plan, model, profile)
    compiled, samples = compile_for(plan, model, cluster, batch_size, profile)
    return PlanSimulation(compiled, samples, profile).simulate_trace(cluster)


def predict_rank_bytes(
    plan: Plan, model: ModelSpec, cluster: Cluster, *, batch_size: int, profile: ModelProfile | None = None
) -> tuple[int, ...]:
    """Return the peak memory of each rank without simulating a step.

    Raises:
        PlanError: it cannot be compiled for this model or this batch, or the profile is of another model.
    """
    profile = fit_profile(plan, model, profile)
    compiled, samples = compile_for(plan, model, cluster, batch_size, profile)
    return _rank_bytes(compiled, samples, profile)


def _rank_bytes(compiled: CompiledPlan, samples: int, profile: ModelProfile | None) -> tuple[int, ...]:
    return peak_memory_bytes(compiled.step_variants[-1].full_program, storage_sizes(compiled.model, samples, profile))


def with_free_links(cluster: Cluster) -> Cluster:
    """Return the cluster with links that take no time."""
    levels = tuple(replace(level, link=FREE_LINK) for level in cluster.levels)
    return replace(cluster, link=FREE_LINK, levels=levels)


MAX_TRIED = 4
"""Maximum number of schedules that are tried, the most promising first."""


def rank_with_schedules(
    plans: Iterable[Plan],
    simulator: IncrementalSimulator,
    deadline: Deadline = NO_DEADLINE,
    tolerance: float | None = None,
) -> PlanRanking:
    """Rank plans as :func:`rank_with_simulator`, with other schedules of their pipelines that may be fastest.

    A schedule is tried if the plan would be the fastest with the savings of its formula; its messages and memory are
    then predicted as for any plan.

    Args:
        plans: what is compared.
        simulator: for a model, a cluster and a batch, from :func:`build_simulator`.
        deadline: as for :func:`rank_with_simulator`.
        tolerance: as for :func:`rank_with_simulator`.
    """
    ranking = rank_with_simulator(plans, simulator, deadline, tolerance)
    tried = _promising_schedules(ranking, simulator)
    return merge_rankings(ranking, rank_with_simulator(tried, simulator, deadline, tolerance)) if tried else ranking


def _promising_schedules(ranking: PlanRanking, simulator: IncrementalSimulator) -> list[Plan]:
    """Return the plans with other schedules that may be fastest by their formulas, the most promising first."""
    pipelines = [
        prediction
        for prediction in ranking.predictions
        if prediction.is_synchronous and _has_default_pipeline(prediction.plan)
    ]
    estimates: dict[Plan, float] = {}
    max_step_s = ranking.eligible[0].step_s if ranking.eligible else 0.0
    for prediction in sorted(pipelines, key=_optimistic_step_s):
        if _optimistic_step_s(prediction) >= max_step_s:
            break
        estimates |= {
            plan: estimate
            for plan, estimate in _schedule_variants(attribute_time(prediction, simulator), simulator)
            if estimate < max_step_s
        }
        if len(estimates) >= MAX_TRIED:
            max_step_s = sorted(estimates.values())[MAX_TRIED - 1]
    return sorted(estimates, key=estimates.__getitem__)[:MAX_TRIED]


def _has_default_pipeline(plan: Plan) -> bool:
    return any(isinstance(strategy, Pipeline) and _is_default_pipeline(strategy) for strategy in plan.strategies)


def _is_default_pipeline(pipeline: Pipeline) -> bool:
    """Return whether a pipeline has default options except, perhaps, its partition."""
    return replace(pipeline, balance=(), split_points=()) == Pipeline(pipeline.degree)


def _optimistic_step_s(prediction: Prediction) -> float:
    """Return the step if all waiting were pipeline bubble and the best schedule saved its share of it."""
    return prediction.step_s - max(schedule.bubble_saving for schedule in SCHEDULES) * prediction.waiting_s


def _schedule_variants(prediction: Prediction, simulator: IncrementalSimulator) -> Iterator[tuple[Plan, float]]:
    """Yield the plan with other schedules of its pipeline, and the step with the savings of their formulas."""
    num_blocks = simulator.model.without_tp.num_blocks
    resolve = partial(
        resolve_partition,
        model=simulator.model,
        cluster=simulator.cluster,
        batch_size=simulator.batch_size,
        profile=simulator.profile,
    )
    for index, pipeline in enumerate(prediction.plan.strategies):
        if not isinstance(pipeline, Pipeline) or not _is_default_pipeline(pipeline):
            continue
        if (
            pipeline != Pipeline(pipeline.degree)
            and resolve(_replace_strategy(prediction.plan, index, Pipeline(pipeline.degree))) != prediction.plan
        ):
            continue  # the partition was given explicitly
        for schedule in SCHEDULES:
            if not schedule.is_enumerated and pipeline.degree * schedule.min_chunks <= num_blocks:
                variant = Pipeline(pipeline.degree, schedule.name, chunks_per_stage=schedule.min_chunks)
                plan = _replace_strategy(prediction.plan, index, variant)
                yield plan, prediction.step_s - schedule.bubble_saving * prediction.idle_s


def _replace_strategy(plan: Plan, index: int, pipeline: Pipeline) -> Plan:
    return replace(plan, strategies=(*plan.strategies[:index], pipeline, *plan.strategies[index + 1 :]))
