"""Where to cut a model and how often to replicate each stage, by dynamic programming over the levels of a network.

Source: Harlap et al., PipeDream (arXiv 1806.03377), flat; Narayanan et al., PipeDream (SOSP 2019), section 3.1, by
levels; the optimizer that was released with the latter, which counts otherwise than both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from counterpoint.errors import PlanError
from counterpoint.planner.objectives import Objective
from counterpoint.planner.states import States

Table = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Level:
    """One level of a network: so many parts of the level below, joined by links of that speed.

    Args:
        count: parts; devices at the innermost level.
        bytes_per_s: of the link between two of them.
    """

    count: int
    bytes_per_s: float

    def __post_init__(self) -> None:
        if self.count < 1 or not self.bytes_per_s > 0:
            raise PlanError(f"a level joins at least 1 part by links of more than 0 bytes/s, not {self}")


@dataclass(frozen=True, slots=True)
class Stage:
    """A run of layers: what the state ``stop`` holds and the state ``start`` does not.

    Args:
        start: a state that is inside ``stop``.
        stop: the state behind the stage.
        replicas: parts of the level that it is spread over.
        stages: how every part works on it: stages of the level below; none at the innermost level.
    """

    start: int
    stop: int
    replicas: int
    stages: tuple[Stage, ...] = ()

    def innermost(self) -> Iterator[tuple[int, int, int]]:
        """Yield start, stop and the replicas on all devices of each stage that one device works on."""
        if not self.stages:
            yield self.start, self.stop, self.replicas
        for stage in self.stages:
            for start, stop, replicas in stage.innermost():
                yield start, stop, replicas * self.replicas


@dataclass(frozen=True, slots=True)
class Partition:
    """The stages of a model, and the seconds that the slowest of them takes for each minibatch."""

    stages: tuple[Stage, ...]
    slowest_s: float


def partition(states: States, levels: Sequence[Level], objective: Objective) -> Partition:
    """Return the stages whose slowest one is as fast as can be; all parts of all levels are used.

    Args:
        states: the cuts of the model.
        levels: of the network, the innermost first.
        objective: how long a stage and what it hands on take.

    Cost: for n states and levels of m parts at most n^3 m^2 / 2 comparisons each; n^2 m^2 / 2 at the outermost.
    """
    seconds = np.where(states.inside, states.seconds[None, :] - states.seconds[:, None], np.inf)
    weights = states.weight_bytes[None, :] - states.weight_bytes[:, None]
    solved: list[_Solved] = []
    below = 1
    for at, level in enumerate(levels):
        rows = 1 if at == len(levels) - 1 else states.count
        solved.append(_Solved.of(_Costs(states, objective, level, below, seconds, weights), rows))
        seconds, below = solved[-1].values[level.count - 1], level.count
    last = states.count - 1
    stages = tuple(_stages(solved, len(levels) - 1, 0, last, levels[-1].count))
    return Partition(stages, float(seconds[0, last]))


@dataclass(frozen=True, slots=True)
class _Costs:
    """What stages take on one level.

    Args:
        states: the cuts.
        objective: how it is counted.
        level: the level.
        below: parts of the level below.
        seconds: what one part takes from state to state; infinite where no stage is.
        weight_bytes: of the weights from state to state.
    """

    states: States
    objective: Objective
    level: Level
    below: int
    seconds: Table
    weight_bytes: Table

    def alone(self, replicas: int, rows: int) -> Table:
        """Return the seconds from each of the first states of a stage that no other one stands before."""
        speed = self.level.bytes_per_s * (self.below if self.objective.shares_first else 1)
        return self.objective.stage_s(self.seconds[:rows], self.weight_bytes[:rows], replicas, speed)

    def behind(self, replicas: int) -> Table:
        """Return the seconds from state to state of a stage behind others, and what it is handed and hands on."""
        speed = self.level.bytes_per_s
        stages = self.objective.stage_s(self.seconds, self.weight_bytes, replicas, speed)
        if not self.objective.transfer_s(1.0, replicas, speed):
            return stages
        sizes = self.states.crossing_bytes.tolist()
        handed = np.array([self.objective.transfer_s(size, replicas, speed) for size in sizes], dtype=np.float64)
        given = handed if self.objective.hands_on else np.zeros_like(handed)
        return np.maximum(stages, np.maximum(handed[:, None], given[None, :]))


@dataclass(frozen=True, slots=True)
class _Solved:
    """The best of one level: for every number of parts the seconds from state to state.

    Args:
        values: of the slowest stage, with one part, two, and so on.
        alone: of one stage on so many parts, from the same states on.
        behind: of one stage behind others, likewise; these leave at least one part.
    """

    values: tuple[Table, ...]
    alone: tuple[Table, ...]
    behind: tuple[Table, ...]

    @classmethod
    def of(cls, costs: _Costs, rows: int) -> _Solved:
        """Return the best for the first so many states as starts."""
        counts = range(1, costs.level.count + 1)
        alone = tuple(costs.alone(replicas, rows) for replicas in counts)
        behind = tuple(costs.behind(replicas) for replicas in counts[:-1])
        values: list[Table] = []
        for count in counts:
            best = alone[count - 1].copy()
            for replicas, row in product(range(1, count), range(rows)):
                joined = np.maximum(values[count - replicas - 1][row][:, None], behind[replicas - 1])
                np.minimum(best[row], joined.min(axis=0), out=best[row])
            values.append(best)
        return cls(tuple(values), alone, behind)

    def last_stage(self, start: int, stop: int, count: int) -> tuple[int, int]:
        """Return where the last stage of the best starts and its replicas; one stage where that is as good."""
        best = self.values[count - 1][start, stop]
        if self.alone[count - 1][start, stop] == best:
            return start, count
        for replicas in range(count - 1, 0, -1):
            joined = np.maximum(self.values[count - replicas - 1][start], self.behind[replicas - 1][:, stop])
            if joined.min() == best:
                return int(joined.argmin()), replicas
        raise PlanError(f"no partition from state {start} to state {stop} over {count} parts")


def _stages(solved: Sequence[_Solved], at: int, start: int, stop: int, count: int) -> list[Stage]:
    """Return the stages of a level from state to state, each with those of the levels below."""
    found: list[Stage] = []
    while stop != start:
        before, replicas = solved[at].last_stage(start, stop, count)
        inner = tuple(_stages(solved, at - 1, before, stop, len(solved[at - 1].values))) if at else ()
        found.insert(0, Stage(before, stop, replicas, inner))
        stop, count = before, count - replicas
    return found
