"""One forward, one backward: as few microbatches in flight as keep all stages busy."""

from __future__ import annotations

from collections.abc import Iterator

from counterpoint.strategies.pipeline.schedules.schedule import PipelineAction, StageReplica


def one_f_one_b(replica: StageReplica) -> Iterator[PipelineAction]:
    """Warm up, then alternate one forward with one backward, then drain.

    At most ``warmup + 1`` microbatches are in flight on a replica, ``n - stage`` of n stages without replicas; the
    bubble is that of ``gpipe``.

    Source:
        Narayanan et al., PipeDream, SOSP 2019, section 3.2; with a flush, Narayanan et al., ICML 2021.
    """
    ahead = replica.warmup
    for micro in replica.micros[:ahead]:
        yield PipelineAction("F", micro)
    for behind, micro in enumerate(replica.micros[ahead:]):
        yield PipelineAction("F", micro)
        yield PipelineAction("B", replica.micros[behind])
    for micro in replica.micros[len(replica.micros) - ahead :]:
        yield PipelineAction("B", micro)


def in_flight(replica: StageReplica) -> int:
    """Return the warmup and one more."""
    return min(replica.warmup + 1, len(replica.micros))
