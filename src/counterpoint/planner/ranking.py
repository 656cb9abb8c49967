"""Plans in the order of their predicted step time, with what the time goes to and why each loses to the first.

Other orders than 1F1B, tried only where a pipeline is idle for long enough that they could win.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from counterpoint.compiler.compile import CompiledPlan
from counterpoint.errors import PlanError
from counterpoint.model.model_profile import ModelProfile
from counterpoint.model.spec import ModelSpec
from counterpoint.plan.plan import Plan
from counterpoint.planner.deadline import NO_DEADLINE, Deadline
from counterpoint.planner.incremental_simulator import IncrementalSimulator, PlanSimResult, StepTooSlow
from counterpoint.planner.plan_simulation import PlanSimulation
from counterpoint.planner.prepare import compile_for, fit_profile, resolve_partition, storage_sizes
from counterpoint.program.trace import Trace
from counterpoint.simulator.memory import peak_memory_bytes
from counterpoint.strategies.pipeline.pipeline import Pipeline
from counterpoint.viz.number_format import format_seconds
from counterpoint.world.cluster import Cluster, Link

RankedT = TypeVar("Found")

FREE_LINK = Link(latency_s=0.0, bytes_per_s=float("inf"))
ROUNDING = 1e-9
"""Times that differ by less than this part of a step are equal."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the simulator says about one step of a plan; its four parts, once it is split, add up to ``predict_step_s``.

    Args:
        plan: which one.
        samples_per_micro: so that all plans take the same global batch.
        step_s: seconds of one step.
        compute_s: seconds of forward and backward on a rank, on average.
        update_s: seconds that a rank updates weights, on average.
        sent_bytes: what the busiest rank sends.
        memory_bytes: what the fullest rank holds at most.
        room_bytes: what a rank can hold.
        is_synchronous: whether it keeps solo's numbers.
        rank_bytes: what each rank holds at most.
        free_s: seconds of one step if links took no time; None until :func:`split` has played it.
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
        """Seconds by which free links would make the step shorter: communication that nothing hides."""
        assert self.free_links_s is not None, "it has been split"
        more_s = self.step_s - self.free_links_s
        return more_s if more_s > ROUNDING * self.step_s else 0.0

    @property
    def idle_s(self) -> float:
        """Seconds that a rank would still wait with free links, on average: the bubble, or a server's leisure."""
        idle_s = self.waiting_s - self.communication_s
        return idle_s if idle_s > ROUNDING * self.step_s else 0.0

    @property
    def waiting_s(self) -> float:
        """Seconds that a rank neither computes nor updates, on average."""
        return self.step_s - self.compute_s - self.update_s

    def why_not(self, first: Prediction) -> str:
        """Return why the plan loses to the first one: the largest difference, in words; nothing for the first itself.

        Example: ``1.2 ms more of communication that nothing hides``.
        """
        if self == first:
            return ""
        if not self.fits:
            return f"does not fit: {self.memory_bytes} of {self.capacity_bytes} bytes"
        more_s, what = max(
            (self.communication_s - first.communication_s, "communication that nothing hides"),
            (self.idle_s - first.idle_s, "waiting"),
            (self.compute_s - first.compute_s, "computing"),
            (self.update_s - first.update_s, "updating"),
        )
        if self.step_s - first.step_s > ROUNDING * first.step_s:
            return f"{format_seconds(more_s)} more of {what}"
        if self.memory_bytes > first.memory_bytes:
            return "as fast, but holds more"
        return "as fast, but sends more" if self.sent_bytes > first.sent_bytes else "as fast, but less simple"


@dataclass(frozen=True, slots=True)
class RejectedPlan:
    """A plan that cannot be carried out, and why."""

    plan: Plan
    reason: str


@dataclass(frozen=True, slots=True)
class PlanRanking:
    """The plans that can be carried out, the fastest first and those that do not fit last; then the others.

    Args:
        predictions: of those that can be carried out.
        refusals: those that cannot.
        unseen: those that nobody has looked at, because the time was over.
        slower: those that were not played, because a rank's own work says that they are slower than what was asked for.
    """

    predictions: tuple[Prediction, ...]
    rejected: tuple[RejectedPlan, ...]
    not_evaluated: tuple[Plan, ...] = ()
    pruned: tuple[Plan, ...] = ()

    @property
    def eligible(self) -> list[Prediction]:
        """Those that keep solo's numbers and fit."""
        return [found for found in self.predictions if found.is_synchronous and found.fits]


def format_plan(plan: Plan) -> str:
    """Return a plan with its microbatches, if it has more than one."""
    return f"{plan}" + (f" with {plan.num_microbatches} microbatches" if plan.num_microbatches > 1 else "")


def rank_plans(
    plans: Iterable[Plan],
    model: ModelSpec,
    cluster: Cluster,
    *,
    batch_size: int,
    profile: ModelProfile | None = None,
    deadline: Deadline = NO_DEADLINE,
) -> PlanRanking:
    """Return plans by the predicted seconds for one and the same global batch.

    Of plans that are equally fast the one that holds less comes first, then the one that sends less, then the one
    that came first. The order is the same wherever it is computed.

    Args:
        plans: what is compared.
        model: the model in its finest blocks; plans that need no cut get it in one.
        cluster: where they would run.
        batch_size: samples of one global batch.
        timing: of the model's pieces; None where their work is only counted.
        limit: when to end; the first plan that can be carried out is looked at in any case.
    """
    return rank_with_simulator(plans, build_simulator(model, cluster, batch_size, profile), deadline)


def rank_with_simulator(
    plans: Iterable[Plan],
    simulator: IncrementalSimulator,
    deadline: Deadline = NO_DEADLINE,
    tolerance: float | None = None,
) -> PlanRanking:
    """Return plans as :func:`rank_plans` does, with the help of what is known of others.

    Args:
        plans: what is compared.
        replay: for one model, cluster and batch, as :func:`build_simulator` makes it.
        limit: when to end; the first plan that can be carried out is looked at in any case.
        within: so many times the step of the fastest that keeps the numbers and fits; what is surely slower may be left
            out then, and nothing is split; those that could be fastest are played first. None for all of it.
    """
    predictions: dict[int, Prediction] = {}
    refusals: dict[int, RejectedPlan] = {}
    unseen: dict[int, Plan] = {}
    slower: dict[int, Plan] = {}
    most_s = math.inf
    asked = list(enumerate(plans))
    if tolerance is not None:
        asked.sort(key=lambda one: simulator.lower_bound_s(one[1]))
    for at, plan in asked:
        if predictions and deadline.is_past:
            unseen[at] = plan
            continue
        try:
            found = predict_with_simulator(plan, simulator, most_s, attributes_time=tolerance is None)
        except PlanError as error:
            refusals[at] = RejectedPlan(plan, str(error).splitlines()[0])
        except StepTooSlow:
            slower[at] = plan
        else:
            predictions[at] = found
            if tolerance is not None and found.is_synchronous and found.fits:
                most_s = min(most_s, tolerance * found.step_s)
    fastest = sorted(_in_order(predictions), key=_rank_key)
    return PlanRanking(tuple(fastest), _in_order(refusals), _in_order(unseen), _in_order(slower))


def _in_order(found: Mapping[int, RankedT]) -> tuple[RankedT, ...]:
    """Return what was found, in the order in which it was asked for."""
    return tuple(found[at] for at in sorted(found))


def merge_rankings(one: PlanRanking, other: PlanRanking) -> PlanRanking:
    """Return two rankings for one model as one, in which a plan that both have stands once."""
    predictions = {found.plan: found for found in (*one.predictions, *other.predictions)}
    refusals = {refused.plan: refused for refused in (*one.rejected, *other.rejected)}
    unseen = dict.fromkeys(
        plan for plan in (*one.not_evaluated, *other.not_evaluated) if plan not in predictions | refusals
    )
    slower = dict.fromkeys(plan for plan in (*one.pruned, *other.pruned) if plan not in predictions)
    known = tuple(sorted(predictions.values(), key=_rank_key))
    return PlanRanking(known, tuple(refusals.values()), tuple(unseen), tuple(slower))


def _rank_key(found: Prediction) -> tuple[bool, float, int, int]:
    return not found.fits, float(f"{found.step_s:.9g}"), found.memory_bytes, found.sent_bytes


def predict_plan(
    plan: Plan, model: ModelSpec, cluster: Cluster, *, batch_size: int, profile: ModelProfile | None = None
) -> Prediction:
    """Return what the simulator says about a plan, split; where ranks differ in speed, of one cut by their speeds.

    With a timing, pipelines are cut by its seconds, and memory is what was kept. The laws are not proved for it; they
    are before it runs.

    Raises:
        PlanError: it cannot be compiled for this model or this batch, or the timing is of another model.
    """
    profile = fit_profile(plan, model, profile)
    compiled, samples = compile_for(plan, model, cluster, batch_size, profile)
    spent = PlanSimulation(compiled, samples, profile).simulate_steps((cluster, with_free_links(cluster)))
    rank_bytes = _rank_bytes(compiled, samples, profile)
    played = PlanSimResult(compiled.plan, samples, tuple(spent), int(max(compiled.sent_bytes())), rank_bytes)
    return _build_prediction(played, cluster, is_synchronous=compiled.is_synchronous)


def predict_with_simulator(
    plan: Plan, simulator: IncrementalSimulator, max_step_s: float = math.inf, *, attributes_time: bool = True
) -> Prediction:
    """Return what :func:`predict` says of a plan, with the help of what is known of others.

    Args:
        plan: one of many for a model, a cluster and a batch.
        replay: for these, as :func:`build_simulator` makes it.
        most_s: what a step may take.
        is_split: whether it has to be known what the step would take if links took no time.

    Raises:
        Slower: what its ranks do by themselves takes longer.
        PlanError: it cannot be compiled for this model or this batch, or the timing is of another model.
    """
    played = None
    with suppress(PlanError):  # it is raised again by the whole plan, which says more
        played = simulator.simulate(plan, max_step_s, _ALL_LINKS if attributes_time else _REAL_LINKS)
    if played is not None:
        return _build_prediction(played, simulator.cluster, is_synchronous=True)
    return predict_plan(
        plan, simulator.model, simulator.cluster, batch_size=simulator.batch_size, profile=simulator.profile
    )


def attribute_time(found: Prediction, simulator: IncrementalSimulator) -> Prediction:
    """Return a prediction with what its step would take if links took no time, so that its parts are known.

    Args:
        found: for a model, a cluster and a batch.
        replay: for these, as :func:`build_simulator` makes it.
    """
    if found.free_links_s is not None:
        return found
    played = simulator.simulate(found.plan, at=_FREE_LINKS)
    if played is None:
        return predict_with_simulator(found.plan, simulator)
    (free,) = played.breakdowns
    return replace(found, free_s=free.step_s)


_REAL_LINKS, _FREE_LINKS = (0,), (1,)
_ALL_LINKS = (*_REAL_LINKS, *_FREE_LINKS)
"""The clusters of a replay: links as they are, and free ones."""


def build_simulator(
    model: ModelSpec, cluster: Cluster, batch_size: int, profile: ModelProfile | None = None
) -> IncrementalSimulator:
    """Return what plans are predicted with by the rows that they have in common; see :func:`predict_with_simulator`."""
    return IncrementalSimulator(model, (cluster, with_free_links(cluster)), batch_size, profile)


def _build_prediction(played: PlanSimResult, cluster: Cluster, *, is_synchronous: bool) -> Prediction:
    """Return what is said of a plan that was played on a cluster, and perhaps on the same one with free links."""
    spent, *free = played.breakdowns
    return Prediction(
        plan=played.plan,
        samples_per_microbatch=played.samples,
        step_s=spent.step_s,
        compute_s=spent.compute_s,
        update_s=spent.update_s,
        sent_bytes=played.sent_bytes,
        memory_bytes=max(played.rank_bytes),
        capacity_bytes=cluster.device.memory_bytes,
        is_synchronous=is_synchronous,
        rank_bytes=played.rank_bytes,
        free_links_s=free[0].step_s if free else None,
    )


def predict_trace(
    plan: Plan, model: ModelSpec, cluster: Cluster, *, batch_size: int, profile: ModelProfile | None = None
) -> Trace:
    """Return the step that :func:`predict` sums up, word by word; of steps that are not all alike the last kind.

    Raises:
        PlanError: it cannot be compiled for this model or this batch, or the timing is of another model.
    """
    profile = fit_profile(plan, model, profile)
    compiled, samples = compile_for(plan, model, cluster, batch_size, profile)
    return PlanSimulation(compiled, samples, profile).simulate_trace(cluster)


def predict_rank_bytes(
    plan: Plan, model: ModelSpec, cluster: Cluster, *, batch_size: int, profile: ModelProfile | None = None
) -> tuple[int, ...]:
    """Return what each rank would hold at most, without playing a step.

    Raises:
        PlanError: it cannot be compiled for this model or this batch, or the timing is of another model.
    """
    profile = fit_profile(plan, model, profile)
    compiled, samples = compile_for(plan, model, cluster, batch_size, profile)
    return _rank_bytes(compiled, samples, profile)


def _rank_bytes(compiled: CompiledPlan, samples: int, profile: ModelProfile | None) -> tuple[int, ...]:
    return peak_memory_bytes(compiled.step_variants[-1].full_program, storage_sizes(compiled.model, samples, profile))


def with_free_links(cluster: Cluster) -> Cluster:
    """Return the cluster with links on which nothing takes any time."""
    levels = tuple(replace(level, link=FREE_LINK) for level in cluster.levels)
    return replace(cluster, link=FREE_LINK, levels=levels)


BUBBLE_SAVINGS = {("zero_bubble", 1): 2 / 3, ("interleaved", 2): 1 / 2, ("zero_bubble", 2): 5 / 6}
"""For an order and its chunks per stage, which part of 1F1B's bubble it saves by the formula of its docstring."""
MAX_TRIED = 4
"""Those that promise most are tried, so many of them."""


def rank_with_schedules(
    plans: Iterable[Plan],
    simulator: IncrementalSimulator,
    deadline: Deadline = NO_DEADLINE,
    tolerance: float | None = None,
) -> PlanRanking:
    """Return plans as :func:`rank_with_simulator` does, and among them their pipelines in other orders that may be fastest.

    An order is tried where the plan would be the fastest if it saved what its formula says; what it costs in messages
    and memory is then predicted like that of any plan.

    Args:
        plans: what is compared.
        replay: for a model, a cluster and a batch, as :func:`build_simulator` makes it.
        limit: when to end, as for :func:`rank_with_simulator`.
        within: which plans may be left out, as for :func:`rank_with_simulator`.
    """
    ranking = rank_with_simulator(plans, simulator, deadline, tolerance)
    tried = _promising_schedules(ranking, simulator)
    return merge_rankings(ranking, rank_with_simulator(tried, simulator, deadline, tolerance)) if tried else ranking


def _promising_schedules(ranking: PlanRanking, simulator: IncrementalSimulator) -> list[Plan]:
    """Return the orders that would be fastest if they saved what their formulas say, those that promise most."""
    pipelines = [found for found in ranking.predictions if found.is_synchronous and _has_default_pipeline(found.plan)]
    hopes: dict[Plan, float] = {}
    most_s = ranking.eligible[0].step_s if ranking.eligible else 0.0
    for found in sorted(pipelines, key=_optimistic_step_s):
        if _optimistic_step_s(found) >= most_s:
            break
        hopes |= {
            plan: hope
            for plan, hope in _schedule_variants(attribute_time(found, simulator), simulator)
            if hope < most_s
        }
        if len(hopes) >= MAX_TRIED:
            most_s = sorted(hopes.values())[MAX_TRIED - 1]
    return sorted(hopes, key=hopes.__getitem__)[:MAX_TRIED]


def _has_default_pipeline(plan: Plan) -> bool:
    return any(isinstance(strategy, Pipeline) and _is_default_pipeline(strategy) for strategy in plan.strategies)


def _is_default_pipeline(pipeline: Pipeline) -> bool:
    """Tell whether nothing was chosen of a pipeline but, perhaps, where its stages begin."""
    return replace(pipeline, balance=(), split_points=()) == Pipeline(pipeline.degree)


def _optimistic_step_s(found: Prediction) -> float:
    """Return what a step would take if all of its waiting were idleness, and the best order saved what it may of it."""
    return found.step_s - max(BUBBLE_SAVINGS.values()) * found.waiting_s


def _schedule_variants(found: Prediction, simulator: IncrementalSimulator) -> Iterator[tuple[Plan, float]]:
    """Yield the plan with other orders of its pipeline, and the seconds of a step if they save what they may."""
    num_blocks = simulator.model.without_tp.num_blocks
    settled = partial(
        resolve_partition,
        model=simulator.model,
        cluster=simulator.cluster,
        batch_size=simulator.batch_size,
        profile=simulator.profile,
    )
    for at, given in enumerate(found.plan.strategies):
        if not isinstance(given, Pipeline) or not _is_default_pipeline(given):
            continue
        if (
            given != Pipeline(given.degree)
            and settled(_replace_strategy(found.plan, at, Pipeline(given.degree))) != found.plan
        ):
            continue  # somebody chose where its stages begin
        for (order, virtual), saved in BUBBLE_SAVINGS.items():
            if given.degree * virtual <= num_blocks:
                plan = _replace_strategy(found.plan, at, Pipeline(given.degree, order, chunks_per_stage=virtual))
                yield plan, found.step_s - saved * found.idle_s


def _replace_strategy(plan: Plan, at: int, pipeline: Pipeline) -> Plan:
    return replace(plan, strategies=(*plan.strategies[:at], pipeline, *plan.strategies[at + 1 :]))
