"""Ranges of the flat buffers that gradients are summed in, and sizes of buckets that are worth a try."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from counterpoint.strategies.buckets import Buckets

Range: TypeAlias = tuple[int, int]
"""Elements of a flat buffer, from and to."""


def joined(ranges: Iterable[Range]) -> list[Range]:
    """Return the same elements as few ranges.

    Example:
        >>> joined([(4, 6), (0, 2), (2, 4), (8, 9)])
        [(0, 6), (8, 9)]
    """
    found: list[Range] = []
    for start, stop in sorted(ranges):
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found


def left_over(ranges: Iterable[Range], taken: Sequence[Range]) -> Iterator[Range]:
    """Yield what is left of ranges when some have been taken, each of which lies within one of them.

    Example:
        >>> list(left_over([(0, 10), (20, 30)], [(2, 4), (20, 25)]))
        [(0, 2), (4, 10), (25, 30)]
    """
    for low, high in ranges:
        for start, stop in sorted(taken):
            if low <= start and stop <= high:
                if low < start:
                    yield low, start
                low = stop
        if low < high:
            yield low, high


def ladder(sizes: Buckets) -> list[Buckets]:
    """Return the sizes that are worth a try: those given, larger and smaller ones, and everything at once."""
    one = Buckets(2**62, 2**62, 0.0, sizes.tune)
    others = [4 * sizes.bucket_bytes, sizes.bucket_bytes // 4, sizes.bucket_bytes // 16]
    return [sizes, *(Buckets(size, sizes.first_bytes, sizes.cycle_ms, sizes.tune) for size in others), one]
