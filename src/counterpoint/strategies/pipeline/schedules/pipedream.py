"""PipeDream and PipeDream-2BW: 1F1B without a flush, on several versions of the weights.

Three stages under PipeDream, one microbatch per batch; U is the update of a stage, and ``-k`` marks a backward that
uses the weights of k updates ago, as its forward did::

    stage 0  F0 F1 F2 B0 U0 F3 B1-1 U1 F4 B2-2 U2 F5 B3-2 U3
    stage 1     F0 F1 B0 U0 F2 B1-1 U1 F3 B2-1 U2 F4 B3-1 U3
    stage 2        F0 B0 U0 F1 B1   U1 F2 B2   U2 F3 B3   U3
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, inf
from typing import Literal, TypeAlias

from counterpoint.strategies.pipeline.schedules.schedule import warmup

WeightPolicy: TypeAlias = Literal["stashing", "vertical_sync", "double_buffer"]
"""Which version of the weights a microbatch uses.

=================  ================================================================================================
``stashing``       the newest of each stage when its forward arrives there
``vertical_sync``  the version that has seen the same microbatches on all stages: those the first stage had seen
``double_buffer``  the version before the newest, on all stages
=================  ================================================================================================
"""


@dataclass(frozen=True, slots=True)
class AsyncAction:
    """One action of a stage replica: a forward, a backward, or its updates.

    Args:
        kind: ``F``, ``B`` or ``U``.
        micro: the microbatch; for updates the last one that was run backward.
        version: version of the weights that it reads, in updates of this stage relative to the newest (0 or negative).
    """

    kind: Literal["F", "B", "U"]
    micro: int
    version: int = 0


@dataclass(frozen=True, slots=True)
class StageTimeline:
    """The sequence of microbatches and updates of one stage in an asynchronous pipeline.

    Microbatches are counted from 0 over the whole run; negative ones do not exist and are skipped. A replica counts its
    own microbatches as steps: microbatch ``step * replicas + replica``.

    Args:
        stage: index of the stage.
        replicas_per_stage: number of replicas of each stage.
        num_micros: number of microbatches of one global batch, which is one repetition of the body.
        weight_policy: which version of the weights a microbatch uses.
    """

    stage: int
    replicas_per_stage: tuple[int, ...]
    num_micros: int
    weight_policy: WeightPolicy

    @property
    def count(self) -> int:
        """Number of replicas of the stage."""
        return self.replicas_per_stage[self.stage]

    @property
    def warmup(self) -> int:
        """Number of forwards by which a replica is ahead of its backwards."""
        return warmup(self.stage, self.replicas_per_stage)

    @property
    def steps(self) -> int:
        """Number of a replica's own microbatches in one body."""
        return self.num_micros // self.count

    @property
    def interval(self) -> int:
        """How many backwards of a replica are between two updates of its stage; a body with double buffering."""
        return self.steps if self.weight_policy == "double_buffer" else 1

    @property
    def lookahead_batches(self) -> int:
        """Number of bodies by which the first forward of a microbatch precedes its backwards."""
        return ceil(warmup(0, self.replicas_per_stage) * self.replicas_per_stage[0] / self.num_micros)

    def updates_before(self, step: int) -> int:
        """Return how many updates the stage has made before the backward of a step."""
        return step // self.interval

    def updates_in_weights(self, micro: int) -> int:
        """Return how many updates of this stage are in the weights that a microbatch uses."""
        if self.weight_policy == "double_buffer":
            return micro // self.num_micros - 1
        if self.weight_policy == "stashing":
            return self.updates_before(micro // self.count - self.warmup)
        first = self.replicas_per_stage[0]
        return (micro // first - warmup(0, self.replicas_per_stage)) * first // self.count

    @property
    def staleness(self) -> int:
        """Maximum number of updates between reading weights and applying the gradient computed with them."""
        return max(map(self.age, range(self.num_micros)))

    def age(self, micro: int) -> int:
        """Return how many updates old the weights of a microbatch are at its backward."""
        return self.updates_before(micro // self.count) - self.updates_in_weights(micro)

    def weight_versions(self, replica: int) -> int:
        """Return how many versions of its weights a replica holds; with vertical sync this may differ by replica."""
        return 1 + max(map(self.age, range(replica, self.num_micros, self.count)))


def one_f_one_b_without_flush(
    timeline: StageTimeline, replica: int, body: int, stop: float = inf
) -> Iterator[AsyncAction]:
    """Yield the actions of a replica in one body: for each microbatch one forward ahead, one backward, its update.

    The backwards of body k are those of its own microbatches on all stages; the forwards are ahead of them by the
    warm-up. Microbatches below 0, and forwards from ``stop`` on, are skipped.

    Args:
        timeline: of the stage.
        replica: index of the replica of the stage.
        body: index of the body; the first one with an action is ``-lookahead_batches``.
        stop: the first microbatch that is not started any more.

    Source:
        Narayanan et al., PipeDream, SOSP 2019, sections 3.2 and 3.3; Narayanan et al., ICML 2021, section 3 (2BW).
    """
    for step in range(body * timeline.steps, (body + 1) * timeline.steps):
        updates = max(0, timeline.updates_before(step))
        forward, backward = ((index * timeline.count + replica) for index in (step + timeline.warmup, step))
        if 0 <= forward < stop:
            yield AsyncAction("F", forward, max(0, timeline.updates_in_weights(forward)) - updates)
        if backward >= 0:
            yield AsyncAction("B", backward, max(0, timeline.updates_in_weights(backward)) - updates)
            if (step + 1) % timeline.interval == 0:
                yield AsyncAction("U", backward)
