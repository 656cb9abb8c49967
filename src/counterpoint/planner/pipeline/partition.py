"""How PipeDream counts the seconds of a stage: as its papers say, and as the optimizer that was released does.

Where to cut a model and how often to replicate each stage, by dynamic programming over the levels of a network.

Source: Harlap et al., PipeDream (arXiv 1806.03377), flat; Narayanan et al., PipeDream (SOSP 2019), section 3.1, by
levels; the optimizer that was released with the latter, which counts otherwise than both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from counterpoint.errors import PlanError
from counterpoint.planner.pipeline.layer_graph import GraphCuts


class StageObjective(Protocol):
    """Seconds of a stage and of what stages hand on, for every minibatch in the long run."""

    @property
    def splits_first_all_reduce(self) -> bool:
        """Whether the parts below share the sum of the gradients of a level's first stage."""
        ...

    @property
    def sends_activations(self) -> bool:
        """Whether a stage waits for what it hands on, too."""
        ...

    def stage_s(
        self, seconds: NDArray[np.float64], weight_bytes: NDArray[np.float64], replicas: int, bytes_per_s: float
    ) -> NDArray[np.float64]:
        """Return how long so many replicas take for a minibatch and their sum of gradients; endless stays so."""
        ...

    def transfer_s(self, num_bytes: float, replicas: int, bytes_per_s: float) -> float:
        """Return how long an activation and its gradient take on the way into a stage, in proportion to their bytes."""
        ...


@dataclass(frozen=True, slots=True)
class PublishedObjective:
    """As the papers say: the slower one of computing and of the sum of gradients, and links beside.

    T(i, j, m) = max(A(i, j), 2 (m - 1) / m |w| / B) / m, and 2 a / B for what crosses a cut. A replica sends
    (m - 1) / m of its weights and receives as much, as the text of the paper has it; the formula that is printed beside
    it leaves out the division by m; which configurations each of the two gives, decision 39 says.
    """

    splits_first_all_reduce: bool = False
    sends_activations: bool = False

    def stage_s(
        self, seconds: NDArray[np.float64], weight_bytes: NDArray[np.float64], replicas: int, bytes_per_s: float
    ) -> NDArray[np.float64]:
        """Return max(computing, 2 (m - 1) / m |w| / B) / m."""
        return np.maximum(seconds, 2 * (replicas - 1) / replicas * weight_bytes / bytes_per_s) / replicas

    def transfer_s(self, num_bytes: float, replicas: int, bytes_per_s: float) -> float:
        """Return 2 a / B."""
        return 2 * num_bytes / bytes_per_s


@dataclass(frozen=True, slots=True)
class ReleasedObjective:
    """As the released optimizer counts: computing and the sum of gradients one after the other.

    T(i, j, m) = (A(i, j) + 4 (m - 1) |w| / (B m)) / m, where the parts of the level below share the sum of the first
    stage of a level and of no other one. What crosses a cut takes 2 a / (B m) / ``compression`` on both sides of a
    stage, and nothing without that figure.

    Args:
        compression: by how much activations are smaller on the wire; None counts no transfer.
    """

    compression: float | None = None
    splits_first_all_reduce: bool = True
    sends_activations: bool = True

    def stage_s(
        self, seconds: NDArray[np.float64], weight_bytes: NDArray[np.float64], replicas: int, bytes_per_s: float
    ) -> NDArray[np.float64]:
        """Return (computing + 4 (m - 1) |w| / (B m)) / m."""
        return (seconds + 4 * (replicas - 1) * weight_bytes / (bytes_per_s * replicas)) / replicas

    def transfer_s(self, num_bytes: float, replicas: int, bytes_per_s: float) -> float:
        """Return 2 a / (B m) by the compression."""
        return 2 * num_bytes / (bytes_per_s * replicas) / self.compression if self.compression else 0.0


@dataclass(frozen=True, slots=True)
class AsyncPipelineObjective:
    """As our own stages without a flush spend their time: a replica computes, then adds its gradients up.

    T(i, j, m) = (A(i, j) + 2 (m - 1) / m |w| / B) / m, and 2 a / (B m) for what crosses a cut, on both sides of a
    stage: its replicas take turns with what they send.
    """

    splits_first_all_reduce: bool = False
    sends_activations: bool = True

    def stage_s(
        self, seconds: NDArray[np.float64], weight_bytes: NDArray[np.float64], replicas: int, bytes_per_s: float
    ) -> NDArray[np.float64]:
        """Return (computing + 2 (m - 1) / m |w| / B) / m."""
        return (seconds + 2 * (replicas - 1) / replicas * weight_bytes / bytes_per_s) / replicas

    def transfer_s(self, num_bytes: float, replicas: int, bytes_per_s: float) -> float:
        """Return 2 a / (B m)."""
        return 2 * num_bytes / (bytes_per_s * replicas)


@dataclass(frozen=True, slots=True)
class WithoutReplicas:
    """Of another objective only stages without replicas.

    Args:
        objective: how their seconds are counted.
    """

    objective: StageObjective

    @property
    def splits_first_all_reduce(self) -> bool:
        """As the objective."""
        return self.objective.splits_first_all_reduce

    @property
    def sends_activations(self) -> bool:
        """As the objective."""
        return self.objective.sends_activations

    def stage_s(
        self, seconds: NDArray[np.float64], weight_bytes: NDArray[np.float64], replicas: int, bytes_per_s: float
    ) -> NDArray[np.float64]:
        """Return what the objective says of one replica, and that more never end."""
        if replicas > 1:
            return np.full_like(seconds, np.inf)
        return self.objective.stage_s(seconds, weight_bytes, replicas, bytes_per_s)

    def transfer_s(self, num_bytes: float, replicas: int, bytes_per_s: float) -> float:
        """As the objective."""
        return self.objective.transfer_s(num_bytes, replicas, bytes_per_s)


CostTable = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PartitionLevel:
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
class PartitionStage:
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
    stages: tuple[PartitionStage, ...] = ()

    def leaf_stages(self) -> Iterator[tuple[int, int, int]]:
        """Yield start, stop and the replicas on all devices of each stage that one device works on."""
        if not self.stages:
            yield self.start, self.stop, self.replicas
        for stage in self.stages:
            for start, stop, replicas in stage.leaf_stages():
                yield start, stop, replicas * self.replicas


@dataclass(frozen=True, slots=True)
class StagePartition:
    """The stages of a model, and the seconds that the slowest of them takes for each minibatch."""

    stages: tuple[PartitionStage, ...]
    slowest_s: float


def find_partition(cuts: GraphCuts, levels: Sequence[PartitionLevel], objective: StageObjective) -> StagePartition:
    """Return the stages whose slowest one is as fast as can be; all parts of all levels are used.

    Args:
        states: the cuts of the model.
        levels: of the network, the innermost first.
        objective: how long a stage and what it hands on take.

    Cost: for n states and levels of m parts at most n^3 m^2 / 2 comparisons each; n^2 m^2 / 2 at the outermost.
    """
    seconds = np.where(cuts.is_subset, cuts.seconds[None, :] - cuts.seconds[:, None], np.inf)
    weights = cuts.weight_bytes[None, :] - cuts.weight_bytes[:, None]
    solved: list[_LevelSolution] = []
    below = 1
    for at, level in enumerate(levels):
        rows = 1 if at == len(levels) - 1 else cuts.num_cuts
        solved.append(_LevelSolution.solve(_LevelCosts(cuts, objective, level, below, seconds, weights), rows))
        seconds, below = solved[-1].values[level.count - 1], level.count
    last = cuts.num_cuts - 1
    stages = tuple(_build_stages(solved, len(levels) - 1, 0, last, levels[-1].count))
    return StagePartition(stages, float(seconds[0, last]))


@dataclass(frozen=True, slots=True)
class _LevelCosts:
    """What stages take on one level.

    Args:
        states: the cuts.
        objective: how it is counted.
        level: the level.
        below: parts of the level below.
        seconds: what one part takes from state to state; infinite where no stage is.
        weight_bytes: of the weights from state to state.
    """

    states: GraphCuts
    objective: StageObjective
    level: PartitionLevel
    num_inner: int
    seconds: CostTable
    weight_bytes: CostTable

    def single_stage(self, replicas: int, rows: int) -> CostTable:
        """Return the seconds from each of the first states of a stage that no other one stands before."""
        speed = self.level.bytes_per_s * (self.num_inner if self.objective.splits_first_all_reduce else 1)
        return self.objective.stage_s(self.seconds[:rows], self.weight_bytes[:rows], replicas, speed)

    def later_stage(self, replicas: int) -> CostTable:
        """Return the seconds from state to state of a stage behind others, and what it is handed and hands on."""
        speed = self.level.bytes_per_s
        stages = self.objective.stage_s(self.seconds, self.weight_bytes, replicas, speed)
        if not self.objective.transfer_s(1.0, replicas, speed):
            return stages
        sizes = self.states.crossing_bytes.tolist()
        handed = np.array([self.objective.transfer_s(size, replicas, speed) for size in sizes], dtype=np.float64)
        given = handed if self.objective.sends_activations else np.zeros_like(handed)
        return np.maximum(stages, np.maximum(handed[:, None], given[None, :]))


@dataclass(frozen=True, slots=True)
class _LevelSolution:
    """The best of one level: for every number of parts the seconds from state to state.

    Args:
        values: of the slowest stage, with one part, two, and so on.
        alone: of one stage on so many parts, from the same states on.
        behind: of one stage behind others, likewise; these leave at least one part.
    """

    values: tuple[CostTable, ...]
    single_stage: tuple[CostTable, ...]
    later_stage: tuple[CostTable, ...]

    @classmethod
    def solve(cls, costs: _LevelCosts, rows: int) -> _LevelSolution:
        """Return the best for the first so many states as starts."""
        counts = range(1, costs.level.count + 1)
        alone = tuple(costs.single_stage(replicas, rows) for replicas in counts)
        behind = tuple(costs.later_stage(replicas) for replicas in counts[:-1])
        values: list[CostTable] = []
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
        if self.single_stage[count - 1][start, stop] == best:
            return start, count
        for replicas in range(count - 1, 0, -1):
            joined = np.maximum(self.values[count - replicas - 1][start], self.later_stage[replicas - 1][:, stop])
            if joined.min() == best:
                return int(joined.argmin()), replicas
        raise PlanError(f"no partition from state {start} to state {stop} over {count} parts")


def _build_stages(solved: Sequence[_LevelSolution], at: int, start: int, stop: int, count: int) -> list[PartitionStage]:
    """Return the stages of a level from state to state, each with those of the levels below."""
    found: list[PartitionStage] = []
    while stop != start:
        before, replicas = solved[at].last_stage(start, stop, count)
        inner = tuple(_build_stages(solved, at - 1, before, stop, len(solved[at - 1].values))) if at else ()
        found.insert(0, PartitionStage(before, stop, replicas, inner))
        stop, count = before, count - replicas
    return found
