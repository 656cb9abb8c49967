"""1F1B on several chunks per stage: a microbatch passes the stages once for each of them, and the bubble shrinks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from counterpoint.strategies.pipeline.schedules.schedule import PipelineAction, StageReplica


def interleaved(replica: StageReplica) -> Iterator[PipelineAction]:
    """Take groups of microbatches through all chunks in turn, one forward and one backward alternating.

    With n stages and v chunks each, a group has n microbatches; where the m microbatches do not divide into such, its
    groups are larger, as even as can be, the larger ones first, and where there are fewer than n all are one group. For
    ``m >= n`` the bubble is ``(n-1)/(v m+n-1)``; in flight, summed over chunks, are at most
    ``(v-1) g + 2 (n-1-stage) + 1`` with g microbatches in the first group.

    Source:
        Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, SC 2021,
        section 2.2; unequal groups follow torch.distributed.pipelining.
    """
    forwards = list(_grouped_microbatches(replica, range(replica.chunks)))
    backwards = list(_grouped_microbatches(replica, range(replica.chunks - 1, -1, -1)))
    ahead = _warmup(replica)
    for micro, chunk in forwards[:ahead]:
        yield PipelineAction("F", micro, chunk)
    for (micro, chunk), (behind, its_chunk) in zip(forwards[ahead:], backwards, strict=False):
        yield PipelineAction("F", micro, chunk)
        yield PipelineAction("B", behind, its_chunk)
    for micro, chunk in backwards[len(forwards) - ahead :]:
        yield PipelineAction("B", micro, chunk)


def in_flight(replica: StageReplica) -> int:
    """Return the warmup and one more."""
    return min(_warmup(replica) + 1, replica.chunks * len(replica.micros))


def _warmup(replica: StageReplica) -> int:
    """Return the forwards before the first backward: its chunk comes last of all, and other stages are behind."""
    ahead = (replica.chunks - 1) * _group_sizes(replica)[0] + 2 * (replica.num_stages - 1 - replica.stage)
    return min(ahead, replica.chunks * len(replica.micros))


def _group_sizes(replica: StageReplica) -> list[int]:
    """Return how many microbatches go through a chunk before the next chunk takes its turn."""
    count = max(1, len(replica.micros) // replica.num_stages)
    size, larger = divmod(len(replica.micros), count)
    return [size + (index < larger) for index in range(count)]


def _grouped_microbatches(replica: StageReplica, chunks: range) -> Iterator[tuple[int, int]]:
    """Yield microbatches with their chunks: group by group, each through all chunks."""
    sizes = _group_sizes(replica)
    for start, size in zip(accumulate(sizes, initial=0), sizes, strict=False):
        for chunk in chunks:
            for micro in replica.micros[start : start + size]:
                yield micro, chunk
