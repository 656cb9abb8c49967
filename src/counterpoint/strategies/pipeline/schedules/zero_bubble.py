"""Zero bubble: the weight part of a backward waits until a stage would have nothing else to do."""

from __future__ import annotations

from collections.abc import Iterator

from counterpoint.strategies.pipeline.schedules.schedule import PipelineAction, StageReplica


def zb_h1(replica: StageReplica) -> Iterator[PipelineAction]:
    """Run 1F1B with input parts of backwards, and weight parts so late that all stages hold as much as the first one.

    With parts of equal length the bubble is ``(n-1)/(3 m+n-1)`` for n stages and ``m >= n`` microbatches, a third of
    1F1B's in seconds; at most ``min(n, m)`` microbatches are in flight on every stage, 1F1B's on its first one.

    Source:
        Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, section 2.1.
    """
    micros, ahead, delay = replica.micros, replica.warmup, _delay(replica)
    late = iter(micros)
    for micro in micros[:ahead]:
        yield PipelineAction("F", micro)
    for index, micro in enumerate(micros):
        is_draining = ahead + index >= len(micros)
        if not is_draining:
            yield PipelineAction("F", micros[ahead + index])
        yield PipelineAction("Bi", micro)
        if is_draining or index >= delay:
            yield PipelineAction("Bw", next(late))
    for micro in late:
        yield PipelineAction("Bw", micro)


def in_flight(replica: StageReplica) -> int:
    """Return what 1F1B has in flight, and the microbatches whose weight parts are late."""
    return min(replica.warmup + _delay(replica) + 1, len(replica.micros))


def _delay(replica: StageReplica) -> int:
    """Return how many weight parts may wait: as many as make up for a shorter warmup than the first stage's."""
    return max(0, replica.warmup_of(0) - replica.warmup)
