"""One forward, one backward: as few microbatches in flight as keep all stages busy.

Three stages, four microbatches; stage s warms up with ``2 - s`` forwards::

    stage 0  F0 F1 F2 .  .  .  .  B0 -  F3 B1 -  .  B2 -  .  B3 -
    stage 1  .  F0 F1 .  .  B0 -  F2 B1 -  F3 B2 -  .  B3 -  .  .
    stage 2  .  .  F0 B0 -  F1 B1 -  F2 B2 -  F3 B3 -  .  .  .  .
"""

from __future__ import annotations

from collections.abc import Iterator

from counterpoint.strategies.pipeline.schedules.schedule import PipelineAction, PipelineSchedule, StageReplica


def one_f_one_b(replica: StageReplica) -> Iterator[PipelineAction]:
    """Warm up, then alternate one forward with one backward, then drain.

    At most ``warmup + 1`` microbatches are in flight on a replica, ``n - stage`` of n stages without replicas; the
    bubble is that of ``gpipe``.

    Source:
        Narayanan et al., PipeDream, SOSP 2019, section 3.2; with a flush, Narayanan et al., ICML 2021.
    """
    micros, ahead = replica.micros, replica.warmup
    for micro in micros[:ahead]:
        yield PipelineAction("F", micro)
    for index, micro in enumerate(micros[ahead:]):
        yield PipelineAction("F", micro)
        yield PipelineAction("B", micros[index])
    for micro in micros[len(micros) - ahead :]:
        yield PipelineAction("B", micro)


def in_flight(replica: StageReplica) -> int:
    """Return the warm-up and one more."""
    return min(replica.warmup + 1, len(replica.micros))


ONE_F_ONE_B = PipelineSchedule("one_f_one_b", one_f_one_b, in_flight)
