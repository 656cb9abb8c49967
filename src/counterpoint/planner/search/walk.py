"""A random walk among configurations: what is faster is always taken, what is slower sometimes, the less the slower."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import TypeAlias

from counterpoint.planner.figures import Figures
from counterpoint.planner.search.configuration import Configuration
from counterpoint.planner.search.moves import Space, propose

Judge: TypeAlias = Callable[[Configuration], Figures | None]
"""Returns what a configuration takes; None where it cannot be carried out."""

BETA = 50.0
"""A configuration that is slower by 2 % of the best one is taken once in e times."""
PER_EXCESS = 4.0
"""Twice the memory that there is counts as a step that takes five times as long."""


def cost_s(figures: Figures, room_bytes: int) -> float:
    """Return the seconds of a step, more of them the less it fits, so that a walk finds its way back to what does.

    Example:
        >>> cost_s(Figures(1.0, 1.0, 0.0, 0, memory_bytes=150), room_bytes=100)
        3.0
    """
    return figures.step_s * (1 + PER_EXCESS * max(0.0, figures.memory_bytes / room_bytes - 1))


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
class Walk:
    """One walk, as far as it has come.

    Args:
        space: what there is to choose from.
        judge: what configurations take.
        room_bytes: what a rank can hold.
        draw: where chance comes from.
    """

    space: Space
    judge: Judge
    room_bytes: int
    draw: Random
    now: Configuration = field(init=False)
    fits: bool = field(init=False, default=False)
    cost: float = field(init=False, default=math.inf)
    best: float = field(init=False, default=math.inf)

    def start(self, at: Configuration) -> None:
        """Stand at a configuration, which need not be one that can be carried out."""
        self.now = at
        self.cost, self.fits = self._cost_of(at)
        self.best = self.cost

    def step(self) -> bool:
        """Propose one change and take it or not; return whether it is the best so far."""
        proposed = propose(self.now, self.space, self.draw, saves_memory=not self.fits)
        cost, fits = self._cost_of(proposed)
        chance = self.draw.random()
        if math.isinf(cost) or (math.isfinite(self.cost) and chance >= acceptance(self.cost, cost, self.best)):
            return False
        self.now, self.cost, self.fits = proposed, cost, fits
        is_best = cost < self.best
        self.best = min(cost, self.best)
        return is_best

    def _cost_of(self, at: Configuration) -> tuple[float, bool]:
        """Return the cost, and whether it fits."""
        figures = self.judge(at)
        if figures is None:
            return math.inf, False
        return cost_s(figures, self.room_bytes), figures.memory_bytes <= self.room_bytes
