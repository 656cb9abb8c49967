"""Layouts of pipeline stages: cuts and replicas, their neighbours in a local search, and estimates of their speed.

The estimates are closed formulas that select the layouts worth simulating.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, combinations, pairwise
from math import lcm
from typing import NamedTuple

import numpy as np

from counterpoint.planner.pipeline.layer_graph import GraphCuts
from counterpoint.planner.pipeline.partition import StagePartition
from counterpoint.program.instruction import Collective, grad
from counterpoint.simulator.cost_model import update_s
from counterpoint.simulator.network import NetworkModel
from counterpoint.strategies.pipeline.pipeline import Pipeline
from counterpoint.strategies.pipeline.schedules.pipedream import StageTimeline
from counterpoint.strategies.pipeline.schedules.registry import ASYNC_SCHEDULES
from counterpoint.strategies.pipeline.schedules.schedule import StageReplica
from counterpoint.world.cluster import Cluster, Link

MAX_MICROBATCHES = 64
"""Limit of the microbatches that replicas share: programs with more are too long to read."""
MAX_SHIFT = 8
"""Number of cuts past which one is moved at most."""


@dataclass(frozen=True, slots=True, order=True)
class StageLayout:
    """Stages in the order of the model.

    Args:
        cuts: indices of cuts, the empty one first and the whole graph last; a stage lies between adjacent ones.
        replicas: of each stage, on consecutive ranks.
    """

    cuts: tuple[int, ...]
    replicas: tuple[int, ...]

    @staticmethod
    def from_partition(partition: StagePartition) -> StageLayout:
        """Return the stages of a partition, those of inner levels as stages with all their replicas."""
        stages = [leaf for stage in partition.stages for leaf in stage.leaf_stages()]
        return StageLayout((0, *(stop for _, stop, _ in stages)), tuple(count for *_, count in stages))

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.replicas)

    @property
    def stage_cuts(self) -> tuple[tuple[int, int], ...]:
        """For each stage the cuts before and after it."""
        return tuple(pairwise(self.cuts))

    @property
    def stage_ranks(self) -> tuple[range, ...]:
        """The ranks of each stage."""
        return tuple(range(start, stop) for start, stop in pairwise(accumulate(self.replicas, initial=0)))

    def layers_per_stage(self, cuts: GraphCuts) -> tuple[int, ...]:
        """Return the number of layers of each stage."""
        return tuple((cuts.layer_sets[stop] & ~cuts.layer_sets[start]).bit_count() for start, stop in self.stage_cuts)


@dataclass(frozen=True, slots=True)
class PipelineQuery:
    """A pipeline to be found.

    Args:
        cuts: where the model can be cut, with times of one microbatch.
        cluster: where it runs.
        num_ranks: all of them get work.
        schedule: of the pipeline.
        num_microbatches: of a step, which the replicas of every stage can share; None for as few as they can. Of
            pipedream always the fewest are simulated, since they follow each other without end.
        min_stages: smallest number of stages.
    """

    cuts: GraphCuts
    cluster: Cluster
    num_ranks: int
    schedule: str
    num_microbatches: int | None = None
    min_stages: int = 1

    def pipeline(self, layout: StageLayout, balance: tuple[int, ...] = ()) -> Pipeline:
        """Return the strategy."""
        replicas = layout.replicas if max(layout.replicas) > 1 else ()
        return Pipeline(layout.num_stages, self.schedule, replicas, balance)

    def step_microbatches(self, layout: StageLayout) -> int:
        """Return the number of microbatches of a step."""
        return self.pipeline(layout).usable_microbatches(self.num_microbatches or 1)

    def is_allowed(self, layout: StageLayout) -> bool:
        """Return whether there are enough stages, and their replicas can share the microbatches."""
        common_multiple, num_microbatches = lcm(*layout.replicas), self.num_microbatches
        if layout.num_stages < self.min_stages:
            return False
        if common_multiple > MAX_MICROBATCHES or (num_microbatches is not None and num_microbatches % common_multiple):
            return False
        return num_microbatches is None or self.step_microbatches(layout) <= num_microbatches

    def neighbours(self, layout: StageLayout) -> Iterator[StageLayout]:
        """Yield all allowed layouts that differ by one cut or in the replicas of two stages, without duplicates."""
        changes = (self._move_cut, self._merge_stages, self._split_stage, self._move_replicas)
        neighbours = dict.fromkeys(neighbour for change in changes for neighbour in change(layout))
        yield from (neighbour for neighbour in neighbours if neighbour != layout and self.is_allowed(neighbour))

    def _move_cut(self, layout: StageLayout) -> Iterator[StageLayout]:
        """Yield layouts with one cut moved."""
        seconds = self.cuts.seconds
        for index, (previous, present, following) in enumerate(
            zip(layout.cuts, layout.cuts[1:], layout.cuts[2:], strict=False)
        ):
            between = np.flatnonzero(self.cuts.is_subset[previous] & self.cuts.is_subset[:, following])
            ordered = between[np.lexsort((between, seconds[between]))]
            position = int(np.flatnonzero(ordered == present)[0])
            for cut in ordered[max(0, position - MAX_SHIFT) : position + MAX_SHIFT + 1]:
                yield StageLayout((*layout.cuts[: index + 1], int(cut), *layout.cuts[index + 2 :]), layout.replicas)

    def _merge_stages(self, layout: StageLayout) -> Iterator[StageLayout]:
        """Yield layouts with two adjacent stages merged."""
        cuts, replicas = layout.cuts, layout.replicas
        for index in range(layout.num_stages - 1):
            both = replicas[index] + replicas[index + 1]
            yield StageLayout(
                (*cuts[: index + 1], *cuts[index + 2 :]), (*replicas[:index], both, *replicas[index + 2 :])
            )

    def _split_stage(self, layout: StageLayout) -> Iterator[StageLayout]:
        """Yield layouts with a replicated stage split in proportion to its replicas."""
        cuts, replicas, seconds = layout.cuts, layout.replicas, self.cuts.seconds
        for index, (start, stop) in enumerate(layout.stage_cuts):
            between = np.flatnonzero(self.cuts.is_subset[start] & self.cuts.is_subset[:, stop])
            for first in range(1, replicas[index]) if between.size else ():
                ideal = seconds[start] + (seconds[stop] - seconds[start]) * first / replicas[index]
                cut = int(between[np.argmin(np.abs(seconds[between] - ideal))])
                parts = (first, replicas[index] - first)
                yield StageLayout(
                    (*cuts[: index + 1], cut, *cuts[index + 1 :]), (*replicas[:index], *parts, *replicas[index + 1 :])
                )

    def _move_replicas(self, layout: StageLayout) -> Iterator[StageLayout]:
        """Yield layouts with the replicas of two stages redistributed."""
        for first, second in combinations(range(layout.num_stages), 2):
            both = layout.replicas[first] + layout.replicas[second]
            for count in range(1, both):
                replicas = list(layout.replicas)
                replicas[first], replicas[second] = count, both - count
                yield StageLayout(layout.cuts, tuple(replicas))


GRADIENT_AND_STATES = 3
"""Values per parameter in addition to the weight: a gradient, and the two states of Adam."""


class LayoutEstimate(NamedTuple):
    """Estimate of a layout; smaller is better.

    Args:
        missing_bytes: by how much the rank that needs most exceeds its memory.
        seconds: that each microbatch adds to a step in the steady state.
    """

    missing_bytes: float
    seconds: float


class _StageCost(NamedTuple):
    """Seconds of one replica of a stage for a microbatch, and for an update.

    Args:
        num_replicas: of the stage.
        forward_s: of the forward.
        backward_s: of the backward.
        all_reduce_s: of the all-reduce of its gradients.
        update_s: of its updates.
        send_s: of the activations that it sends.
        send_back_s: of the gradients that it sends back.
    """

    num_replicas: int
    forward_s: float
    backward_s: float
    all_reduce_s: float
    update_s: float
    send_s: float
    send_back_s: float


@dataclass(frozen=True)
class LayoutEstimator:
    """Estimates of layouts.

    Args:
        query: the pipeline to be found.
    """

    query: PipelineQuery
    cache: dict[StageLayout, LayoutEstimate] = field(default_factory=dict)

    def estimate(self, layout: StageLayout) -> LayoutEstimate:
        """Return the estimate of a layout."""
        if layout not in self.cache:
            missing_bytes = max(0.0, self.peak_memory_bytes(layout) - self.query.cluster.device.usable_bytes)
            stages, in_flight = (
                self._stage_costs(layout),
                [num_in_flight for _, num_in_flight in self._held_per_stage(layout)],
            )
            if self.query.schedule in ASYNC_SCHEDULES:
                seconds = _asynchronous_s(stages, in_flight)
            else:
                seconds = _synchronous_s(stages, in_flight, self.query.step_microbatches(layout))
            self.cache[layout] = LayoutEstimate(missing_bytes, seconds)
        return self.cache[layout]

    def lower_bound_s(self, layout: StageLayout) -> float:
        """Return a lower bound for every schedule: the work of each stage divided by its replicas."""
        return max((stage.forward_s + stage.backward_s) / stage.num_replicas for stage in self._stage_costs(layout))

    def peak_memory_bytes(self, layout: StageLayout) -> float:
        """Return the memory of the rank that needs most: weights in all versions, and activations in flight."""
        return max(
            (versions + GRADIENT_AND_STATES) * (self._weight_bytes[stop] - self._weight_bytes[start])
            + in_flight * (self._activation_bytes[stop] - self._activation_bytes[start])
            for (start, stop), (versions, in_flight) in zip(
                layout.stage_cuts, self._held_per_stage(layout), strict=True
            )
        )

    def _held_per_stage(self, layout: StageLayout) -> Iterator[tuple[int, int]]:
        """Yield for each stage the weight versions of a replica, and the microbatches in flight."""
        pipeline, num_microbatches = self.query.pipeline(layout), self.query.step_microbatches(layout)
        policy = ASYNC_SCHEDULES.get(self.query.schedule)
        for stage, count in enumerate(layout.replicas):
            if policy is not None:
                timeline = StageTimeline(stage, layout.replicas, num_microbatches, policy)
                yield 1 + timeline.staleness, timeline.warmup + 1
            else:
                yield (
                    1,
                    pipeline.schedule_impl.in_flight(
                        StageReplica(stage, layout.replicas, tuple(range(num_microbatches // count)))
                    ),
                )

    def _stage_costs(self, layout: StageLayout) -> list[_StageCost]:
        cluster, (send_s, send_back_s) = self.query.cluster, self._send_times(layout)
        costs = []
        for index, ((start, stop), ranks) in enumerate(zip(layout.stage_cuts, layout.stage_ranks, strict=True)):
            weight_bytes = self._weight_bytes[stop] - self._weight_bytes[start]
            speed = min(map(cluster.speed, ranks)) * self._contention
            forward_s = self._forward_s[stop] - self._forward_s[start]
            seconds = self._compute_s[stop] - self._compute_s[start]
            costs.append(
                _StageCost(
                    len(ranks),
                    forward_s / speed,
                    (seconds - forward_s) / speed,
                    self._all_reduce_s(weight_bytes, ranks),
                    update_s(weight_bytes, cluster.device) / speed,
                    send_s[index],
                    send_back_s[index],
                )
            )
        return costs

    def _all_reduce_s(self, weight_bytes: float, ranks: range) -> float:
        """Return the seconds of the all-reduce of a stage's gradients without contention."""
        if not weight_bytes or len(ranks) == 1:
            return 0.0
        network = NetworkModel(self.query.cluster, lambda tensor, codec="": round(weight_bytes))
        return network.link_load(Collective("all_reduce", grad((0,)), tuple(ranks)), Fraction(1), ranks[0]).seconds

    def _send_times(self, layout: StageLayout) -> tuple[list[float], list[float]]:
        """Return for each stage the seconds of what it sends forward and backward, each value once per stage."""
        ranks, layer_sets = layout.stage_ranks, self.query.cuts.layer_sets
        stage_layers = [layer_sets[stop] & ~layer_sets[start] for start, stop in layout.stage_cuts]
        send_s, send_back_s = [0.0] * len(stage_layers), [0.0] * len(stage_layers)
        for producer, stage in enumerate(layout.stage_cuts):
            for num_bytes, consumers in self._outgoing_values(stage):
                for consumer in range(producer + 1, len(stage_layers)):
                    if consumers & stage_layers[consumer]:
                        seconds = self._slowest_link(ranks[producer], ranks[consumer]).seconds(num_bytes)
                        send_s[producer] += seconds
                        send_back_s[consumer] += seconds
        return send_s, send_back_s

    def _outgoing_values(self, stage: tuple[int, int]) -> list[tuple[float, int]]:
        """Return the bytes and the readers of each value that a stage computes for later ones."""
        if stage not in self._outgoing_cache:
            start, stop = (self.query.cuts.layer_sets[cut] for cut in stage)
            layers = self.query.cuts.graph.nodes
            self._outgoing_cache[stage] = [
                (layers[bit].activation_bytes, readers)
                for bit, readers in self.query.cuts.consumers.items()
                if (stop & ~start) >> bit & 1 and readers & ~stop
            ]
        return self._outgoing_cache[stage]

    @cached_property
    def _outgoing_cache(self) -> dict[tuple[int, int], list[tuple[float, int]]]:
        return {}

    def _slowest_link(self, one: range, other: range) -> Link:
        """Return the slowest link between ranks of two stages, or of one; ranks of a stage are consecutive."""
        ends = min(one[0], other[0]), max(one[-1], other[-1])
        if ends not in self._links:
            self._links[ends] = self.query.cluster.link_among(ends)
        return self._links[ends]

    @cached_property
    def _links(self) -> dict[tuple[int, int], Link]:
        return {}

    @cached_property
    def _contention(self) -> float:
        levels = self.query.cluster.levels
        return self.query.cluster.contended_compute_fraction(levels[0].count if levels else self.query.num_ranks)

    @cached_property
    def _compute_s(self) -> list[float]:
        return list(map(float, self.query.cuts.seconds))

    @cached_property
    def _forward_s(self) -> list[float]:
        return list(map(float, self.query.cuts.forward_s))

    @cached_property
    def _weight_bytes(self) -> list[float]:
        return list(map(float, self.query.cuts.weight_bytes))

    @cached_property
    def _activation_bytes(self) -> list[float]:
        return list(map(float, self.query.cuts.activation_bytes))


def _asynchronous_s(stages: list[_StageCost], in_flight: list[int]) -> float:
    """Return the longest time that recurs with every microbatch, divided by the replicas that share it.

    That is what a replica computes, with its reductions and updates; what its link carries; and, because a stage
    accepts no more microbatches than its warm-up, the round trip of one microbatch to the last stage and back, divided
    by those in flight. Replicas that all-reduce together wait for the last of them, whose microbatch has passed fewer
    replicas.
    """
    longest = trip_s = 0.0
    for index in reversed(range(len(stages))):
        stage = stages[index]
        trip_s += stage.forward_s + stage.backward_s + stage.send_s
        if index + 1 < len(stages):
            fewer, more = sorted((stage, stages[index + 1]), key=lambda neighbour: neighbour.num_replicas)
            if more.all_reduce_s:
                trip_s += (more.num_replicas / fewer.num_replicas - 1) * (fewer.forward_s + fewer.backward_s)
        longest = max(
            longest,
            (stage.forward_s + stage.backward_s + stage.all_reduce_s + stage.update_s) / stage.num_replicas,
            (stage.send_s + stage.send_back_s + stage.all_reduce_s) / stage.num_replicas,
            trip_s / (in_flight[index] * stage.num_replicas),
        )
        trip_s += stage.send_back_s
    return longest


def _synchronous_s(stages: list[_StageCost], in_flight: list[int], num_microbatches: int) -> float:
    """Return the step with a flush per microbatch: the longest sum of the way to a stage, its work and the way back."""
    trips_s = [0.0]
    for stage in reversed(stages):
        trips_s.insert(0, trips_s[0] + stage.forward_s + stage.backward_s + stage.send_s + stage.send_back_s)
    step_s = way_in_s = 0.0
    for index, stage in enumerate(stages):
        num_own = num_microbatches // stage.num_replicas
        trip_s = (trips_s[index] - stage.send_back_s) / in_flight[index]
        done_s = way_in_s + num_own * max(stage.forward_s + stage.backward_s, stage.send_s + stage.send_back_s, trip_s)
        step_s = max(step_s, done_s + stage.all_reduce_s)
        for earlier, later in zip(reversed(stages[:index]), reversed(stages[1 : index + 1]), strict=True):
            done_s += later.send_back_s + earlier.backward_s
            step_s = max(step_s, done_s + earlier.all_reduce_s)
        way_in_s += stage.forward_s + stage.send_s
    return (step_s + max(stage.update_s for stage in stages)) / num_microbatches
