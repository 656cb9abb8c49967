"""The plan one would take without thinking further: with solo's numbers, fast, and no fancier than that needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from counterpoint.errors import PlanError
from counterpoint.model.spec import ModelSpec
from counterpoint.model.timing import Timing
from counterpoint.plan import Plan
from counterpoint.planner.enumerate import enumerate_plans
from counterpoint.planner.limit import ENDLESS, Limit
from counterpoint.planner.orders import rank_with_orders
from counterpoint.planner.rank import Prediction, Ranking, Refusal, replay_for
from counterpoint.planner.remedies import Question, explain_excess, settle_all
from counterpoint.planner.rows.replay import Replay
from counterpoint.planner.staged import EXACT_ORDERS, staged_plans
from counterpoint.program.trace import Trace
from counterpoint.strategies.data import Data
from counterpoint.strategies.elastic import Elastic
from counterpoint.strategies.pipeline import Pipeline
from counterpoint.strategies.server import Server
from counterpoint.world.cluster import Cluster

NEARLY_AS_FAST = 1.02
"""A simpler plan may have taken so many times as long as the one that was measured to be fastest."""
PERHAPS_AS_FAST = 1.1
"""A simpler plan may be predicted to take so many times as long as the fastest: predictions err by as much."""
EVER_AS_FAST = 1.05
"""One that was as fast as the fastest now and then may have taken so many times as long: trials err by as much."""
NOW_AND_THEN = 0.2
"""A plan was as fast as another now and then that was in such a part of its turns."""
DATA_AS_FAST = 1.08
"""Plain data parallelism may have taken so many times as long: plans differ by as much from one run to the next."""
WORTH_A_TRIAL = 2.0
"""A kind of plan may be predicted to take so many times as long as the fastest plan and is tried before a second one of
another kind."""


@dataclass(frozen=True, slots=True)
class Trial:
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
    turns: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
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
    question: Question
    ranking: Ranking
    simplest: tuple[Plan, ...]
    trials: tuple[Trial, ...] = ()
    untried: tuple[Refusal, ...] = ()

    def predicted(self, plan: Plan) -> Prediction | None:
        """Return what was predicted of a plan, if it could be carried out."""
        return next((found for found in self.ranking.predictions if found.plan == plan), None)

    def tried(self, plan: Plan) -> Trial | None:
        """Return what was measured of a plan, if it was."""
        return next((found for found in self.trials if found.plan == plan), None)


def choose(num_ranks: int, model: ModelSpec, cluster: Cluster, batch_size: int) -> Plan:
    """Return the best synchronous plan for so many ranks; the same wherever it is asked for.

    Example:
        >>> from counterpoint.model.spec import chain
        >>> print(choose(1, chain(4), Cluster(), 32))
        solo

    Raises:
        PlanError: there is none; the message says what stands in the way.
    """
    staged = staged_plans(num_ranks, model.unsliced, cluster, batch_size, EXACT_ORDERS)
    return choose_from((*enumerate_plans(num_ranks, model), *staged), model, cluster, batch_size=batch_size)


def choose_from(
    plans: Iterable[Plan], model: ModelSpec, cluster: Cluster, *, batch_size: int, timing: Timing | None = None
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
    return weigh(plans, Question(model, cluster, batch_size, timing)).plan


def weigh(plans: Iterable[Plan], question: Question, within: float | None = PERHAPS_AS_FAST) -> Choice:
    """Return what :func:`choose_from` takes, with what it was weighed against.

    Args:
        plans: what to choose from, the simplest first.
        question: what the plan is for.
        within: plans may be left out that are surely slower than so many times the fastest; None to predict all.

    Raises:
        PlanError: there is none; the message says what stands in the way.
    """
    candidates = settle_all((plan for plan in plans if not is_late(plan)), question)
    return pick(rank_for(candidates, question, within=within), candidates, question)


def rank_for(
    plans: Iterable[Plan], question: Question, limit: Limit = ENDLESS, *, within: float | None = None
) -> Ranking:
    """Return the plans for a question by what is predicted of them; see :func:`rank_with_orders`."""
    return rank_with_orders(plans, replay_of(question), limit, within)


def replay_of(question: Question) -> Replay:
    """Return what the plans for a question are predicted with."""
    return replay_for(question.model, question.cluster, question.batch_size, question.timing)


def pick(ranking: Ranking, simplest: Sequence[Plan], question: Question) -> Choice:
    """Return the choice among plans that were ranked.

    Args:
        ranking: what was predicted, also of plans that change the numbers, which are never taken.
        simplest: the plans as they were ranked, the simplest first; others of the ranking come last.
        question: what the plan is for.

    Raises:
        PlanError: none keeps the numbers and fits; the message says what stands in the way.
    """
    kept = ranking.kept
    if not kept:
        raise PlanError(_obstacle(ranking, simplest, question))
    near = [found.plan for found in kept if found.step_s <= PERHAPS_AS_FAST * kept[0].step_s]
    return Choice(_simplest(near, simplest), question, ranking, tuple(simplest))


def worth_measuring(choice: Choice, count: int) -> tuple[Plan, ...]:
    """Return the plans to measure: plain data parallelism, the choice, the best of each kind, and the fastest others.

    Predictions of plans of one kind err alike; so of each kind (pipelines of one order, slices, pipelines of replicas)
    the plan that is predicted to be the fastest comes first, where that is at most twice as slow as the fastest of all.

    All of them are held by the ranks at one time; those are left out, the slowest first, for which there is no room.

    Args:
        choice: by what was predicted.
        count: how many beside data parallelism.
    """
    kept = choice.ranking.kept
    best = list(dict.fromkeys([choice.plan, *_best_of_kinds(kept), *(found.plan for found in kept)]))
    plain = [found.plan for found in kept if is_plain(found.plan)]
    wanted = list(dict.fromkeys([*plain, *[plan for plan in best if plan not in plain][:count]]))
    memory = {found.plan: found.memory_bytes for found in kept}
    room = choice.question.cluster.device.memory_bytes
    while len(wanted) > 1 and sum(memory[plan] for plan in wanted) > room:
        wanted.pop()
    order = {plan: at for at, plan in enumerate(choice.simplest)}
    return tuple(sorted(wanted, key=lambda plan: order.get(plan, len(order))))


def decide(choice: Choice, trials: Sequence[Trial], untried: Sequence[Refusal] = ()) -> Choice:
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
        return replace(choice, untried=tuple(untried))
    best = min(trials, key=lambda trial: trial.step_s)
    steps = _that_get_faster(trials, choice.simplest)
    near = [found.plan for found in steps if _is_as_fast(found, best)]
    return replace(choice, plan=near[0], trials=tuple(trials), untried=tuple(untried))


def _that_get_faster(trials: Sequence[Trial], simplest: Sequence[Plan]) -> list[Trial]:
    """Return the trials, the simplest plan first, without those that were no faster than a simpler one."""
    found: list[Trial] = []
    for trial in sorted(trials, key=lambda trial: _place(trial.plan, simplest)):
        if not found or trial.step_s < found[-1].step_s:
            found.append(trial)
    return found


def _is_as_fast(trial: Trial, best: Trial) -> bool:
    if trial.step_s <= (DATA_AS_FAST if is_plain(trial.plan) else NEARLY_AS_FAST) * best.step_s:
        return True
    as_fast = [own <= other for own, other in zip(trial.turns, best.turns, strict=False)]
    return sum(as_fast) >= max(1, NOW_AND_THEN * len(as_fast)) and trial.step_s <= EVER_AS_FAST * best.step_s


def _simplest(plans: Sequence[Plan], simplest: Sequence[Plan]) -> Plan:
    return min(plans, key=lambda plan: _place(plan, simplest))


def _place(plan: Plan, simplest: Sequence[Plan]) -> int:
    """Return how many plans are simpler; one that is not on the list comes last."""
    return simplest.index(plan) if plan in simplest else len(simplest)


def _best_of_kinds(kept: Sequence[Prediction]) -> list[Plan]:
    """Return the plan of each kind that is predicted to be the fastest, where that is not too slow to be tried."""
    found: dict[tuple[str, ...], Plan] = {}
    for one in sorted(kept, key=lambda one: one.step_s):
        if one.step_s <= WORTH_A_TRIAL * kept[0].step_s:
            found.setdefault(_kind(one.plan), one.plan)
    return list(found.values())


def _kind(plan: Plan) -> tuple[str, ...]:
    """Return which strategies a plan is made of, and in which orders its pipelines compute."""
    return tuple(one.order if isinstance(one, Pipeline) else type(one).__name__ for one in plan.strategies)


def is_plain(plan: Plan) -> bool:
    """Tell whether a plan is data parallelism and nothing else."""
    return len(plan.strategies) == 1 and plan.strategies[0] == Data(plan.num_ranks)


def is_late(plan: Plan) -> bool:
    """Tell whether gradients meet newer weights than they were computed with, so that it need not be ranked."""
    return any(
        (isinstance(strategy, Pipeline) and strategy.is_stream)
        or (isinstance(strategy, Server) and not strategy.is_synchronous)
        or isinstance(strategy, Elastic)
        for strategy in plan.strategies
    )


def _obstacle(ranking: Ranking, plans: Sequence[Plan], question: Question) -> str:
    exact = [found for found in ranking.predictions if found.is_synchronous]
    if exact:
        return explain_excess(exact, plans, question)
    if ranking.refusals:
        refused = ranking.refusals[0]
        return f"no plan can be carried out; {refused.plan}, for one: {refused.reason}"
    return "there is no synchronous plan among those to choose from; give one, for instance data"
