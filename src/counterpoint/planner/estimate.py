"""About how long a microbatch takes in a pipeline: formulas that tell at once which pipelines are worth simulating."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

from counterpoint.planner.staging import Staging, Wanted
from counterpoint.program.instruction import Collective, grad
from counterpoint.simulator.costs import update_s
from counterpoint.simulator.network import Network
from counterpoint.strategies.orders.order import Place
from counterpoint.strategies.orders.pipedream import STREAMS, Course
from counterpoint.world.cluster import Link

GRADIENT_AND_STATES = 3
"""How many values as large as its weights a rank holds beside them: a gradient, and the two states of Adam."""


class Estimate(NamedTuple):
    """What a rank lacks of memory, and the seconds of a microbatch in the long run; the less, the better.

    Args:
        missing_bytes: by how much the fullest rank holds more than it can.
        seconds: that each microbatch adds to a step.
    """

    missing_bytes: float
    seconds: float


class _Stage(NamedTuple):
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
    sum_s: float
    update_s: float
    out_s: float
    back_s: float


@dataclass(frozen=True)
class Estimates:
    """Estimates of stagings.

    Args:
        wanted: the pipeline that is looked for.
    """

    wanted: Wanted
    known: dict[Staging, Estimate] = field(default_factory=dict)

    def of(self, staging: Staging) -> Estimate:
        """Return the estimate of a staging."""
        if staging not in self.known:
            missing = max(0.0, self.held_bytes(staging) - self.wanted.cluster.device.memory_bytes)
            stages, ways = self._stages(staging), [under_way for _, under_way in self._kept_by(staging)]
            if self.wanted.order in STREAMS:
                seconds = _streamed_s(stages, ways)
            else:
                seconds = _flushed_s(stages, ways, self.wanted.micros(staging))
            self.known[staging] = Estimate(missing, seconds)
        return self.known[staging]

    def floor_s(self, staging: Staging) -> float:
        """Return what no order is faster than: the work of each stage by its replicas."""
        return max((one.forward_s + one.backward_s) / one.num_replicas for one in self._stages(staging))

    def held_bytes(self, staging: Staging) -> float:
        """Return what the fullest rank holds: weights in all their versions, and activations in flight."""
        return max(
            (versions + GRADIENT_AND_STATES) * (self._weights[stop] - self._weights[start])
            + under_way * (self._kept[stop] - self._kept[start])
            for (start, stop), (versions, under_way) in zip(staging.spans, self._kept_by(staging), strict=True)
        )

    def _kept_by(self, staging: Staging) -> Iterator[tuple[int, int]]:
        """Yield for each stage how many versions of weights a replica has, and activations of how many microbatches."""
        pipeline, micros = self.wanted.pipeline(staging), self.wanted.micros(staging)
        rule = STREAMS.get(self.wanted.order)
        for stage, count in enumerate(staging.replicas):
            if rule is not None:
                course = Course(stage, staging.replicas, micros, rule)
                yield 1 + course.staleness, course.warmup + 1
            else:
                yield 1, pipeline.how.in_flight(Place(stage, staging.replicas, tuple(range(micros // count))))

    def _stages(self, staging: Staging) -> list[_Stage]:
        cluster, (out_s, back_s) = self.wanted.cluster, self._sent(staging)
        found = []
        for at, ((start, stop), ranks) in enumerate(zip(staging.spans, staging.ranks, strict=True)):
            weights = self._weights[stop] - self._weights[start]
            slowest = min(map(cluster.speed, ranks)) * self._crowded
            forward_s = self._forward[stop] - self._forward[start]
            seconds = self._seconds[stop] - self._seconds[start]
            found.append(
                _Stage(
                    len(ranks),
                    forward_s / slowest,
                    (seconds - forward_s) / slowest,
                    self._sum_s(weights, ranks),
                    update_s(weights, cluster.device) / slowest,
                    out_s[at],
                    back_s[at],
                )
            )
        return found

    def _sum_s(self, weights: float, ranks: range) -> float:
        """Return the seconds of the sum of a stage's gradients, if nobody is in its way."""
        if not weights or len(ranks) == 1:
            return 0.0
        network = Network(self.wanted.cluster, lambda value, code="": round(weights))
        return network.load(Collective("all_reduce", grad((0,)), tuple(ranks)), Fraction(1), ranks[0]).seconds

    def _sent(self, staging: Staging) -> tuple[list[float], list[float]]:
        """Return for each stage the seconds of what it sends forward and backward: each value to each stage once."""
        ranks, held = staging.ranks, self.wanted.states.held
        own = [held[stop] & ~held[start] for start, stop in staging.spans]
        out_s, back_s = [0.0] * len(own), [0.0] * len(own)
        for maker, span in enumerate(staging.spans):
            for size, readers in self._exports(span):
                for reader in range(maker + 1, len(own)):
                    if readers & own[reader]:
                        seconds = self._link(ranks[maker], ranks[reader]).seconds(size)
                        out_s[maker] += seconds
                        back_s[reader] += seconds
        return out_s, back_s

    def _exports(self, span: tuple[int, int]) -> list[tuple[float, int]]:
        """Return the bytes and the readers of each value that a stage makes for later ones."""
        if span not in self._known_exports:
            start, stop = (self.wanted.states.held[state] for state in span)
            layers = self.wanted.states.profile.layers
            self._known_exports[span] = [
                (layers[bit].activation_bytes, readers)
                for bit, readers in self.wanted.states.readers.items()
                if (stop & ~start) >> bit & 1 and readers & ~stop
            ]
        return self._known_exports[span]

    @cached_property
    def _known_exports(self) -> dict[tuple[int, int], list[tuple[float, int]]]:
        return {}

    def _link(self, one: range, other: range) -> Link:
        """Return the slowest link between ranks of two stages, or of one; ranks of a stage stand in a row."""
        ends = min(one[0], other[0]), max(one[-1], other[-1])
        if ends not in self._links:
            self._links[ends] = self.wanted.cluster.link_among(ends)
        return self._links[ends]

    @cached_property
    def _links(self) -> dict[tuple[int, int], Link]:
        return {}

    @cached_property
    def _crowded(self) -> float:
        levels = self.wanted.cluster.levels
        return self.wanted.cluster.crowded(levels[0].count if levels else self.wanted.num_ranks)

    @cached_property
    def _seconds(self) -> list[float]:
        return list(map(float, self.wanted.states.seconds))

    @cached_property
    def _forward(self) -> list[float]:
        return list(map(float, self.wanted.states.forward_s))

    @cached_property
    def _weights(self) -> list[float]:
        return list(map(float, self.wanted.states.weight_bytes))

    @cached_property
    def _kept(self) -> list[float]:
        return list(map(float, self.wanted.states.activation_bytes))


def _streamed_s(stages: list[_Stage], under_way: list[int]) -> float:
    """Return the longest of what repeats with every microbatch, shared by replicas.

    That is what a replica computes, with its sums and updates; what its link carries; and, because a stage takes up no
    more microbatches than its warm-up, the way of one from there to the end and back by as many as are under way.
    Replicas that add up together wait for the last of them, whose microbatch has come through fewer replicas.
    """
    longest = trip_s = 0.0
    for at in reversed(range(len(stages))):
        one = stages[at]
        trip_s += one.forward_s + one.backward_s + one.out_s
        if at + 1 < len(stages):
            fewer, more = sorted((one, stages[at + 1]), key=lambda stage: stage.num_replicas)
            if more.sum_s:
                trip_s += (more.num_replicas / fewer.num_replicas - 1) * (fewer.forward_s + fewer.backward_s)
        longest = max(
            longest,
            (one.forward_s + one.backward_s + one.sum_s + one.update_s) / one.num_replicas,
            (one.out_s + one.back_s + one.sum_s) / one.num_replicas,
            trip_s / (under_way[at] * one.num_replicas),
        )
        trip_s += one.back_s
    return longest


def _flushed_s(stages: list[_Stage], under_way: list[int], num_microbatches: int) -> float:
    """Return the step of a flush by its microbatches: the longest way in through a stage, its work, and the way out."""
    trips_s = [0.0]
    for one in reversed(stages):
        trips_s.insert(0, trips_s[0] + one.forward_s + one.backward_s + one.out_s + one.back_s)
    step_s = way_in_s = 0.0
    for at, one in enumerate(stages):
        own = num_microbatches // one.num_replicas
        trip_s = (trips_s[at] - one.back_s) / under_way[at]
        done_s = way_in_s + own * max(one.forward_s + one.backward_s, one.out_s + one.back_s, trip_s)
        step_s = max(step_s, done_s + one.sum_s)
        for earlier, later in zip(reversed(stages[:at]), reversed(stages[1 : at + 1]), strict=True):
            done_s += later.back_s + earlier.backward_s
            step_s = max(step_s, done_s + earlier.sum_s)
        way_in_s += one.forward_s + one.out_s
    return (step_s + max(one.update_s for one in stages)) / num_microbatches
