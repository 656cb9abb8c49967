"""Zero bubble with two chunks per stage in a V, ZB-V: the last chunk of the model is on the first stage.

Two stages with two chunks each, four microbatches; a prime marks the second chunk::

    stage 0  F0  F1  F2  F0' I0' W0' F1' I1' W1' F3  I0  W0  F2' I2' W2' I1  W1  F3' I3' W3' I2  W2  I3  W3  .
    stage 1  .   F0  F0' F1  F1' I0' W0' F2  I0  W0  F2' I1' W1' F3  I1  W1  F3' I2' W2' I2  I3' I3  W2  W3' W3
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal

from counterpoint.strategies.pipeline.schedules.schedule import PipelineAction, PipelineSchedule, StageReplica


def zb_v(replica: StageReplica) -> Iterator[PipelineAction]:
    """Fill along both arms of the V, then alternate forwards and backwards of both chunks, then drain.

    If forwards and both parts of backwards take equally long, the bubble is ``(n-1)/(6 m+n-1)`` for n stages and
    ``m >= 3 n/2`` microbatches: half a stage's forward for each stage that the first microbatch passes on its way to
    the last. At most ``2 min(n, m)`` halves of a stage are in flight on every stage, as on 1F1B's first one.

    Source:
        Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, section 6; the same schedule as in
        torch.distributed.pipelining. With fewer microbatches than fill the V, the actions of missing ones are skipped.
    """
    next_index: Counter[tuple[str, int]] = Counter()
    for kind, chunk in _pattern(replica):
        index = next_index[kind, chunk]
        next_index[kind, chunk] += 1
        if index < len(replica.micros):
            yield PipelineAction(kind, replica.micros[index], chunk)


def in_flight(replica: StageReplica) -> int:
    """Return two halves of a stage for every stage."""
    return 2 * min(replica.num_stages, len(replica.micros))


_ChunkAction = tuple[Literal["F", "Bi", "Bw"], int]
"""Kind and chunk of an action; each is run on its next microbatch."""


def _pattern(replica: StageReplica) -> Iterator[_ChunkAction]:
    """Yield the actions of a stage for its microbatches, or for as many as fill the V if those are more."""
    n, stage = replica.num_stages, replica.stage
    count = max(2 * n - 1, len(replica.micros))
    down: list[_ChunkAction] = [("F", 0)]
    up: list[_ChunkAction] = [("F", 1)]
    first: list[_ChunkAction] = [("Bi", 0), ("Bw", 0)]
    second: list[_ChunkAction] = [("Bi", 1), ("Bw", 1)]
    yield from (2 * (n - stage) - 1) * down
    yield from stage * (up + down)
    yield from (n - stage) * (up + second)
    started = 2 * n - 1 - stage
    for index in range(count - n):
        if started + index < count:
            yield from down
        yield from first + up + second
    yield from stage * (first[:1] + second[:1])
    yield from (n - stage) * first
    yield from stage * second[1:]
    yield from stage * first[1:]


ZB_V = PipelineSchedule("zero_bubble", zb_v, in_flight, range(2, 3), is_v_shaped=True, bubble_saving=5 / 6)
