"""Search for plans with several Metropolis walks, from data parallelism and from the best enumerated plans.

A walk proposes one random change at a time. Faster configurations are always accepted, slower ones sometimes, with a
probability that decreases with their cost. Plans whose memory has too large a lower bound are not simulated.
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
from counterpoint.strategies.data import Data
from counterpoint.strategies.parameter_server import Server
from counterpoint.strategies.pipeline.pipeline import Pipeline
from counterpoint.strategies.tensor import Tensor
from counterpoint.strategies.zero import Zero
from counterpoint.world.cluster import Cluster


def memory_lower_bound(plan: Plan, model: ModelSpec) -> int:
    """Return a lower bound of the memory of the rank that needs most: weights, gradients and states, averaged.

    Args:
        plan: any plan; 0 is returned for unknown strategies.
        model: with the parameters.

    Example:
        >>> from counterpoint.model.spec import linear_chain
        >>> model = linear_chain(4, width=16)
        >>> [memory_lower_bound(Plan.parse(text), model) for text in ("data(2)", "pipeline(2)", "zero(2, level=3)")]
        [16384, 8192, 6144]
    """
    known_strategies = (Data, Zero, Pipeline, Tensor, Server)
    if not all(isinstance(strategy, known_strategies) for strategy in plan.strategies):
        return 0
    used = {name for names in model.units.values() for name in names}
    num_parts = prod(part.degree for part in plan.strategies if isinstance(part, Pipeline | Tensor))
    weights, gradients, states = (
        sum(param.num_elements * param.element_bytes(held_as) for param in model.params if param.name in used)
        / num_parts
        for held_as in ("weight", "grad", "state")
    )
    for strategy in plan.strategies:
        if isinstance(strategy, Server):
            states = 0.0
        elif isinstance(strategy, Zero):
            states /= strategy.degree
            weights /= strategy.degree if strategy.level == 3 else 1
            gradients = 0.0 if strategy.level > 1 else gradients
        elif isinstance(strategy, Data) and strategy.update == "sharded":
            states /= strategy.degree
    return int(weights + gradients + states)


EvaluateFn: TypeAlias = Callable[[SearchConfiguration], StepSummary | None]
"""Returns the predictions for a configuration; None if it cannot be executed."""

BETA = 50.0
"""Inverse temperature: a configuration that is slower by 2 % of the best one is accepted once in e times."""
EXCESS_PENALTY = 4.0
"""With twice the available memory a step counts as five times as long."""


def penalized_step_s(summary: StepSummary, capacity_bytes: int) -> float:
    """Return the seconds of a step, increased by the excess of memory, so that a walk returns to what fits.

    Example:
        >>> penalized_step_s(StepSummary(1.0, 1.0, 0.0, 0, memory_bytes=150), capacity_bytes=100)
        3.0
    """
    return summary.step_s * (1 + EXCESS_PENALTY * max(0.0, summary.memory_bytes / capacity_bytes - 1))


def acceptance(cost: float, proposed: float, best: float) -> float:
    """Return the probability of accepting a proposal: ``min(1, exp(beta (cost - proposed) / best))``.

    Differences are relative to the best cost, so that neither the unit nor the size of a model matters.

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
    """State of one walk.

    Args:
        space: the configurations of the search.
        evaluate: returns the predictions for a configuration.
        capacity_bytes: memory of a rank.
        rng: source of randomness.
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
        """Start at a configuration, which need not be executable."""
        self.current = configuration
        self.cost, self.fits = self._evaluate_cost(configuration)
        self.best = self.cost

    def step(self) -> bool:
        """Propose one change and accept it or not; return whether it is the best so far."""
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
        summary = self.evaluate(configuration)
        if summary is None:
            return math.inf, False
        return penalized_step_s(summary, self.capacity_bytes), summary.memory_bytes <= self.capacity_bytes


MAX_STARTS = 2
"""Best enumerated plans from which walks start."""
MAX_RANKED = 16
"""Best plans of a search that are ranked in the end, with attributed time."""


@dataclass(frozen=True, slots=True)
class SearchBudget:
    """Limits of a search.

    Args:
        steps: proposals in total; None for no limit.
        time_s: seconds in total; None for no limit. With steps only, the result does not depend on the machine.
        seed: of the random numbers.
    """

    steps: int | None = None
    time_s: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        bounds = [bound for bound in (self.steps, self.time_s) if bound is not None]
        if not bounds or not all(0 <= bound < math.inf for bound in bounds):
            raise PlanError(
                f"a search of {self.steps} steps and {self.time_s} seconds has no valid limit; give 0 or more "
                "steps, or seconds"
            )


def search_plans(
    space: SearchSpace,
    cluster: Cluster,
    *,
    budget: SearchBudget,
    starts: Sequence[Plan] | None = None,
    profile: ModelProfile | None = None,
) -> PlanRanking:
    """Return the best plans that random walks have visited, the fastest first, with attributed time.

    One walk starts with data parallelism on all ranks, and one at each given start. A walk ends when half of its share
    of the budget has passed without a better plan; the remainder goes to the other walks. Starts are ranked with the
    plans that were found, so that the first one is never slower than they are predicted to be.

    Args:
        space: the configurations of the search.
        cluster: where it runs.
        budget: limits of the search, including the final ranking.
        starts: plans to start from; by default the best enumerated ones, which take at most half of the time.
        profile: measured times of the model's layers; None to use operation counts.

    Source:
        Jia, Zaharia and Aiken, Beyond Data and Model Parallelism for Deep Neural Networks (FlexFlow), MLSys 2019,
        section 6.2.

    Example:
        >>> from counterpoint.model.spec import linear_chain
        >>> space = SearchSpace(linear_chain(4), num_ranks=2, batch_size=8)
        >>> len(search_plans(space, Cluster(), budget=SearchBudget(steps=20)).predictions) > 1
        True
    """
    visited, meter = _Visited(space, cluster, profile), _BudgetMeter(budget)
    deadline = NO_DEADLINE if budget.time_s is None else Deadline.after(budget.time_s)
    if starts is None:
        visited.evaluate(_enumerated_plans(space, cluster), meter)
        starts = visited.best()[:MAX_STARTS]
    configurations = (SearchConfiguration.from_plan(plan, space.model) for plan in starts)
    walk_starts = [
        SearchConfiguration(data=Data(space.num_ranks)),
        *(configuration for configuration in configurations if configuration is not None),
    ]
    walk_starts = list(dict.fromkeys(walk_starts))
    rng = Random(budget.seed)
    for walk_index, start in enumerate(walk_starts):
        if deadline.is_past:
            break
        walk = MetropolisWalk(
            space, visited.summary_of_configuration, cluster.device.usable_bytes, Random(rng.random())
        )
        walk.start(start)
        meter.start_walk(walks_left=len(walk_starts) - walk_index)
        while meter.should_continue and deadline.remaining_s > visited.ranking_s:
            meter.count(is_best=walk.step())
    candidates = dict.fromkeys([*starts, *visited.best()])
    return rank_plans(candidates, space.model, cluster, batch_size=space.batch_size, profile=profile, deadline=deadline)


def _enumerated_plans(space: SearchSpace, cluster: Cluster) -> Iterator[Plan]:
    """Yield the enumerated plans that are synchronous, in the space, and not certainly too large."""
    for plan in enumerate_plans(space.num_ranks, space.model, batch_size=space.batch_size):
        has_tensor_parallelism = any(isinstance(strategy, Tensor) for strategy in plan.strategies)
        is_in_space = not is_asynchronous(plan) and (space.dims or not has_tensor_parallelism)
        if is_in_space and memory_lower_bound(plan, space.model) <= cluster.device.usable_bytes:
            yield replace(plan, passes=space.passes)


class _Visited:
    """The plans that walks have visited, each simulated once."""

    def __init__(self, space: SearchSpace, cluster: Cluster, profile: ModelProfile | None) -> None:
        self.space, self.capacity_bytes = space, cluster.device.usable_bytes
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
        """Return the predictions for a configuration; None if it cannot be executed."""
        plan = self.plans.get(configuration)
        if plan is None:
            plan = self.plans[configuration] = configuration.plan(self.space.model, self.space.passes)
        return self.summary(plan)

    def summary(self, plan: Plan) -> StepSummary | None:
        """Return the predictions for a plan; None if it cannot be executed."""
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
        """Expected seconds of ranking the best plans in the end, each with real and with free links."""
        return 2 * MAX_RANKED * self.simulation_s / max(1, len(self.summaries))

    def best(self) -> list[Plan]:
        """Return the best plans, those that fit first."""
        visited = [(plan, summary) for plan, summary in self.summaries.items() if summary is not None]
        visited.sort(
            key=lambda entry: (
                entry[1].memory_bytes > self.capacity_bytes,
                penalized_step_s(entry[1], self.capacity_bytes),
            )
        )
        return [plan for plan, _ in visited[:MAX_RANKED]]


class _BudgetMeter:
    """Consumption of a budget by all walks, and of a walk's share of it.

    Args:
        budget: of all walks.
    """

    def __init__(self, budget: SearchBudget) -> None:
        self.budget = budget
        self.steps, self.began_s = 0, time.perf_counter()
        self.walk_budgets: tuple[tuple[float, float], ...] = ()
        self.best_at = 0.0

    def start_walk(self, *, walks_left: int) -> None:
        """Give the next walk an equal share of the remaining budget."""
        limits = zip((self.budget.steps, self.budget.time_s), self._used(), strict=True)
        self.walk_budgets = tuple(
            (used, (limit - used) / walks_left if limit is not None else math.inf) for limit, used in limits
        )
        self.best_at = 0.0

    def count(self, *, is_best: bool) -> None:
        """Count a step."""
        self.steps += 1
        if is_best:
            self.best_at = self._walk_fraction

    @property
    def is_half_spent(self) -> bool:
        """Whether half of the time has passed."""
        return self.budget.time_s is not None and self._used()[1] >= self.budget.time_s / 2

    @property
    def should_continue(self) -> bool:
        """Whether the walk has some of its share left, and has improved during the last half of it."""
        return self._walk_fraction < 1 and self._walk_fraction - self.best_at < 1 / 2

    @property
    def _walk_fraction(self) -> float:
        """The consumed fraction of the walk's share of the budget, of the resource that is used up first."""
        used = zip(self._used(), self.walk_budgets, strict=True)
        return max((now - start) / share if share > 0 else 1.0 for now, (start, share) in used)

    def _used(self) -> tuple[float, float]:
        return self.steps, time.perf_counter() - self.began_s
