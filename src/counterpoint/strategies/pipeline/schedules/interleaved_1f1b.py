"""Interleaved 1F1B: several chunks per stage; a microbatch passes the stages once per chunk, and the bubble shrinks.

Two stages with two chunks each, four microbatches; a prime marks the second chunk::

    stage 0  F0  F1  F0' F1' F2  .   B0' -   F3  B1' -   F2' B0  -   F3' B1  -   .   B2' -   .   B3' -   B2  -   B3  -
    stage 1  .   F0  F1  F0' B0' -   F1' B1' -   F2  B0  -   F3  B1  -   F2' B2' -   F3' B3' -   B2  -   B3  -   .   .
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from counterpoint.strategies.pipeline.schedules.schedule import (
    MAX_CHUNKS,
    PipelineAction,
    PipelineSchedule,
    StageReplica,
)


def interleaved(replica: StageReplica) -> Iterator[PipelineAction]:
    """Run groups of microbatches through all chunks in turn, alternating one forward with one backward.

    With n stages and v chunks each, a group has n microbatches. If n does not divide the m microbatches, the groups are
    larger and of nearly equal size, the larger ones first; fewer than n microbatches are one group. For ``m >= n`` the
    bubble is ``(n-1)/(v m+n-1)``; at most ``(v-1) g + 2 (n-1-stage) + 1`` microbatches are in flight, summed over
    chunks, with g microbatches in the first group.

    Source:
        Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, SC 2021,
        section 2.2; unequal groups as in torch.distributed.pipelining.
    """
    forwards = list(_grouped_microbatches(replica, range(replica.chunks_per_stage)))
    backwards = list(_grouped_microbatches(replica, range(replica.chunks_per_stage - 1, -1, -1)))
    ahead = _warmup(replica)
    for micro, chunk in forwards[:ahead]:
        yield PipelineAction("F", micro, chunk)
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        yield PipelineAction("F", *forward)
        yield PipelineAction("B", *backward)
    for micro, chunk in backwards[len(forwards) - ahead :]:
        yield PipelineAction("B", micro, chunk)


def in_flight(replica: StageReplica) -> int:
    """Return the warm-up and one more."""
    return min(_warmup(replica) + 1, replica.chunks_per_stage * len(replica.micros))


def _warmup(replica: StageReplica) -> int:
    """Return the number of forwards before the first backward, which is on the last chunk of all."""
    ahead = (replica.chunks_per_stage - 1) * _group_sizes(replica)[0] + 2 * (replica.num_stages - 1 - replica.stage)
    return min(ahead, replica.chunks_per_stage * len(replica.micros))


def _group_sizes(replica: StageReplica) -> list[int]:
    """Return how many microbatches pass a chunk before the next chunk is run."""
    count = max(1, len(replica.micros) // replica.num_stages)
    size, larger = divmod(len(replica.micros), count)
    return [size + (index < larger) for index in range(count)]


def _grouped_microbatches(replica: StageReplica, chunks: range) -> Iterator[tuple[int, int]]:
    """Yield ``(microbatch, chunk)``: group by group, each through all chunks."""
    sizes = _group_sizes(replica)
    for start, size in zip(accumulate(sizes, initial=0), sizes, strict=False):
        for chunk in chunks:
            for micro in replica.micros[start : start + size]:
                yield micro, chunk


INTERLEAVED = PipelineSchedule("interleaved", interleaved, in_flight, range(2, MAX_CHUNKS), bubble_saving=1 / 2)
