"""Stages of a pipeline as cuts of a model and replicas, what is wanted of them, and how they may change a little.

About how long a microbatch takes in a pipeline: formulas that tell at once which pipelines are worth simulating.
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
from counterpoint.strategies.pipeline.schedules.pipedream import ASYNC_SCHEDULES, StageTimeline
from counterpoint.strategies.pipeline.schedules.schedule import StageReplica
from counterpoint.world.cluster import Cluster, Link

MAX_MICROBATCHES = 64
"""Replicas that share no fewer microbatches than so many have programs that nobody wants to read."""
MAX_SHIFT = 8
"""A cut is moved past so many states at most."""


@dataclass(frozen=True, slots=True, order=True)
class StageLayout:
    """Stages in the order of the model.

    Args:
        cuts: states, the empty one first and the whole one last; a stage is what one holds and the one before does not.
        replicas: of each stage, on ranks one behind the other.
    """

    cuts: tuple[int, ...]
    replicas: tuple[int, ...]

    @staticmethod
    def from_partition(found: StagePartition) -> StageLayout:
        """Return the stages of a partition, those of inner levels as stages of their own with all their replicas."""
        stages = [each for stage in found.stages for each in stage.leaf_stages()]
        return StageLayout((0, *(stop for _, stop, _ in stages)), tuple(count for *_, count in stages))

    @property
    def num_stages(self) -> int:
        """How many there are."""
        return len(self.replicas)

    @property
    def stage_cuts(self) -> tuple[tuple[int, int], ...]:
        """For each stage the states before and behind it."""
        return tuple(pairwise(self.cuts))

    @property
    def stage_ranks(self) -> tuple[range, ...]:
        """The ranks of each stage."""
        return tuple(range(start, stop) for start, stop in pairwise(accumulate(self.replicas, initial=0)))

    def layers_per_stage(self, cuts: GraphCuts) -> tuple[int, ...]:
        """Return how many layers each stage has."""
        return tuple((cuts.layer_sets[stop] & ~cuts.layer_sets[start]).bit_count() for start, stop in self.stage_cuts)


@dataclass(frozen=True, slots=True)
class PipelineQuery:
    """A pipeline that is looked for.

    Args:
        states: where the model can be cut, with figures of one microbatch.
        cluster: where it runs.
        num_ranks: how many ranks it has; all of them get work.
        order: of the pipeline.
        num_microbatches: of a step, which the replicas of every stage can share; None for as few as they can. Under
            pipedream it is always the fewest that are simulated: one comes after the other without end.
        least_stages: how many stages it has at least.
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
        """Return how many microbatches a step has."""
        return self.pipeline(layout).usable_microbatches(self.num_microbatches or 1)

    def is_allowed(self, layout: StageLayout) -> bool:
        """Return whether there are enough stages, and their replicas can share the microbatches."""
        shared, wanted = lcm(*layout.replicas), self.num_microbatches
        if layout.num_stages < self.min_stages:
            return False
        if shared > MAX_MICROBATCHES or (wanted is not None and wanted % shared):
            return False
        return wanted is None or self.step_microbatches(layout) <= wanted

    def neighbours(self, layout: StageLayout) -> Iterator[StageLayout]:
        """Yield all allowed stagings that differ by one cut or in the replicas of two stages, each once."""
        changes = (self._move_cut, self._merge_stages, self._split_stage, self._move_replicas)
        found = dict.fromkeys(one for change in changes for one in change(layout))
        yield from (one for one in found if one != layout and self.is_allowed(one))

    def _move_cut(self, layout: StageLayout) -> Iterator[StageLayout]:
        """Move a cut."""
        seconds = self.cuts.seconds
        for at, (before, here, behind) in enumerate(zip(layout.cuts, layout.cuts[1:], layout.cuts[2:], strict=False)):
            between = np.flatnonzero(self.cuts.is_subset[before] & self.cuts.is_subset[:, behind])
            ordered = between[np.lexsort((between, seconds[between]))]
            place = int(np.flatnonzero(ordered == here)[0])
            for to in ordered[max(0, place - MAX_SHIFT) : place + MAX_SHIFT + 1]:
                yield StageLayout((*layout.cuts[: at + 1], int(to), *layout.cuts[at + 2 :]), layout.replicas)

    def _merge_stages(self, layout: StageLayout) -> Iterator[StageLayout]:
        """Make one stage of two neighbours."""
        cuts, replicas = layout.cuts, layout.replicas
        for at in range(layout.num_stages - 1):
            both = replicas[at] + replicas[at + 1]
            yield StageLayout((*cuts[: at + 1], *cuts[at + 2 :]), (*replicas[:at], both, *replicas[at + 2 :]))

    def _split_stage(self, layout: StageLayout) -> Iterator[StageLayout]:
        """Make two stages of one with replicas, each with work in proportion to its own."""
        cuts, replicas, seconds = layout.cuts, layout.replicas, self.cuts.seconds
        for at, (start, stop) in enumerate(layout.stage_cuts):
            between = np.flatnonzero(self.cuts.is_subset[start] & self.cuts.is_subset[:, stop])
            for first in range(1, replicas[at]) if between.size else ():
                ideal = seconds[start] + (seconds[stop] - seconds[start]) * first / replicas[at]
                cut = int(between[np.argmin(np.abs(seconds[between] - ideal))])
                shares = (first, replicas[at] - first)
                yield StageLayout(
                    (*cuts[: at + 1], cut, *cuts[at + 1 :]), (*replicas[:at], *shares, *replicas[at + 1 :])
                )

    def _move_replicas(self, layout: StageLayout) -> Iterator[StageLayout]:
        """Deal the replicas of two stages otherwise between them."""
        for one, other in combinations(range(layout.num_stages), 2):
            both = layout.replicas[one] + layout.replicas[other]
            for count in range(1, both):
                replicas = list(layout.replicas)
                replicas[one], replicas[other] = count, both - count
                yield StageLayout(layout.cuts, tuple(replicas))


GRADIENT_AND_STATES = 3
"""How many values as large as its weights a rank holds beside them: a gradient, and the two states of Adam."""


class LayoutEstimate(NamedTuple):
    """What a rank lacks of memory, and the seconds of a microbatch in the long run; the less, the better.

    Args:
        missing_bytes: by how much the fullest rank holds more than it can.
        seconds: that each microbatch adds to a step.
    """

    missing_bytes: float
    seconds: float


class _StageCost(NamedTuple):
    """What one replica of a stage spends on a microbatch, and on an update.

    Args:
        num_replicas: of the stage.
        forward_s: seconds.
        backward_s: seconds.
        sum_s: of its sums of gradients.
        update_s: of its updates.
        out_s: of what it hands on.
        back_s: of the gradients that it sends back.
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
    """Estimates of stagings.

    Args:
        wanted: the pipeline that is looked for.
    """

    query: PipelineQuery
    cache: dict[StageLayout, LayoutEstimate] = field(default_factory=dict)

    def estimate(self, layout: StageLayout) -> LayoutEstimate:
        """Return the estimate of a staging."""
        if layout not in self.cache:
            missing = max(0.0, self.peak_memory_bytes(layout) - self.query.cluster.device.memory_bytes)
            stages, ways = self._stage_costs(layout), [under_way for _, under_way in self._held_per_stage(layout)]
            if self.query.schedule in ASYNC_SCHEDULES:
                seconds = _asynchronous_s(stages, ways)
            else:
                seconds = _synchronous_s(stages, ways, self.query.step_microbatches(layout))
            self.cache[layout] = LayoutEstimate(missing, seconds)
        return self.cache[layout]

    def lower_bound_s(self, layout: StageLayout) -> float:
        """Return what no order is faster than: the work of each stage by its replicas."""
        return max((one.forward_s + one.backward_s) / one.num_replicas for one in self._stage_costs(layout))

    def peak_memory_bytes(self, layout: StageLayout) -> float:
        """Return what the fullest rank holds: weights in all their versions, and activations in flight."""
        return max(
            (versions + GRADIENT_AND_STATES) * (self._weight_bytes[stop] - self._weight_bytes[start])
            + under_way * (self._activation_bytes[stop] - self._activation_bytes[start])
            for (start, stop), (versions, under_way) in zip(
                layout.stage_cuts, self._held_per_stage(layout), strict=True
            )
        )

    def _held_per_stage(self, layout: StageLayout) -> Iterator[tuple[int, int]]:
        """Yield for each stage how many versions of weights a replica has, and activations of how many microbatches."""
        pipeline, micros = self.query.pipeline(layout), self.query.step_microbatches(layout)
        rule = ASYNC_SCHEDULES.get(self.query.schedule)
        for stage, count in enumerate(layout.replicas):
            if rule is not None:
                course = StageTimeline(stage, layout.replicas, micros, rule)
                yield 1 + course.staleness, course.warmup + 1
            else:
                yield (
                    1,
                    pipeline.schedule_impl.in_flight(
                        StageReplica(stage, layout.replicas, tuple(range(micros // count)))
                    ),
                )

    def _stage_costs(self, layout: StageLayout) -> list[_StageCost]:
        cluster, (out_s, back_s) = self.query.cluster, self._send_times(layout)
        found = []
        for at, ((start, stop), ranks) in enumerate(zip(layout.stage_cuts, layout.stage_ranks, strict=True)):
            weights = self._weight_bytes[stop] - self._weight_bytes[start]
            slowest = min(map(cluster.speed, ranks)) * self._contention
            forward_s = self._forward_s[stop] - self._forward_s[start]
            seconds = self._compute_s[stop] - self._compute_s[start]
            found.append(
                _StageCost(
                    len(ranks),
                    forward_s / slowest,
                    (seconds - forward_s) / slowest,
                    self._all_reduce_s(weights, ranks),
                    update_s(weights, cluster.device) / slowest,
                    out_s[at],
                    back_s[at],
                )
            )
        return found

    def _all_reduce_s(self, weights: float, ranks: range) -> float:
        """Return the seconds of the sum of a stage's gradients, if nobody is in its way."""
        if not weights or len(ranks) == 1:
            return 0.0
        network = NetworkModel(self.query.cluster, lambda value, code="": round(weights))
        return network.link_load(Collective("all_reduce", grad((0,)), tuple(ranks)), Fraction(1), ranks[0]).seconds

    def _send_times(self, layout: StageLayout) -> tuple[list[float], list[float]]:
        """Return for each stage the seconds of what it sends forward and backward: each value to each stage once."""
        ranks, held = layout.stage_ranks, self.query.cuts.layer_sets
        own = [held[stop] & ~held[start] for start, stop in layout.stage_cuts]
        out_s, back_s = [0.0] * len(own), [0.0] * len(own)
        for maker, span in enumerate(layout.stage_cuts):
            for size, readers in self._outgoing_values(span):
                for reader in range(maker + 1, len(own)):
                    if readers & own[reader]:
                        seconds = self._slowest_link(ranks[maker], ranks[reader]).seconds(size)
                        out_s[maker] += seconds
                        back_s[reader] += seconds
        return out_s, back_s

    def _outgoing_values(self, span: tuple[int, int]) -> list[tuple[float, int]]:
        """Return the bytes and the readers of each value that a stage makes for later ones."""
        if span not in self._outgoing_cache:
            start, stop = (self.query.cuts.layer_sets[state] for state in span)
            layers = self.query.cuts.graph.nodes
            self._outgoing_cache[span] = [
                (layers[bit].activation_bytes, readers)
                for bit, readers in self.query.cuts.consumers.items()
                if (stop & ~start) >> bit & 1 and readers & ~stop
            ]
        return self._outgoing_cache[span]

    @cached_property
    def _outgoing_cache(self) -> dict[tuple[int, int], list[tuple[float, int]]]:
        return {}

    def _slowest_link(self, one: range, other: range) -> Link:
        """Return the slowest link between ranks of two stages, or of one; ranks of a stage stand in a row."""
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


def _asynchronous_s(stages: list[_StageCost], under_way: list[int]) -> float:
    """Return the longest of what repeats with every microbatch, shared by replicas.

    That is what a replica computes, with its sums and updates; what its link carries; and, because a stage takes up no
    more microbatches than its warm-up, the way of one from there to the end and back by as many as are under way.
    Replicas that add up together wait for the last of them, whose microbatch has come through fewer replicas.
    """
    longest = trip_s = 0.0
    for at in reversed(range(len(stages))):
        one = stages[at]
        trip_s += one.forward_s + one.backward_s + one.send_s
        if at + 1 < len(stages):
            fewer, more = sorted((one, stages[at + 1]), key=lambda stage: stage.num_replicas)
            if more.all_reduce_s:
                trip_s += (more.num_replicas / fewer.num_replicas - 1) * (fewer.forward_s + fewer.backward_s)
        longest = max(
            longest,
            (one.forward_s + one.backward_s + one.all_reduce_s + one.update_s) / one.num_replicas,
            (one.send_s + one.send_back_s + one.all_reduce_s) / one.num_replicas,
            trip_s / (under_way[at] * one.num_replicas),
        )
        trip_s += one.send_back_s
    return longest


def _synchronous_s(stages: list[_StageCost], under_way: list[int], num_microbatches: int) -> float:
    """Return the step of a flush by its microbatches: the longest way in through a stage, its work, and the way out."""
    trips_s = [0.0]
    for one in reversed(stages):
        trips_s.insert(0, trips_s[0] + one.forward_s + one.backward_s + one.send_s + one.send_back_s)
    step_s = way_in_s = 0.0
    for at, one in enumerate(stages):
        own = num_microbatches // one.num_replicas
        trip_s = (trips_s[at] - one.send_back_s) / under_way[at]
        done_s = way_in_s + own * max(one.forward_s + one.backward_s, one.send_s + one.send_back_s, trip_s)
        step_s = max(step_s, done_s + one.all_reduce_s)
        for earlier, later in zip(reversed(stages[:at]), reversed(stages[1 : at + 1]), strict=True):
            done_s += later.send_back_s + earlier.backward_s
            step_s = max(step_s, done_s + earlier.all_reduce_s)
        way_in_s += one.forward_s + one.send_s
    return (step_s + max(one.update_s for one in stages)) / num_microbatches
