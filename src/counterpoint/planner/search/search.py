"""How much memory a plan takes at least, before anything is compiled: what is too large is not simulated.

A random walk among configurations: what is faster is always taken, what is slower sometimes, the less the slower.

Plans that nobody has listed: several random walks, from where other ways of planning have come to.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from random import Random
from typing import TypeAlias

from counterpoint.errors import PlanError
from counterpoint.model.model_profile import ModelProfile
from counterpoint.model.spec import ModelSpec
from counterpoint.plan.plan import Plan
from counterpoint.planner.choose import is_asynchronous
from counterpoint.planner.deadline import NO_DEADLINE, Deadline
from counterpoint.planner.enumerate import enumerate_plans
from counterpoint.planner.incremental_simulator import IncrementalSimulator
from counterpoint.planner.plan_simulation import StepSummary
from counterpoint.planner.ranking import PlanRanking, rank_plans
from counterpoint.planner.search.configuration import SearchConfiguration
from counterpoint.planner.search.proposals import SearchSpace, propose
from counterpoint.simulator.memory import ADAM_STATES
from counterpoint.strategies.data import Data
from counterpoint.strategies.parameter_server import Server
from counterpoint.strategies.pipeline.pipeline import Pipeline
from counterpoint.strategies.tensor import Tensor
from counterpoint.strategies.zero import Zero
from counterpoint.world.cluster import Cluster


def memory_lower_bound(plan: Plan, model: ModelSpec) -> int:
    """Return bytes that the fullest rank of a plan holds at least: of weights, gradients and states, and on average.

    Args:
        plan: any plan; of strategies that are not known here nothing is counted.
        model: whose parameters they are.

    Example:
        >>> from counterpoint.model.spec import chain
        >>> [
        ...     least_bytes(Plan.parse(text), chain(4, width=16))
        ...     for text in ("data(2)", "pipeline(2)", "zero(2, level=3)")
        ... ]
        [16384, 8192, 6144]
    """
    known = (Data, Zero, Pipeline, Tensor, Server)
    if not all(isinstance(strategy, known) for strategy in plan.strategies):
        return 0
    used = {name for names in model.units.values() for name in names}
    whole = sum(param.num_bytes for param in model.params if param.name in used)
    own = whole / prod(one.degree for one in plan.strategies if isinstance(one, Pipeline | Tensor))
    weights = gradients = 1.0
    states = float(ADAM_STATES)
    for strategy in plan.strategies:
        if isinstance(strategy, Server):
            states = 0.0
        elif isinstance(strategy, Zero):
            states /= strategy.degree
            weights /= strategy.degree if strategy.level == 3 else 1
            gradients = 0.0 if strategy.level > 1 else gradients
        elif isinstance(strategy, Data) and strategy.update == "sharded":
            states /= strategy.degree
    return int(own * (weights + gradients + states))


EvaluateFn: TypeAlias = Callable[[SearchConfiguration], StepSummary | None]
"""Returns what a configuration takes; None where it cannot be carried out."""

BETA = 50.0
"""A configuration that is slower by 2 % of the best one is taken once in e times."""
EXCESS_PENALTY = 4.0
"""Twice the memory that there is counts as a step that takes five times as long."""


def penalized_step_s(summary: StepSummary, capacity_bytes: int) -> float:
    """Return the seconds of a step, more of them the less it fits, so that a walk finds its way back to what does.

    Example:
        >>> cost_s(Figures(1.0, 1.0, 0.0, 0, memory_bytes=150), room_bytes=100)
        3.0
    """
    return summary.step_s * (1 + EXCESS_PENALTY * max(0.0, summary.memory_bytes / capacity_bytes - 1))


def acceptance(cost: float, proposed: float, best: float) -> float:
    """Return how likely a proposal is taken: ``min(1, exp(beta (cost - proposed) / best))``.

    Differences are counted in parts of the best cost, so that neither the unit nor the size of a model matters.

    Example:
        >>> round(acceptance(10.0, 10.2, 10.0), 3), acceptance(10.2, 10.0, 10.0)
        (0.368, 1.0)

    Source:
        Jia, Zaharia and Aiken, Beyond Data and Model Parallelism for Deep Neural Networks (FlexFlow), MLSys 2019,
        section 6.2, whose costs are absolute.
    """
    return min(1.0, math.exp(min(0.0, BETA * (cost - proposed) / best)))


@dataclass(slots=True)
class MetropolisWalk:
    """One walk, as far as it has come.

    Args:
        space: what there is to choose from.
        judge: what configurations take.
        room_bytes: what a rank can hold.
        draw: where chance comes from.
    """

    space: SearchSpace
    evaluate: EvaluateFn
    capacity_bytes: int
    rng: Random
    current: SearchConfiguration = field(init=False)
    fits: bool = field(init=False, default=False)
    cost: float = field(init=False, default=math.inf)
    best: float = field(init=False, default=math.inf)

    def start(self, configuration: SearchConfiguration) -> None:
        """Stand at a configuration, which need not be one that can be carried out."""
        self.current = configuration
        self.cost, self.fits = self._evaluate_cost(configuration)
        self.best = self.cost

    def step(self) -> bool:
        """Propose one change and take it or not; return whether it is the best so far."""
        proposed = propose(self.current, self.space, self.rng, saves_memory=not self.fits)
        cost, fits = self._evaluate_cost(proposed)
        chance = self.rng.random()
        if math.isinf(cost) or (math.isfinite(self.cost) and chance >= acceptance(self.cost, cost, self.best)):
            return False
        self.current, self.cost, self.fits = proposed, cost, fits
        is_best = cost < self.best
        self.best = min(cost, self.best)
        return is_best

    def _evaluate_cost(self, configuration: SearchConfiguration) -> tuple[float, bool]:
        """Return the cost, and whether it fits."""
        figures = self.evaluate(configuration)
        if figures is None:
            return math.inf, False
        return penalized_step_s(figures, self.capacity_bytes), figures.memory_bytes <= self.capacity_bytes


MAX_STARTS = 2
"""So many of the best plans of an enumeration are walked from."""
MAX_RANKED = 16
"""So many of the best plans that a search has met are ranked in the end, with what their time goes to."""


@dataclass(frozen=True, slots=True)
class SearchBudget:
    """How long a search goes on.

    Args:
        steps: proposals in all; None for no bound.
        time_s: seconds in all; None for no bound. With steps alone the result is the same wherever it is computed.
        seed: where chance begins.
    """

    steps: int | None = None
    time_s: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        bounds = [bound for bound in (self.steps, self.time_s) if bound is not None]
        if not bounds or not all(0 <= bound < math.inf for bound in bounds):
            raise PlanError(
                f"a search of {self.steps} steps and {self.time_s} seconds has no end or none that can be; give 0 or "
                "more steps, or seconds"
            )


def search_plans(
    space: SearchSpace,
    cluster: Cluster,
    *,
    budget: SearchBudget,
    starts: Sequence[Plan] | None = None,
    profile: ModelProfile | None = None,
) -> PlanRanking:
    """Return the best plans that random walks have met, the fastest first, with what their time goes to.

    One walk begins with data parallelism on all ranks, and one at each start. A walk ends when half of its part of the
    budget has gone by without a better plan; what is left goes to the others. Starts are ranked with what was found,
    so that the first is never slower than they are predicted to be.

    Args:
        space: what there is to choose from.
        cluster: where it runs.
        budget: how long it goes on, with the ranking in the end.
        starts: plans from elsewhere; by default the best of an enumeration, which takes at most half of the time.
        timing: of the model's pieces; None where their work is only counted.

    Source:
        Jia, Zaharia and Aiken, Beyond Data and Model Parallelism for Deep Neural Networks (FlexFlow), MLSys 2019,
        section 6.2.

    Example:
        >>> from counterpoint.model.spec import chain
        >>> space = Space(chain(4), num_ranks=2, batch_size=8)
        >>> len(search(space, Cluster(), budget=Budget(steps=20)).predictions) > 1
        True
    """
    met, spent = _Visited(space, cluster, profile), _BudgetMeter(budget)
    limit = NO_DEADLINE if budget.time_s is None else Deadline.after(budget.time_s)
    if starts is None:
        met.evaluate(_enumerated_plans(space, cluster), spent)
        starts = met.best()[:MAX_STARTS]
    given = (SearchConfiguration.from_plan(plan, space.model) for plan in starts)
    begin = [SearchConfiguration(data=Data(space.num_ranks)), *(one for one in given if one is not None)]
    begin = list(dict.fromkeys(begin))
    draw = Random(budget.seed)
    for number, at in enumerate(begin):
        if limit.is_past:
            break
        walk = MetropolisWalk(space, met.summary_of_configuration, cluster.device.memory_bytes, Random(draw.random()))
        walk.start(at)
        spent.start_walk(walks_left=len(begin) - number)
        while spent.should_continue and limit.remaining_s > met.ranking_s:
            spent.count(is_best=walk.step())
    found = dict.fromkeys([*starts, *met.best()])
    return rank_plans(found, space.model, cluster, batch_size=space.batch_size, profile=profile, deadline=limit)


def _enumerated_plans(space: SearchSpace, cluster: Cluster) -> Iterator[Plan]:
    """Yield the plans of the enumeration that keep the numbers, can be sliced, and are not too large for certain."""
    for plan in enumerate_plans(space.num_ranks, space.model, batch_size=space.batch_size):
        is_sliced = any(isinstance(strategy, Tensor) for strategy in plan.strategies)
        is_wanted = not is_asynchronous(plan) and (space.dims or not is_sliced)
        if is_wanted and memory_lower_bound(plan, space.model) <= cluster.device.memory_bytes:
            yield replace(plan, passes=space.passes)


class _Visited:
    """The plans that walks have met, each simulated once."""

    def __init__(self, space: SearchSpace, cluster: Cluster, profile: ModelProfile | None) -> None:
        self.space, self.capacity_bytes = space, cluster.device.memory_bytes
        self.simulator = IncrementalSimulator(space.model, (cluster,), space.batch_size, profile)
        self.plans: dict[SearchConfiguration, Plan] = {}
        self.summaries: dict[Plan, StepSummary | None] = {}
        self.simulation_s = 0.0

    def evaluate(self, plans: Iterable[Plan], meter: _BudgetMeter) -> None:
        """Simulate plans for at most half of the time."""
        for plan in plans:
            if meter.is_half_spent:
                break
            self.summary(plan)

    def summary_of_configuration(self, configuration: SearchConfiguration) -> StepSummary | None:
        """Return what a configuration takes; None where it cannot be carried out."""
        plan = self.plans.get(configuration)
        if plan is None:
            plan = self.plans[configuration] = configuration.plan(self.space.model, self.space.passes)
        return self.summary(plan)

    def summary(self, plan: Plan) -> StepSummary | None:
        """Return what a plan takes; None where it cannot be carried out."""
        if plan not in self.summaries:
            began_s = time.perf_counter()
            try:
                self.summaries[plan] = self.simulator.summary(plan)
            except PlanError:
                self.summaries[plan] = None
            self.simulation_s += time.perf_counter() - began_s
        return self.summaries[plan]

    @property
    def ranking_s(self) -> float:
        """About how long it takes to rank the best of them in the end, each on links as they are and on free ones."""
        return 2 * MAX_RANKED * self.simulation_s / max(1, len(self.summaries))

    def best(self) -> list[Plan]:
        """Return the best of them, those that fit first."""
        found = [(plan, figures) for plan, figures in self.summaries.items() if figures is not None]
        found.sort(
            key=lambda one: (one[1].memory_bytes > self.capacity_bytes, penalized_step_s(one[1], self.capacity_bytes))
        )
        return [plan for plan, _ in found[:MAX_RANKED]]


class _BudgetMeter:
    """How much of a budget is spent, and whether a walk may go on.

    Args:
        budget: of all walks.
    """

    def __init__(self, budget: SearchBudget) -> None:
        self.budget = budget
        self.steps, self.began_s = 0, time.perf_counter()
        self.walk_budgets: tuple[tuple[float, float], ...] = ()
        self.best_at = 0.0

    def start_walk(self, *, walks_left: int) -> None:
        """Give the next walk an equal part of what is left for so many of them."""
        bounds = zip((self.budget.steps, self.budget.time_s), self._used(), strict=True)
        self.walk_budgets = tuple(
            (used, (bound - used) / walks_left if bound is not None else math.inf) for bound, used in bounds
        )
        self.best_at = 0.0

    def count(self, *, is_best: bool) -> None:
        """Take note of a step."""
        self.steps += 1
        if is_best:
            self.best_at = self._walk_fraction

    @property
    def is_half_spent(self) -> bool:
        """Whether half of the time is over."""
        return self.budget.time_s is not None and self._used()[1] >= self.budget.time_s / 2

    @property
    def should_continue(self) -> bool:
        """Whether the walk has something left of its part, and has found something in the last half of it."""
        return self._walk_fraction < 1 and self._walk_fraction - self.best_at < 1 / 2

    @property
    def _walk_fraction(self) -> float:
        """How much of its part a walk has used."""
        used = zip(self._used(), self.walk_budgets, strict=True)
        return max((now - before) / room if room > 0 else 1.0 for now, (before, room) in used)

    def _used(self) -> tuple[float, float]:
        return self.steps, time.perf_counter() - self.began_s
