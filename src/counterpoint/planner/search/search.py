"""Plans that nobody has listed: several random walks, from where other ways of planning have come to."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

from counterpoint.errors import PlanError
from counterpoint.model.timing import Timing
from counterpoint.plan import Plan
from counterpoint.planner.choose import is_late
from counterpoint.planner.enumerate import enumerate_plans
from counterpoint.planner.figures import Figures
from counterpoint.planner.limit import ENDLESS, Limit
from counterpoint.planner.rank import Ranking, rank_plans
from counterpoint.planner.rows.replay import Replay
from counterpoint.planner.search.bound import least_bytes
from counterpoint.planner.search.configuration import Configuration
from counterpoint.planner.search.moves import Space
from counterpoint.planner.search.walk import Walk, cost_s
from counterpoint.strategies.data import Data
from counterpoint.strategies.tensor import Tensor
from counterpoint.world.cluster import Cluster

MOST_STARTS = 2
"""So many of the best plans of an enumeration are walked from."""
MOST_RANKED = 16
"""So many of the best plans that a search has met are ranked in the end, with what their time goes to."""


@dataclass(frozen=True, slots=True)
class Budget:
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


def search(
    space: Space,
    cluster: Cluster,
    *,
    budget: Budget,
    starts: Sequence[Plan] | None = None,
    timing: Timing | None = None,
) -> Ranking:
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
    met, spent = _Met(space, cluster, timing), _Spent(budget)
    limit = ENDLESS if budget.time_s is None else Limit.within(budget.time_s)
    if starts is None:
        met.look_at(_listed(space, cluster), spent)
        starts = met.best()[:MOST_STARTS]
    given = (Configuration.of(plan, space.model) for plan in starts)
    begin = [Configuration(copies=Data(space.num_ranks)), *(one for one in given if one is not None)]
    begin = list(dict.fromkeys(begin))
    draw = Random(budget.seed)
    for number, at in enumerate(begin):
        if limit.is_over:
            break
        walk = Walk(space, met.figures_at, cluster.device.memory_bytes, Random(draw.random()))
        walk.start(at)
        spent.begin(walks_left=len(begin) - number)
        while spent.goes_on and limit.left_s > met.closing_s:
            spent.count(is_best=walk.step())
    found = dict.fromkeys([*starts, *met.best()])
    return rank_plans(found, space.model, cluster, batch_size=space.batch_size, timing=timing, limit=limit)


def _listed(space: Space, cluster: Cluster) -> Iterator[Plan]:
    """Yield the plans of the enumeration that keep the numbers, can be sliced, and are not too large for certain."""
    for plan in enumerate_plans(space.num_ranks, space.model, batch_size=space.batch_size):
        is_sliced = any(isinstance(strategy, Tensor) for strategy in plan.strategies)
        is_wanted = not is_late(plan) and (space.dims or not is_sliced)
        if is_wanted and least_bytes(plan, space.model) <= cluster.device.memory_bytes:
            yield replace(plan, passes=space.passes)


class _Met:
    """The plans that walks have met, each simulated once."""

    def __init__(self, space: Space, cluster: Cluster, timing: Timing | None) -> None:
        self.space, self.room_bytes = space, cluster.device.memory_bytes
        self.replay = Replay(space.model, (cluster,), space.batch_size, timing)
        self.plans: dict[Configuration, Plan] = {}
        self.found: dict[Plan, Figures | None] = {}
        self.took_s = 0.0

    def look_at(self, plans: Iterable[Plan], spent: _Spent) -> None:
        """Simulate plans for at most half of the time."""
        for plan in plans:
            if spent.is_half_over:
                break
            self.figures(plan)

    def figures_at(self, at: Configuration) -> Figures | None:
        """Return what a configuration takes; None where it cannot be carried out."""
        plan = self.plans.get(at)
        if plan is None:
            plan = self.plans[at] = at.plan(self.space.model, self.space.passes)
        return self.figures(plan)

    def figures(self, plan: Plan) -> Figures | None:
        """Return what a plan takes; None where it cannot be carried out."""
        if plan not in self.found:
            began_s = time.perf_counter()
            try:
                self.found[plan] = self.replay.figures(plan)
            except PlanError:
                self.found[plan] = None
            self.took_s += time.perf_counter() - began_s
        return self.found[plan]

    @property
    def closing_s(self) -> float:
        """About how long it takes to rank the best of them in the end, each on links as they are and on free ones."""
        return 2 * MOST_RANKED * self.took_s / max(1, len(self.found))

    def best(self) -> list[Plan]:
        """Return the best of them, those that fit first."""
        found = [(plan, figures) for plan, figures in self.found.items() if figures is not None]
        found.sort(key=lambda one: (one[1].memory_bytes > self.room_bytes, cost_s(one[1], self.room_bytes)))
        return [plan for plan, _ in found[:MOST_RANKED]]


class _Spent:
    """How much of a budget is spent, and whether a walk may go on.

    Args:
        budget: of all walks.
    """

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.steps, self.began_s = 0, time.perf_counter()
        self.parts: tuple[tuple[float, float], ...] = ()
        self.best_at = 0.0

    def begin(self, *, walks_left: int) -> None:
        """Give the next walk an equal part of what is left for so many of them."""
        bounds = zip((self.budget.steps, self.budget.time_s), self._used(), strict=True)
        self.parts = tuple(
            (used, (bound - used) / walks_left if bound is not None else math.inf) for bound, used in bounds
        )
        self.best_at = 0.0

    def count(self, *, is_best: bool) -> None:
        """Take note of a step."""
        self.steps += 1
        if is_best:
            self.best_at = self._part

    @property
    def is_half_over(self) -> bool:
        """Whether half of the time is over."""
        return self.budget.time_s is not None and self._used()[1] >= self.budget.time_s / 2

    @property
    def goes_on(self) -> bool:
        """Whether the walk has something left of its part, and has found something in the last half of it."""
        return self._part < 1 and self._part - self.best_at < 1 / 2

    @property
    def _part(self) -> float:
        """How much of its part a walk has used."""
        used = zip(self._used(), self.parts, strict=True)
        return max((now - before) / room if room > 0 else 1.0 for now, (before, room) in used)

    def _used(self) -> tuple[float, float]:
        return self.steps, time.perf_counter() - self.began_s
