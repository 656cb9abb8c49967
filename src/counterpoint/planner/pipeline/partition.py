"""Partition a model into stages and choose their replicas by dynamic programming over the levels of a network.

The objectives count the seconds of a stage as the PipeDream papers do, as its released optimizer does, and as our own
asynchronous pipelines spend them.

Source:
    Harlap et al., PipeDream (arXiv 1806.03377), flat; Narayanan et al., PipeDream (SOSP 2019), section 3.1, by levels;
    the optimizer that was released with the latter, whose objective differs from both.
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
    """Seconds per minibatch of a stage and of its transfers in the steady state."""

    @property
    def splits_first_all_reduce(self) -> bool:
        """Whether the parts below share the all-reduce of a level's first stage."""
        ...

    @property
    def sends_activations(self) -> bool:
        """Whether a stage also waits for the activations that it sends."""
        ...

    def stage_s(
        self, seconds: NDArray[np.float64], weight_bytes: NDArray[np.float64], replicas: int, bytes_per_s: float
    ) -> NDArray[np.float64]:
        """Return the time of a minibatch and its all-reduce on ``replicas`` replicas; infinity stays infinity."""
        ...

    def transfer_s(self, num_bytes: float, replicas: int, bytes_per_s: float) -> float:
        """Return the time of an activation and its gradient into a stage, proportional to their bytes."""
        ...


@dataclass(frozen=True, slots=True)
class PublishedObjective:
    """As in the papers: the maximum of computing and all-reduce, overlapped with transfers.

    T(i, j, m) = max(A(i, j), 2 (m - 1) / m |w| / B) / m, and 2 a / B for what crosses a cut. A replica sends (m - 1) /
    m of its weights and receives as much, as the text of the paper says; the formula that is printed next to it omits
    the division by m; decision 39 lists the configurations that each of the two gives.
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
    """As in the released optimizer: computing and all-reduce one after the other.

    T(i, j, m) = (A(i, j) + 4 (m - 1) |w| / (B m)) / m, where the parts of the level below share the all-reduce of the
    first stage of a level and of no other one. What crosses a cut takes 2 a / (B m) / ``compression`` on both sides of
    a stage, and nothing without compression.

    Args:
        compression: by how much activations are smaller on the link; None counts no transfer.
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
    """As in our asynchronous pipelines: a replica computes, then all-reduces its gradients.

    T(i, j, m) = (A(i, j) + 2 (m - 1) / m |w| / B) / m, and 2 a / (B m) for what crosses a cut, on both sides of a
    stage, whose replicas alternate in sending.
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
    """Another objective, restricted to stages without replicas.

    Args:
        objective: counts their seconds.
    """

    objective: StageObjective

    @property
    def splits_first_all_reduce(self) -> bool:
        """The value of the objective."""
        return self.objective.splits_first_all_reduce

    @property
    def sends_activations(self) -> bool:
        """The value of the objective."""
        return self.objective.sends_activations

    def stage_s(
        self, seconds: NDArray[np.float64], weight_bytes: NDArray[np.float64], replicas: int, bytes_per_s: float
    ) -> NDArray[np.float64]:
        """Return the time of the objective for one replica, and infinity for more."""
        if replicas > 1:
            return np.full_like(seconds, np.inf)
        return self.objective.stage_s(seconds, weight_bytes, replicas, bytes_per_s)

    def transfer_s(self, num_bytes: float, replicas: int, bytes_per_s: float) -> float:
        """Return the time of the objective."""
        return self.objective.transfer_s(num_bytes, replicas, bytes_per_s)


CostTable = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PartitionLevel:
    """One level of a network: several parts of the level below, connected by links of one speed.

    Args:
        count: parts; devices at the innermost level.
        bytes_per_s: of the link between two of them.
    """

    count: int
    bytes_per_s: float

    def __post_init__(self) -> None:
        if self.count < 1 or not self.bytes_per_s > 0:
            raise PlanError(f"a level has at least 1 part and links of more than 0 bytes/s, not {self}")


@dataclass(frozen=True, slots=True)
class PartitionStage:
    """A run of layers: those in the cut ``stop`` and not in the cut ``start``.

    Args:
        start: index of a cut that is a subset of ``stop``.
        stop: index of the cut after the stage.
        replicas: parts of the level that run it.
        stages: stages of the level below, in which every part runs it; none at the innermost level.
    """

    start: int
    stop: int
    replicas: int
    stages: tuple[PartitionStage, ...] = ()

    def leaf_stages(self) -> Iterator[tuple[int, int, int]]:
        """Yield start, stop and the replicas on all devices of each stage that one device runs."""
        if not self.stages:
            yield self.start, self.stop, self.replicas
        for stage in self.stages:
            for start, stop, replicas in stage.leaf_stages():
                yield start, stop, replicas * self.replicas


@dataclass(frozen=True, slots=True)
class StagePartition:
    """The stages of a model, and the seconds per minibatch of the slowest one."""

    stages: tuple[PartitionStage, ...]
    slowest_s: float


def find_partition(cuts: GraphCuts, levels: Sequence[PartitionLevel], objective: StageObjective) -> StagePartition:
    """Return the stages whose slowest one is fastest; all parts of all levels are used.

    Args:
        cuts: of the model.
        levels: of the network, the innermost first.
        objective: counts the seconds of stages and transfers.

    Cost:
        For n cuts and levels of m parts at most n^3 m^2 / 2 comparisons each; n^2 m^2 / 2 at the outermost.
    """
    seconds = np.where(cuts.is_subset, cuts.seconds[None, :] - cuts.seconds[:, None], np.inf)
    weight_bytes = cuts.weight_bytes[None, :] - cuts.weight_bytes[:, None]
    solved: list[_LevelSolution] = []
    num_inner = 1
    for level_index, level in enumerate(levels):
        num_starts = 1 if level_index == len(levels) - 1 else cuts.num_cuts
        solved.append(
            _LevelSolution.solve(_LevelCosts(cuts, objective, level, num_inner, seconds, weight_bytes), num_starts)
        )
        seconds, num_inner = solved[-1].values[level.count - 1], level.count
    last = cuts.num_cuts - 1
    stages = tuple(_build_stages(solved, len(levels) - 1, 0, last, levels[-1].count))
    return StagePartition(stages, float(seconds[0, last]))


@dataclass(frozen=True, slots=True)
class _LevelCosts:
    """Times of stages on one level.

    Args:
        cuts: the cuts.
        objective: counts the seconds.
        level: the level.
        num_inner: parts of the level below.
        seconds: of one part from cut to cut; infinite where no stage is possible.
        weight_bytes: of the weights from cut to cut.
    """

    cuts: GraphCuts
    objective: StageObjective
    level: PartitionLevel
    num_inner: int
    seconds: CostTable
    weight_bytes: CostTable

    def single_stage(self, replicas: int, rows: int) -> CostTable:
        """Return the seconds of a stage that follows no other one, from each of the first cuts."""
        speed = self.level.bytes_per_s * (self.num_inner if self.objective.splits_first_all_reduce else 1)
        return self.objective.stage_s(self.seconds[:rows], self.weight_bytes[:rows], replicas, speed)

    def later_stage(self, replicas: int) -> CostTable:
        """Return the seconds from cut to cut of a stage that follows others, including its transfers."""
        speed = self.level.bytes_per_s
        stages = self.objective.stage_s(self.seconds, self.weight_bytes, replicas, speed)
        if not self.objective.transfer_s(1.0, replicas, speed):
            return stages
        sizes = self.cuts.crossing_bytes.tolist()
        receive_s = np.array([self.objective.transfer_s(size, replicas, speed) for size in sizes], dtype=np.float64)
        send_s = receive_s if self.objective.sends_activations else np.zeros_like(receive_s)
        return np.maximum(stages, np.maximum(receive_s[:, None], send_s[None, :]))


@dataclass(frozen=True, slots=True)
class _LevelSolution:
    """The optimum of one level: for every number of parts the seconds from cut to cut.

    Args:
        values: of the slowest stage, with one part, two, and so on.
        single_stage: of one stage on a number of parts, from the same cuts.
        later_stage: of one stage that follows others, likewise; these leave at least one part.
    """

    values: tuple[CostTable, ...]
    single_stage: tuple[CostTable, ...]
    later_stage: tuple[CostTable, ...]

    @classmethod
    def solve(cls, costs: _LevelCosts, rows: int) -> _LevelSolution:
        """Return the optimum for the first cuts as starts."""
        counts = range(1, costs.level.count + 1)
        single = tuple(costs.single_stage(replicas, rows) for replicas in counts)
        later = tuple(costs.later_stage(replicas) for replicas in counts[:-1])
        values: list[CostTable] = []
        for count in counts:
            best = single[count - 1].copy()
            for replicas, start in product(range(1, count), range(rows)):
                combined = np.maximum(values[count - replicas - 1][start][:, None], later[replicas - 1])
                np.minimum(best[start], combined.min(axis=0), out=best[start])
            values.append(best)
        return cls(tuple(values), single, later)

    def last_stage(self, start: int, stop: int, count: int) -> tuple[int, int]:
        """Return the start of the optimum's last stage and its replicas; one stage if that is as good."""
        best = self.values[count - 1][start, stop]
        if self.single_stage[count - 1][start, stop] == best:
            return start, count
        for replicas in range(count - 1, 0, -1):
            combined = np.maximum(self.values[count - replicas - 1][start], self.later_stage[replicas - 1][:, stop])
            if combined.min() == best:
                return int(combined.argmin()), replicas
        raise PlanError(f"no partition from cut {start} to cut {stop} over {count} parts")


def _build_stages(solved: Sequence[_LevelSolution], at: int, start: int, stop: int, count: int) -> list[PartitionStage]:
    """Return the stages of a level from cut to cut, each with those of the levels below."""
    stages: list[PartitionStage] = []
    while stop != start:
        previous, replicas = solved[at].last_stage(start, stop, count)
        inner_stages = tuple(_build_stages(solved, at - 1, previous, stop, len(solved[at - 1].values))) if at else ()
        stages.insert(0, PartitionStage(previous, stop, replicas, inner_stages))
        stop, count = previous, count - replicas
    return stages
