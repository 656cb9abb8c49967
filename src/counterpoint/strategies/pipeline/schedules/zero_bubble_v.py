"""Zero bubble with two chunks per stage in a V: the last chunk of a microbatch lies where its first one does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal

from counterpoint.strategies.pipeline.schedules.schedule import PipelineAction, StageReplica


def zb_v(replica: StageReplica) -> Iterator[PipelineAction]:
    """Fill along both arms of the V, then alternate both chunks' forwards and backwards, then drain.

    With forwards and both parts of backwards of equal length the bubble is ``(n-1)/(6 m+n-1)`` for n stages and
    ``m >= 3 n/2`` microbatches: half a stage's forward for each stage until the first microbatch has come to the last
    one. At most ``2 min(n, m)`` halves of a stage are in flight on every stage, 1F1B's on its first one.

    Source:
        Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, section 6; the same schedule in
        torch.distributed.pipelining. Fewer microbatches than fill the V leave out the turns of the missing ones.
    """
    next_of: Counter[tuple[str, int]] = Counter()
    for kind, chunk in _pattern(replica):
        index = next_of[kind, chunk]
        next_of[kind, chunk] += 1
        if index < len(replica.micros):
            yield PipelineAction(kind, replica.micros[index], chunk)


def in_flight(replica: StageReplica) -> int:
    """Return two halves for every stage."""
    return 2 * min(replica.num_stages, len(replica.micros))


_ChunkAction = tuple[Literal["F", "Bi", "Bw"], int]
"""What is done on which chunk, each with its next microbatch."""


def _pattern(replica: StageReplica) -> Iterator[_ChunkAction]:
    """Yield what a stage does for as many microbatches as there are, or as fill the V."""
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
