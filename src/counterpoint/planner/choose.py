"""The plan one would take without thinking further: with solo's numbers, fast, and no fancier than that needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from counterpoint.errors import PlanError
from counterpoint.model.model_profile import ModelProfile
from counterpoint.model.spec import ModelSpec
from counterpoint.plan.plan import Plan
from counterpoint.planner.deadline import NO_DEADLINE, Deadline
from counterpoint.planner.enumerate import enumerate_plans
from counterpoint.planner.incremental_simulator import IncrementalSimulator
from counterpoint.planner.memory_suggestions import PlanningProblem, explain_no_fit, resolve_partitions
from counterpoint.planner.pipeline.candidates import SYNCHRONOUS_SCHEDULES, find_pipeline_plans
from counterpoint.planner.ranking import PlanRanking, Prediction, RejectedPlan, build_simulator, rank_with_schedules
from counterpoint.program.trace import Trace
from counterpoint.strategies.data import Data
from counterpoint.strategies.easgd import ElasticAveraging
from counterpoint.strategies.parameter_server import Server
from counterpoint.strategies.pipeline.pipeline import Pipeline
from counterpoint.world.cluster import Cluster

MEASURED_TOLERANCE = 1.02
"""A simpler plan may have taken so many times as long as the one that was measured to be fastest."""
PREDICTED_TOLERANCE = 1.1
"""A simpler plan may be predicted to take so many times as long as the fastest: predictions err by as much."""
NOISY_TOLERANCE = 1.05
"""One that was as fast as the fastest now and then may have taken so many times as long: trials err by as much."""
MIN_WIN_FRACTION = 0.2
"""A plan was as fast as another now and then that was in such a part of its turns."""
DATA_PARALLEL_TOLERANCE = 1.08
"""Plain data parallelism may have taken so many times as long: plans differ by as much from one run to the next."""
TRIAL_CUTOFF = 2.0
"""A kind of plan may be predicted to take so many times as long as the fastest plan and is tried before a second one of
another kind."""


@dataclass(frozen=True, slots=True)
class PlanTrial:
    """What a plan took on real ranks.

    Args:
        plan: which one.
        step_s: seconds of a step: the mean of a turn on the slowest rank beside what all plans took in that round, the
            median over turns.
        trace: one more step, word by word; None where nobody asked for it.
        turns: likewise, of each turn; turns of plans that were tried together have met the same moments, one by one,
            and plans that are close to each other have had more. Empty for a plan that was given up, because its first
            steps took several times as long as another plan's.
    """

    plan: Plan
    step_s: float
    trace: Trace | None = None
    round_times_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanChoice:
    """The plan that is taken, with all that it was weighed against.

    Args:
        plan: keeps solo's numbers and fits.
        question: what it is for.
        ranking: what was predicted.
        simplest: the plans to choose from, the simplest first.
        trials: what was measured, in the order of ``simplest``; empty where nothing was.
        untried: plans that could not be measured, and why.
    """

    plan: Plan
    problem: PlanningProblem
    ranking: PlanRanking
    by_simplicity: tuple[Plan, ...]
    trials: tuple[PlanTrial, ...] = ()
    failed_trials: tuple[RejectedPlan, ...] = ()

    def find_prediction(self, plan: Plan) -> Prediction | None:
        """Return what was predicted of a plan, if it could be carried out."""
        return next((found for found in self.ranking.predictions if found.plan == plan), None)

    def find_trial(self, plan: Plan) -> PlanTrial | None:
        """Return what was measured of a plan, if it was."""
        return next((found for found in self.trials if found.plan == plan), None)


def choose_plan(num_ranks: int, model: ModelSpec, cluster: Cluster, batch_size: int) -> Plan:
    """Return the best synchronous plan for so many ranks; the same wherever it is asked for.

    Example:
        >>> from counterpoint.model.spec import chain
        >>> print(choose(1, chain(4), Cluster(), 32))
        solo

    Raises:
        PlanError: there is none; the message says what stands in the way.
    """
    staged = find_pipeline_plans(num_ranks, model.without_tp, cluster, batch_size, SYNCHRONOUS_SCHEDULES)
    return choose_plan_from((*enumerate_plans(num_ranks, model), *staged), model, cluster, batch_size=batch_size)


def choose_plan_from(
    plans: Iterable[Plan], model: ModelSpec, cluster: Cluster, *, batch_size: int, profile: ModelProfile | None = None
) -> Plan:
    """Return the first of the plans that is at most a tenth slower than the fastest that keeps the numbers and fits.

    Predictions are off by as much; what is chosen for less could be slower than what it is chosen instead of.

    Other orders of their pipelines are tried where they could be faster, and come last.

    Args:
        plans: what to choose from, the simplest first.
        model: the model in its finest blocks.
        cluster: where it runs.
        batch_size: samples of one global batch.
        timing: of the model's pieces; None where their work is only counted.

    Raises:
        PlanError: there is none; the message says what stands in the way.
    """
    return rank_and_choose(plans, PlanningProblem(model, cluster, batch_size, profile)).plan


def rank_and_choose(
    plans: Iterable[Plan], problem: PlanningProblem, tolerance: float | None = PREDICTED_TOLERANCE
) -> PlanChoice:
    """Return what :func:`choose_plan_from` takes, with what it was weighed against.

    Args:
        plans: what to choose from, the simplest first.
        question: what the plan is for.
        within: plans may be left out that are surely slower than so many times the fastest; None to predict all.

    Raises:
        PlanError: there is none; the message says what stands in the way.
    """
    candidates = resolve_partitions((plan for plan in plans if not is_asynchronous(plan)), problem)
    return select_plan(rank_for_problem(candidates, problem, tolerance=tolerance), candidates, problem)


def rank_for_problem(
    plans: Iterable[Plan], problem: PlanningProblem, deadline: Deadline = NO_DEADLINE, *, tolerance: float | None = None
) -> PlanRanking:
    """Return the plans for a question by what is predicted of them; see :func:`rank_with_schedules`."""
    return rank_with_schedules(plans, simulator_for_problem(problem), deadline, tolerance)


def simulator_for_problem(problem: PlanningProblem) -> IncrementalSimulator:
    """Return what the plans for a question are predicted with."""
    return build_simulator(problem.model, problem.cluster, problem.batch_size, problem.profile)


def select_plan(ranking: PlanRanking, by_simplicity: Sequence[Plan], problem: PlanningProblem) -> PlanChoice:
    """Return the choice among plans that were ranked.

    Args:
        ranking: what was predicted, also of plans that change the numbers, which are never taken.
        simplest: the plans as they were ranked, the simplest first; others of the ranking come last.
        question: what the plan is for.

    Raises:
        PlanError: none keeps the numbers and fits; the message says what stands in the way.
    """
    kept = ranking.eligible
    if not kept:
        raise PlanError(_explain_no_plan(ranking, by_simplicity, problem))
    near = [found.plan for found in kept if found.step_s <= PREDICTED_TOLERANCE * kept[0].step_s]
    return PlanChoice(_find_simplest(near, by_simplicity), problem, ranking, tuple(by_simplicity))


def candidates_to_measure(choice: PlanChoice, num_plans: int) -> tuple[Plan, ...]:
    """Return the plans to measure: plain data parallelism, the choice, the best of each kind, and the fastest others.

    Predictions of plans of one kind err alike; so of each kind (pipelines of one order, slices, pipelines of replicas)
    the plan that is predicted to be the fastest comes first, where that is at most twice as slow as the fastest of all.

    All of them are held by the ranks at one time; those are left out, the slowest first, for which there is no room.

    Args:
        choice: by what was predicted.
        count: how many beside data parallelism.
    """
    kept = choice.ranking.eligible
    best = list(dict.fromkeys([choice.plan, *_best_per_kind(kept), *(found.plan for found in kept)]))
    plain = [found.plan for found in kept if is_pure_data_parallel(found.plan)]
    wanted = list(dict.fromkeys([*plain, *[plan for plan in best if plan not in plain][:num_plans]]))
    memory = {found.plan: found.memory_bytes for found in kept}
    room = choice.problem.cluster.device.memory_bytes
    while len(wanted) > 1 and sum(memory[plan] for plan in wanted) > room:
        wanted.pop()
    order = {plan: at for at, plan in enumerate(choice.by_simplicity)}
    return tuple(sorted(wanted, key=lambda plan: order.get(plan, len(order))))


def decide_by_trials(
    choice: PlanChoice, trials: Sequence[PlanTrial], failed_trials: Sequence[RejectedPlan] = ()
) -> PlanChoice:
    """Return the choice by what was measured: the simplest of the plans that are not surely slower than the fastest.

    A plan is as fast that takes at most 2 % longer; or at most 5 %, if in one of five turns it was as fast as the
    fastest was at that time; or at most 8 %, if it is plain data parallelism. A plan that measured no faster than a
    simpler one is not taken, whatever its turns say. Plain data parallelism is simpler than any other plan for several
    ranks, so that what is chosen has measured faster by as much as runs differ, or is it.

    Args:
        choice: by what was predicted; it stays where nothing was measured.
        trials: what was measured.
        untried: what could not be.
    """
    if not trials:
        return replace(choice, untried=tuple(failed_trials))
    best = min(trials, key=lambda trial: trial.step_s)
    steps = _drop_dominated(trials, choice.by_simplicity)
    near = [found.plan for found in steps if _is_within_tolerance(found, best)]
    return replace(choice, plan=near[0], trials=tuple(trials), untried=tuple(failed_trials))


def _drop_dominated(trials: Sequence[PlanTrial], by_simplicity: Sequence[Plan]) -> list[PlanTrial]:
    """Return the trials, the simplest plan first, without those that were no faster than a simpler one."""
    found: list[PlanTrial] = []
    for trial in sorted(trials, key=lambda trial: _simplicity(trial.plan, by_simplicity)):
        if not found or trial.step_s < found[-1].step_s:
            found.append(trial)
    return found


def _is_within_tolerance(trial: PlanTrial, best: PlanTrial) -> bool:
    if (
        trial.step_s
        <= (DATA_PARALLEL_TOLERANCE if is_pure_data_parallel(trial.plan) else MEASURED_TOLERANCE) * best.step_s
    ):
        return True
    as_fast = [own <= other for own, other in zip(trial.round_times_s, best.round_times_s, strict=False)]
    return sum(as_fast) >= max(1, MIN_WIN_FRACTION * len(as_fast)) and trial.step_s <= NOISY_TOLERANCE * best.step_s


def _find_simplest(plans: Sequence[Plan], by_simplicity: Sequence[Plan]) -> Plan:
    return min(plans, key=lambda plan: _simplicity(plan, by_simplicity))


def _simplicity(plan: Plan, by_simplicity: Sequence[Plan]) -> int:
    """Return how many plans are simpler; one that is not on the list comes last."""
    return by_simplicity.index(plan) if plan in by_simplicity else len(by_simplicity)


def _best_per_kind(eligible: Sequence[Prediction]) -> list[Plan]:
    """Return the plan of each kind that is predicted to be the fastest, where that is not too slow to be tried."""
    found: dict[tuple[str, ...], Plan] = {}
    for one in sorted(eligible, key=lambda one: one.step_s):
        if one.step_s <= TRIAL_CUTOFF * eligible[0].step_s:
            found.setdefault(_kind(one.plan), one.plan)
    return list(found.values())


def _kind(plan: Plan) -> tuple[str, ...]:
    """Return which strategies a plan is made of, and in which orders its pipelines compute."""
    return tuple(one.schedule if isinstance(one, Pipeline) else type(one).__name__ for one in plan.strategies)


def is_pure_data_parallel(plan: Plan) -> bool:
    """Tell whether a plan is data parallelism and nothing else."""
    return len(plan.strategies) == 1 and plan.strategies[0] == Data(plan.num_ranks)


def is_asynchronous(plan: Plan) -> bool:
    """Tell whether gradients meet newer weights than they were computed with, so that it need not be ranked."""
    return any(
        (isinstance(strategy, Pipeline) and strategy.is_async)
        or (isinstance(strategy, Server) and not strategy.is_synchronous)
        or isinstance(strategy, ElasticAveraging)
        for strategy in plan.strategies
    )


def _explain_no_plan(ranking: PlanRanking, plans: Sequence[Plan], problem: PlanningProblem) -> str:
    exact = [found for found in ranking.predictions if found.is_synchronous]
    if exact:
        return explain_no_fit(exact, plans, problem)
    if ranking.rejected:
        refused = ranking.rejected[0]
        return f"no plan can be carried out; {refused.plan}, for one: {refused.reason}"
    return "there is no synchronous plan among those to choose from; give one, for instance data"
