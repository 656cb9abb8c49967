"""Zero bubble, ZB-H1: weight gradients are delayed until a stage would otherwise be idle.

Three stages, four microbatches; I is the input-gradient part of a backward, W its weight-gradient part::

    stage 0  F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
    stage 1  .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    stage 2  .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
"""

from __future__ import annotations

from collections.abc import Iterator

from counterpoint.strategies.pipeline.schedules.schedule import PipelineAction, PipelineSchedule, StageReplica


def zb_h1(replica: StageReplica) -> Iterator[PipelineAction]:
    """Run 1F1B with input gradients; delay weight gradients so far that all stages hold as much as the first.

    If all parts take equally long, the bubble is ``(n-1)/(3 m+n-1)`` for n stages and ``m >= n`` microbatches, a third
    of 1F1B's in seconds; at most ``min(n, m)`` microbatches are in flight on every stage, as on 1F1B's first one.

    Source:
        Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, section 2.1.
    """
    micros, ahead, delay = replica.micros, replica.warmup, _delay(replica)
    delayed = iter(micros)
    for micro in micros[:ahead]:
        yield PipelineAction("F", micro)
    for index, micro in enumerate(micros):
        is_draining = ahead + index >= len(micros)
        if not is_draining:
            yield PipelineAction("F", micros[ahead + index])
        yield PipelineAction("Bi", micro)
        if is_draining or index >= delay:
            yield PipelineAction("Bw", next(delayed))
    for micro in delayed:
        yield PipelineAction("Bw", micro)


def in_flight(replica: StageReplica) -> int:
    """Return 1F1B's microbatches in flight, plus those whose weight gradients are delayed."""
    return min(replica.warmup + _delay(replica) + 1, len(replica.micros))


def _delay(replica: StageReplica) -> int:
    """Return how many weight gradients may be delayed: as many as the first stage's warm-up is longer."""
    return max(0, replica.warmup_of(0) - replica.warmup)


ZB_H1 = PipelineSchedule("zero_bubble", zb_h1, in_flight, bubble_saving=2 / 3)
