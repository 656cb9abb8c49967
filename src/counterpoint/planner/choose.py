"""Choose a plan: synchronous, fast, and no more complex than that requires."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from counterpoint.errors import PlanError
from counterpoint.model.model_profile import ModelProfile
from counterpoint.model.spec import ModelSpec
from counterpoint.plan.plan import Plan
from counterpoint.planner.activations import choose_activations
from counterpoint.planner.deadline import NO_DEADLINE, Deadline
from counterpoint.planner.enumerate import enumerate_plans
from counterpoint.planner.incremental_simulator import IncrementalSimulator
from counterpoint.planner.memory_suggestions import PlanningProblem, explain_no_fit, resolve_partitions
from counterpoint.planner.pipeline.candidates import DEFAULT_SYNCHRONOUS_SCHEDULES, find_pipeline_plans
from counterpoint.planner.ranking import (
    PlanRanking,
    Prediction,
    RejectedPlan,
    attribute_time,
    build_simulator,
    merge_rankings,
    rank_with_schedules,
)
from counterpoint.program.trace import Trace
from counterpoint.strategies.data import Data
from counterpoint.strategies.easgd import ElasticAveraging
from counterpoint.strategies.parameter_server import Server
from counterpoint.strategies.pipeline.pipeline import Pipeline
from counterpoint.world.cluster import Cluster

MEASURED_TOLERANCE = 1.02
"""Maximum ratio of a simpler plan's measured step to the fastest measured step."""
PREDICTED_TOLERANCE = 1.1
"""Maximum ratio of a simpler plan's predicted step to the fastest one: the error of predictions."""
NOISY_TOLERANCE = 1.05
"""The same ratio for a plan that was as fast as the fastest in some rounds: the error of trials."""
MIN_WIN_FRACTION = 0.2
"""Fraction of rounds in which a plan must have been as fast as the fastest."""
DATA_PARALLEL_TOLERANCE = 1.08
"""The same ratio for pure data parallelism: the difference between runs."""
MAX_ACTIVATION_PLANS = 4
"""Plans that fit with another choice of what blocks keep, up to which such choices are looked for."""
TRIAL_CUTOFF = 2.0
"""The best plan of each kind is tried before a second one of another kind, unless its predicted step is at least this
multiple of the fastest.
"""


@dataclass(frozen=True, slots=True)
class PlanTrial:
    """Measurement of a plan on real ranks.

    Args:
        plan: the plan.
        step_s: seconds of a step on the slowest rank: the median over rounds, corrected for the speed of the machine in
            each round, which all plans of the round show.
        trace: of one more step; None if it was not requested.
        round_times_s: seconds of a step on the slowest rank in each round. Plans that were tried together took their
            rounds one after the other, and close competitors had more of them. Empty for a plan that was abandoned
            because its first steps took several times as long as those of another plan.
    """

    plan: Plan
    step_s: float
    trace: Trace | None = None
    round_times_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanChoice:
    """The chosen plan, with all that it was compared with.

    Args:
        plan: synchronous, and fits.
        problem: model, cluster and batch that it was chosen for.
        ranking: predictions.
        by_simplicity: the plans to choose from, the simplest first.
        trials: measurements, in the order of ``by_simplicity``; empty if there were none.
        failed_trials: plans that could not be measured, and why.
    """

    plan: Plan
    problem: PlanningProblem
    ranking: PlanRanking
    by_simplicity: tuple[Plan, ...]
    trials: tuple[PlanTrial, ...] = ()
    failed_trials: tuple[RejectedPlan, ...] = ()

    def find_prediction(self, plan: Plan) -> Prediction | None:
        """Return the prediction for a plan, if it could be executed."""
        return next((prediction for prediction in self.ranking.predictions if prediction.plan == plan), None)

    def find_trial(self, plan: Plan) -> PlanTrial | None:
        """Return the measurement of a plan, if there is one."""
        return next((trial for trial in self.trials if trial.plan == plan), None)


def choose_plan(num_ranks: int, model: ModelSpec, cluster: Cluster, batch_size: int) -> Plan:
    """Return the best synchronous plan for a number of ranks; the result does not depend on the machine.

    Example:
        >>> from counterpoint.model.spec import linear_chain
        >>> print(choose_plan(1, linear_chain(4), Cluster(), 32))
        solo

    Raises:
        PlanError: no plan is synchronous and fits; the message says what prevents it.
    """
    pipeline_plans = find_pipeline_plans(
        num_ranks, model.without_tp, cluster, batch_size, DEFAULT_SYNCHRONOUS_SCHEDULES
    )
    return choose_plan_from(
        (*enumerate_plans(num_ranks, model), *pipeline_plans), model, cluster, batch_size=batch_size
    )


def choose_plan_from(
    plans: Iterable[Plan], model: ModelSpec, cluster: Cluster, *, batch_size: int, profile: ModelProfile | None = None
) -> Plan:
    """Return the simplest plan that is predicted at most a tenth slower than the fastest eligible one.

    That is the error of predictions: a plan chosen for a smaller gain could be slower than the plan that it replaces.
    Other schedules of pipelines are tried where they could be faster, and count as the least simple plans.

    Args:
        plans: what to choose from, the simplest first.
        model: the model in its finest blocks.
        cluster: where it runs.
        batch_size: samples of one global batch.
        profile: measured times of the model's layers; None to use operation counts.

    Raises:
        PlanError: no plan is synchronous and fits; the message says what prevents it.
    """
    return rank_and_choose(plans, PlanningProblem(model, cluster, batch_size, profile)).plan


def rank_and_choose(
    plans: Iterable[Plan], problem: PlanningProblem, tolerance: float | None = PREDICTED_TOLERANCE
) -> PlanChoice:
    """Return the choice of :func:`choose_plan_from` with all that it was compared with.

    Args:
        plans: what to choose from, the simplest first.
        problem: what the plan is for.
        tolerance: allows pruning of plans whose step is at least this multiple of the fastest; None to predict all.

    Raises:
        PlanError: no plan is synchronous and fits; the message says what prevents it.
    """
    candidates = resolve_partitions((plan for plan in plans if not is_asynchronous(plan)), problem)
    return select_plan(rank_for_problem(candidates, problem, tolerance=tolerance), candidates, problem)


def rank_for_problem(
    plans: Iterable[Plan], problem: PlanningProblem, deadline: Deadline = NO_DEADLINE, *, tolerance: float | None = None
) -> PlanRanking:
    """Return the ranking of plans for a problem; see :func:`rank_with_schedules`.

    Of synchronous plans that do not fit, and would be faster than those that do, the first that fit with another choice
    of what blocks keep are ranked with it as well; see :func:`choose_activations`.
    """
    simulator = simulator_for_problem(problem)
    ranking = rank_with_schedules(plans, simulator, deadline, tolerance)
    found: list[Prediction] = []
    limited = [one for one in ranking.predictions if one.is_synchronous and not one.fits]
    fastest_s = min((one.step_s for one in ranking.eligible), default=math.inf)
    for prediction in sorted(limited, key=lambda one: one.step_s):
        if len(found) == MAX_ACTIVATION_PLANS or prediction.step_s >= fastest_s or deadline.is_past:
            break
        if problem.may_recompute and prediction.plan.recomputation is None:
            chosen = choose_activations(prediction.plan, simulator, allows_disk=problem.has_offload_folder)
            found += [] if chosen is None else [chosen]
            fastest_s = min(fastest_s, *(one.step_s for one in found), math.inf)
    if tolerance is None:
        found = [attribute_time(one, simulator) for one in found]
    return merge_rankings(ranking, PlanRanking(tuple(found), ())) if found else ranking


def simulator_for_problem(problem: PlanningProblem) -> IncrementalSimulator:
    """Return the simulator that predicts the plans for a problem."""
    return build_simulator(problem.model, problem.cluster, problem.batch_size, problem.profile)


def select_plan(ranking: PlanRanking, by_simplicity: Sequence[Plan], problem: PlanningProblem) -> PlanChoice:
    """Return the choice among ranked plans.

    Args:
        ranking: predictions, also of asynchronous plans, which are never chosen.
        by_simplicity: the plans that were ranked, the simplest first; others of the ranking come last.
        problem: what the plan is for.

    Raises:
        PlanError: no plan is synchronous and fits; the message says what prevents it.
    """
    eligible = ranking.eligible
    if not eligible:
        raise PlanError(_explain_no_plan(ranking, by_simplicity, problem))
    nearly_fastest = [
        prediction.plan for prediction in eligible if prediction.step_s <= PREDICTED_TOLERANCE * eligible[0].step_s
    ]
    return PlanChoice(_find_simplest(nearly_fastest, by_simplicity), problem, ranking, tuple(by_simplicity))


def candidates_to_measure(choice: PlanChoice, num_plans: int) -> tuple[Plan, ...]:
    """Return the plans to measure: pure data parallelism, the choice, the best of each kind, and the fastest others.

    Predictions of plans of one kind have similar errors; so of each kind (pipelines of one schedule, tensor
    parallelism, pipelines with replicas) the fastest comes first, unless it is predicted to be twice as slow as the
    fastest of all.

    The ranks hold all of them at the same time; the slowest are dropped until they fit.

    Args:
        choice: by predictions.
        num_plans: how many in addition to data parallelism.
    """
    eligible = choice.ranking.eligible
    best = list(dict.fromkeys([choice.plan, *_best_per_kind(eligible), *(prediction.plan for prediction in eligible)]))
    data_parallel = [prediction.plan for prediction in eligible if is_pure_data_parallel(prediction.plan)]
    candidates = list(
        dict.fromkeys([*data_parallel, *[plan for plan in best if plan not in data_parallel][:num_plans]])
    )
    memory = {prediction.plan: prediction.memory_bytes for prediction in eligible}
    capacity_bytes = choice.problem.cluster.device.usable_bytes
    while len(candidates) > 1 and sum(memory[plan] for plan in candidates) > capacity_bytes:
        candidates.pop()
    positions = {plan: index for index, plan in enumerate(choice.by_simplicity)}
    return tuple(sorted(candidates, key=lambda plan: positions.get(plan, len(positions))))


def decide_by_trials(
    choice: PlanChoice, trials: Sequence[PlanTrial], failed_trials: Sequence[RejectedPlan] = ()
) -> PlanChoice:
    """Return the choice by measurements: the simplest plan that is not certainly slower than the fastest.

    A plan counts as equally fast if it takes at most 2 % longer; or at most 5 %, if it was as fast as the fastest in
    one of five rounds; or at most 8 %, if it is pure data parallelism. A plan that measured no faster than a simpler
    one is not chosen. Pure data parallelism is simpler than any other plan for several ranks, so that any other choice
    has measured faster by more than runs differ.

    Args:
        choice: by predictions; it is kept if there are no measurements.
        trials: measurements.
        failed_trials: plans that could not be measured.
    """
    if not trials:
        return replace(choice, failed_trials=tuple(failed_trials))
    best = min(trials, key=lambda trial: trial.step_s)
    improving = _drop_dominated(trials, choice.by_simplicity)
    nearly_fastest = [improved.plan for improved in improving if _is_within_tolerance(improved, best)]
    return replace(choice, plan=nearly_fastest[0], trials=tuple(trials), failed_trials=tuple(failed_trials))


def _drop_dominated(trials: Sequence[PlanTrial], by_simplicity: Sequence[Plan]) -> list[PlanTrial]:
    """Return the trials, the simplest plan first, without those that were no faster than a simpler one."""
    improving: list[PlanTrial] = []
    for trial in sorted(trials, key=lambda trial: _simplicity(trial.plan, by_simplicity)):
        if not improving or trial.step_s < improving[-1].step_s:
            improving.append(trial)
    return improving


def _is_within_tolerance(trial: PlanTrial, best: PlanTrial) -> bool:
    if (
        trial.step_s
        <= (DATA_PARALLEL_TOLERANCE if is_pure_data_parallel(trial.plan) else MEASURED_TOLERANCE) * best.step_s
    ):
        return True
    as_fast = [seconds <= other for seconds, other in zip(trial.round_times_s, best.round_times_s, strict=False)]
    return sum(as_fast) >= max(1, MIN_WIN_FRACTION * len(as_fast)) and trial.step_s <= NOISY_TOLERANCE * best.step_s


def _find_simplest(plans: Sequence[Plan], by_simplicity: Sequence[Plan]) -> Plan:
    return min(plans, key=lambda plan: _simplicity(plan, by_simplicity))


def _simplicity(plan: Plan, by_simplicity: Sequence[Plan]) -> int:
    """Return how many plans are simpler; a plan that was not listed comes last."""
    return by_simplicity.index(plan) if plan in by_simplicity else len(by_simplicity)


def _best_per_kind(eligible: Sequence[Prediction]) -> list[Plan]:
    """Return the plan of each kind that is predicted to be fastest, unless it is too slow to be tried."""
    best: dict[tuple[str, ...], Plan] = {}
    for prediction in sorted(eligible, key=lambda prediction: prediction.step_s):
        if prediction.step_s <= TRIAL_CUTOFF * eligible[0].step_s:
            best.setdefault(_kind(prediction.plan), prediction.plan)
    return list(best.values())


def _kind(plan: Plan) -> tuple[str, ...]:
    """Return the strategies of a plan, with the schedules of its pipelines."""
    return tuple(
        strategy.schedule_name if isinstance(strategy, Pipeline) else type(strategy).__name__
        for strategy in plan.strategies
    )


def is_pure_data_parallel(plan: Plan) -> bool:
    """Return whether a plan is data parallelism and nothing else."""
    return len(plan.strategies) == 1 and plan.strategies[0] == Data(plan.num_ranks)


def is_asynchronous(plan: Plan) -> bool:
    """Return whether gradients are applied to newer weights than they were computed with."""
    return any(
        (isinstance(strategy, Pipeline) and strategy.is_async)
        or (isinstance(strategy, Server) and not strategy.is_synchronous)
        or isinstance(strategy, ElasticAveraging)
        for strategy in plan.strategies
    )


def _explain_no_plan(ranking: PlanRanking, plans: Sequence[Plan], problem: PlanningProblem) -> str:
    synchronous = [prediction for prediction in ranking.predictions if prediction.is_synchronous]
    if synchronous:
        return explain_no_fit(synchronous, plans, problem)
    if ranking.rejected:
        rejection = ranking.rejected[0]
        return f"no plan can be executed; {rejection.plan}, for example: {rejection.reason}"
    return "none of the given plans is synchronous; add one, for example data"
