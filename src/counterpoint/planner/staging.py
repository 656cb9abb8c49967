"""Stages of a pipeline as cuts of a model and replicas, what is wanted of them, and how they may change a little."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise
from math import lcm

import numpy as np

from counterpoint.planner.partition import Partition
from counterpoint.planner.states import States
from counterpoint.strategies.pipeline import Pipeline
from counterpoint.world.cluster import Cluster

MOST_MICROBATCHES = 64
"""Replicas that share no fewer microbatches than so many have programs that nobody wants to read."""
FAR = 8
"""A cut is moved past so many states at most."""


@dataclass(frozen=True, slots=True, order=True)
class Staging:
    """Stages in the order of the model.

    Args:
        cuts: states, the empty one first and the whole one last; a stage is what one holds and the one before does not.
        replicas: of each stage, on ranks one behind the other.
    """

    cuts: tuple[int, ...]
    replicas: tuple[int, ...]

    @staticmethod
    def of(found: Partition) -> Staging:
        """Return the stages of a partition, those of inner levels as stages of their own with all their replicas."""
        stages = [each for stage in found.stages for each in stage.innermost()]
        return Staging((0, *(stop for _, stop, _ in stages)), tuple(count for *_, count in stages))

    @property
    def num_stages(self) -> int:
        """How many there are."""
        return len(self.replicas)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """For each stage the states before and behind it."""
        return tuple(pairwise(self.cuts))

    @property
    def ranks(self) -> tuple[range, ...]:
        """The ranks of each stage."""
        return tuple(range(start, stop) for start, stop in pairwise(accumulate(self.replicas, initial=0)))

    def counts(self, states: States) -> tuple[int, ...]:
        """Return how many layers each stage has."""
        return tuple((states.held[stop] & ~states.held[start]).bit_count() for start, stop in self.spans)


@dataclass(frozen=True, slots=True)
class Wanted:
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

    states: States
    cluster: Cluster
    num_ranks: int
    order: str
    num_microbatches: int | None = None
    least_stages: int = 1

    def pipeline(self, staging: Staging, balance: tuple[int, ...] = ()) -> Pipeline:
        """Return the strategy."""
        replicas = staging.replicas if max(staging.replicas) > 1 else ()
        return Pipeline(staging.num_stages, self.order, replicas, balance)

    def micros(self, staging: Staging) -> int:
        """Return how many microbatches a step has."""
        return self.pipeline(staging).microbatches(self.num_microbatches or 1)

    def allows(self, staging: Staging) -> bool:
        """Return whether there are enough stages, and their replicas can share the microbatches."""
        shared, wanted = lcm(*staging.replicas), self.num_microbatches
        if staging.num_stages < self.least_stages:
            return False
        if shared > MOST_MICROBATCHES or (wanted is not None and wanted % shared):
            return False
        return wanted is None or self.micros(staging) <= wanted

    def near(self, staging: Staging) -> Iterator[Staging]:
        """Yield all allowed stagings that differ by one cut or in the replicas of two stages, each once."""
        changes = (self._shifted, self._joined, self._split, self._dealt)
        found = dict.fromkeys(one for change in changes for one in change(staging))
        yield from (one for one in found if one != staging and self.allows(one))

    def _shifted(self, staging: Staging) -> Iterator[Staging]:
        """Move a cut."""
        seconds = self.states.seconds
        for at, (before, here, behind) in enumerate(
            zip(staging.cuts, staging.cuts[1:], staging.cuts[2:], strict=False)
        ):
            between = np.flatnonzero(self.states.inside[before] & self.states.inside[:, behind])
            ordered = between[np.lexsort((between, seconds[between]))]
            place = int(np.flatnonzero(ordered == here)[0])
            for to in ordered[max(0, place - FAR) : place + FAR + 1]:
                yield Staging((*staging.cuts[: at + 1], int(to), *staging.cuts[at + 2 :]), staging.replicas)

    def _joined(self, staging: Staging) -> Iterator[Staging]:
        """Make one stage of two neighbours."""
        cuts, replicas = staging.cuts, staging.replicas
        for at in range(staging.num_stages - 1):
            both = replicas[at] + replicas[at + 1]
            yield Staging((*cuts[: at + 1], *cuts[at + 2 :]), (*replicas[:at], both, *replicas[at + 2 :]))

    def _split(self, staging: Staging) -> Iterator[Staging]:
        """Make two stages of one with replicas, each with work in proportion to its own."""
        cuts, replicas, seconds = staging.cuts, staging.replicas, self.states.seconds
        for at, (start, stop) in enumerate(staging.spans):
            between = np.flatnonzero(self.states.inside[start] & self.states.inside[:, stop])
            for first in range(1, replicas[at]) if between.size else ():
                ideal = seconds[start] + (seconds[stop] - seconds[start]) * first / replicas[at]
                cut = int(between[np.argmin(np.abs(seconds[between] - ideal))])
                shares = (first, replicas[at] - first)
                yield Staging((*cuts[: at + 1], cut, *cuts[at + 1 :]), (*replicas[:at], *shares, *replicas[at + 1 :]))

    def _dealt(self, staging: Staging) -> Iterator[Staging]:
        """Deal the replicas of two stages otherwise between them."""
        for one, other in combinations(range(staging.num_stages), 2):
            both = staging.replicas[one] + staging.replicas[other]
            for count in range(1, both):
                replicas = list(staging.replicas)
                replicas[one], replicas[other] = count, both - count
                yield Staging(staging.cuts, tuple(replicas))
