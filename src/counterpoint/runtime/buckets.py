"""How gradients are put together for their sums, in the order in which they become ready."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from counterpoint.strategies.buckets import Buckets

Range: TypeAlias = tuple[int, int]
"""Elements of a flat buffer, from and to."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A gradient that a backward has made.

    Args:
        place: which one.
        arena: in which of the flat buffers it lies.
        num_bytes: its size.
        ready_s: when it was made, in seconds from the beginning of the backward.
    """

    place: int
    arena: int
    num_bytes: int
    ready_s: float


def cut(made: Iterable[Ready], sizes: Buckets) -> tuple[tuple[int, ...], ...]:
    """Return the places of each bucket, in the order in which buckets are complete.

    Each has gradients of one buffer, at most so many bytes as ``sizes`` says, or a single gradient that is larger. What
    the first one may not hold joins the small ones before it all the same: alone, these would leave the link idle.

    Args:
        made: all gradients, in any order.
        sizes: of the first bucket, of the others, and how far apart in time the gradients of one may be.

    Example:
        >>> made = [Ready(place, 0, 10, 0.001 * place) for place in range(5)]
        >>> cut(made, Buckets(bucket_bytes=30, first_bytes=10))
        ((0,), (1, 2, 3), (4,))
    """
    closed: list[list[Ready]] = []
    growing: dict[int, list[Ready]] = {}
    firsts: set[int] = set()
    for one in sorted(made, key=lambda ready: (ready.ready_s, ready.place)):
        bucket = growing.get(one.arena)
        if bucket is not None and not _takes(bucket, one, sizes, is_first=one.arena in firsts):
            closed.append(growing.pop(one.arena))
            firsts.discard(one.arena)
        if not closed and not growing:
            firsts.add(one.arena)
        growing.setdefault(one.arena, []).append(one)
    complete = sorted([*closed, *growing.values()], key=lambda bucket: (bucket[-1].ready_s, bucket[-1].place))
    return tuple(tuple(ready.place for ready in bucket) for bucket in complete)


def _takes(bucket: Sequence[Ready], one: Ready, sizes: Buckets, *, is_first: bool) -> bool:
    """Tell whether one more gradient fits into a bucket."""
    held = sum(ready.num_bytes for ready in bucket)
    in_time = not sizes.cycle_ms or one.ready_s - bucket[0].ready_s <= sizes.cycle_ms / 1000
    if not in_time or held + one.num_bytes > sizes.bucket_bytes:
        return False
    is_larger = one.num_bytes > sizes.first_bytes > held
    return not is_first or is_larger or held + one.num_bytes <= sizes.first_bytes


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
