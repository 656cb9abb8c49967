"""Fill and drain: all forwards, then all backwards.

Three stages, four microbatches; a backward takes as long as two forwards::

    stage 0  F0 F1 F2 F3 .  .  .  .  .  .  B3 -  B2 -  B1 -  B0 -
    stage 1  .  F0 F1 F2 F3 .  .  .  B3 -  B2 -  B1 -  B0 -  .  .
    stage 2  .  .  F0 F1 F2 F3 B3 -  B2 -  B1 -  B0 -  .  .  .  .
"""

from __future__ import annotations

from collections.abc import Iterator

from counterpoint.strategies.pipeline.schedules.schedule import (
    MAX_CHUNKS,
    PipelineAction,
    PipelineSchedule,
    StageReplica,
)


def gpipe(replica: StageReplica) -> Iterator[PipelineAction]:
    """Run all microbatches forward, then all backward, the last one first.

    All m microbatches of a replica are in flight at once; the bubble is ``(n-1)/(m+n-1)`` for n stages. With v chunks
    per stage all microbatches pass one chunk before the next: ``v m`` are in flight, and the bubble, for ``m >= n``, is
    ``(n-1)/(v m+n-1)``.

    Source:
        Huang et al., GPipe: Efficient Training of Giant Neural Networks, NeurIPS 2019, section 2; with chunks
        Lamy-Poirier, Breadth-First Pipeline Parallelism, MLSys 2023.
    """
    for chunk in range(replica.chunks_per_stage):
        for micro in replica.micros:
            yield PipelineAction("F", micro, chunk)
    for chunk in reversed(range(replica.chunks_per_stage)):
        for micro in reversed(replica.micros):
            yield PipelineAction("B", micro, chunk)


def in_flight(replica: StageReplica) -> int:
    """Return every microbatch on every chunk."""
    return replica.chunks_per_stage * len(replica.micros)


GPIPE = PipelineSchedule("gpipe", gpipe, in_flight, range(1, MAX_CHUNKS))
