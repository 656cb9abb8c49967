"""Gathers and reduce-scatters of shards in a codec: block-wise quantized weights, and gradients.

::

    gather           shard of each rank --encode--> bytes --all-gather--> --decode--> whole, the same on all ranks
    reduce-scatter   whole of each rank --encode--> bytes --all-to-all--> --decode--> own range of each --sum--> shard

A rank decodes its own bytes, too: all ranks read the same weights, and a sum does not depend on who adds it up. Each
value is rounded once, however many ranks there are, and decoded values are added up in their own dtype, 16-bit ones in
32 bits, in the order of the group. So every transport gives the same bits.

With a scale of ``s`` (the largest magnitude of a chunk divided by 127 in ``int8``, by 7 in ``int4``) a gathered value
is within ``s/2`` of the one encoded, and an element of a sum within half of the sum of its ranks' scales, plus the
rounding of the dtype. This holds where scales are normal numbers of the dtype. What is not finite becomes nan, with its
chunk.

Source:
    Wang et al., ZeRO++: Extremely Efficient Collective Communication for Giant Model Training, 2023: qwZ and qgZ,
    within one group. Chunks are those of the codec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from counterpoint.fabric.compression import compress, decompress_to
from counterpoint.fabric.fabric import Fabric, Group, Work
from counterpoint.fabric.reductions import reduce_in_order
from counterpoint.program.compression import Codec

Ranges: TypeAlias = Sequence[tuple[int, int]]
"""First elements of ranges of a flat tensor and those after their last; each range is encoded on its own."""


class DecodingWork(Work):
    """A collective of bytes, which the wait decodes.

    Args:
        work: moves the bytes.
        decode: writes what was received; called once, when the work is complete.
    """

    def __init__(self, work: Work, decode: Callable[[], None]) -> None:
        self._pending: tuple[Work, Callable[[], None]] | None = (work, decode)

    def wait(self) -> None:
        """Wait, decode once, and free the bytes."""
        if self._pending is None:
            return
        work, decode = self._pending
        work.wait()
        decode()
        self._pending = None


def start_quantized_all_gather(  # noqa: PLR0913 - a gather has a source, a target, and who has what
    fabric: Fabric,
    label: str,
    shard: Tensor,
    whole: Tensor,
    ranges: Sequence[Ranges],
    group: Group,
    codec: Codec,
) -> Work:
    """Start to write the decoded shards of all members to a flat tensor on every member.

    Args:
        fabric: this rank's connection to the members.
        label: name of the tensor.
        shard: this member's ranges, one after the other; read at once.
        whole: receives the decoded values, perhaps in a narrower dtype than that of the shard.
        ranges: of each member, in ``whole``.
        group: the members.
        codec: how shards are encoded.
    """
    dtype = shard.dtype
    sizes = [_encoded_bytes(own, codec, dtype) for own in ranges]
    bounds = [sum(sizes[:member]) for member in range(len(group) + 1)]
    encoded = torch.empty(bounds[-1], dtype=torch.uint8, device=shard.device)
    position, first = group.index(fabric.rank), 0
    for (start, stop), chunk in _chunks(encoded[bounds[position] :], ranges[position], codec, dtype):
        chunk.copy_(compress(codec, shard[first : first + stop - start]))
        first += stop - start

    def decode() -> None:
        for member, own in enumerate(ranges):
            for (start, stop), chunk in _chunks(encoded[bounds[member] :], own, codec, dtype):
                whole[start:stop].copy_(decompress_to(codec, chunk, stop - start, dtype))

    return DecodingWork(fabric.all_gather(label, encoded, bounds, group), decode)


def start_quantized_reduce_scatter(
    fabric: Fabric, label: str, whole: Tensor, ranges: Sequence[Ranges], group: Group, codec: Codec
) -> Work:
    """Start to replace the ranges of each member, on that member, by the sum of what all members' decode to.

    Args:
        fabric: this rank's connection to the members.
        label: name of the tensor.
        whole: flat and contiguous, read at once; its other ranges stay as they are.
        ranges: of each member.
        group: the members.
        codec: how ranges are encoded.
    """
    empty, position = whole.new_empty(0, dtype=torch.uint8), group.index(fabric.rank)
    parts = [compress(codec, whole[start:stop]) for own in ranges for start, stop in own]
    sizes = [_encoded_bytes(own, codec, whole.dtype) for own in ranges]
    received, work = fabric.all_to_all(label, torch.cat([empty, *parts]), [sizes] * len(group), group)

    def decode() -> None:
        own, size = ranges[position], sizes[position]
        members = [_chunks(received[size * member :], own, codec, whole.dtype) for member in range(len(group))]
        for chunks in zip(*members, strict=True):
            start, stop = chunks[0][0]
            decoded = [decompress_to(codec, chunk, stop - start, whole.dtype) for _, chunk in chunks]
            whole[start:stop] = reduce_in_order(decoded, "sum")

    return DecodingWork(work, decode)


def _encoded_bytes(ranges: Ranges, codec: Codec, dtype: torch.dtype) -> int:
    return sum(codec.encoded_bytes((stop - start,), dtype.itemsize) for start, stop in ranges)


def _chunks(
    encoded: Tensor, ranges: Ranges, codec: Codec, dtype: torch.dtype
) -> Iterator[tuple[tuple[int, int], Tensor]]:
    """Yield each range with its bytes, which follow each other from the beginning of a tensor."""
    first = 0
    for start, stop in ranges:
        size = codec.encoded_bytes((stop - start,), dtype.itemsize)
        yield (start, stop), encoded[first : first + size]
        first += size
