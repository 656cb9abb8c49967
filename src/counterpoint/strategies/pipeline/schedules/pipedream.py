"""Streams: 1F1B without a flush, on weights of several versions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil, inf
from typing import Literal, TypeAlias

from counterpoint.strategies.pipeline.schedules.schedule import warmup

WeightPolicy: TypeAlias = Literal["stashed", "synced", "double"]
"""Which weights a microbatch meets.

===========  ==========================================================================================
``stashed``  the newest of each stage when its forward comes there
``synced``   those that have seen the same microbatches on all stages: what the first stage had seen
``double``   those before the newest, on all stages
===========  ==========================================================================================
"""

ASYNC_SCHEDULES: Mapping[str, WeightPolicy] = {"pipedream": "stashed", "pipedream_2bw": "double"}
"""The orders without a flush by name; the first one takes turns to ``synced`` by vertical sync."""


@dataclass(frozen=True, slots=True)
class AsyncAction:
    """What a replica of a stage does next: a forward, a backward, or its updates.

    Args:
        kind: ``F``, ``B`` or ``U``.
        micro: the microbatch; the last one that went backward for updates.
        version: which weights it reads, counted in updates of this stage before its newest ones.
    """

    kind: Literal["F", "B", "U"]
    micro: int
    version: int = 0


@dataclass(frozen=True, slots=True)
class StageTimeline:
    """How one stage goes through a stream.

    All microbatches of the stream are counted from 0; those before are none, and nothing is done for them. A replica
    counts its own ones as steps: microbatch ``step * replicas + twin``.

    Args:
        stage: index of the stage.
        replicas: how many replicas each stage has.
        num_micros: microbatches of one repetition of the body: of one global batch.
        rule: which weights a microbatch meets.
    """

    stage: int
    replicas: tuple[int, ...]
    num_micros: int
    weight_policy: WeightPolicy

    @property
    def count(self) -> int:
        """How many replicas the stage has."""
        return self.replicas[self.stage]

    @property
    def warmup(self) -> int:
        """How many forwards a replica is ahead of its backwards."""
        return warmup(self.stage, self.replicas)

    @property
    def steps(self) -> int:
        """How many microbatches of one body are a replica's own."""
        return self.num_micros // self.count

    @property
    def interval(self) -> int:
        """After how many backwards of a replica its stage updates (one for each replica, or a whole body)."""
        return self.steps if self.weight_policy == "double" else 1

    @property
    def lookahead_batches(self) -> int:
        """How many bodies the first forwards of a microbatch come before its backwards."""
        return ceil(warmup(0, self.replicas) * self.replicas[0] / self.num_micros)

    def updates_before(self, step: int) -> int:
        """Return how many updates the stage has made before the backward of a step."""
        return step // self.interval

    def updates_in_weights(self, micro: int) -> int:
        """Return how many updates of this stage are in the weights that a microbatch meets."""
        if self.weight_policy == "double":
            return micro // self.num_micros - 1
        if self.weight_policy == "stashed":
            return self.updates_before(micro // self.count - self.warmup)
        first = self.replicas[0]
        return (micro // first - warmup(0, self.replicas)) * first // self.count

    @property
    def staleness(self) -> int:
        """How many updates old weights are at most when the gradient that was computed with them is applied."""
        return max(map(self.age, range(self.num_micros)))

    def age(self, micro: int) -> int:
        """Return how many updates old the weights that a microbatch meets are when it goes backward."""
        return self.updates_before(micro // self.count) - self.updates_in_weights(micro)

    def weight_versions(self, replica: int) -> int:
        """Return how many versions of its weights a replica holds; those of one stage may differ by vertical sync."""
        return 1 + max(map(self.age, range(replica, self.num_micros, self.count)))


def one_f_one_b_without_flush(
    timeline: StageTimeline, replica: int, body: int, stop: float = inf
) -> Iterator[AsyncAction]:
    """Yield what a replica does in one body: for each microbatch one forward ahead, one backward, and its update.

    The backwards of body k are those of its own microbatches on all stages, the forwards are ahead of them by the
    warm-up. Microbatches below 0, and forwards from ``stop`` on, are left out.

    Args:
        course: of the stage.
        twin: which replica of it.
        body: which body; from ``-bodies_ahead`` on there is something to do.
        stop: the first microbatch that does not enter any more.

    Source:
        Narayanan et al., PipeDream, SOSP 2019, sections 3.2 and 3.3; Narayanan et al., ICML 2021, section 3 (2BW).
    """
    for step in range(body * timeline.steps, (body + 1) * timeline.steps):
        made = max(0, timeline.updates_before(step))
        ahead, own = ((at * timeline.count + replica) for at in (step + timeline.warmup, step))
        if 0 <= ahead < stop:
            yield AsyncAction("F", ahead, max(0, timeline.updates_in_weights(ahead)) - made)
        if own >= 0:
            yield AsyncAction("B", own, max(0, timeline.updates_in_weights(own)) - made)
            if (step + 1) % timeline.interval == 0:
                yield AsyncAction("U", own)
