"""How large the pieces are in which gradients are summed while a backward goes on, as values and as text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite

from counterpoint.errors import PlanError

_SIZE = re.compile(r"(\d+)\s*(B|KiB|MiB|GiB|)")
_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1, "": 1}


@dataclass(frozen=True, slots=True)
class BucketConfig:
    """How gradients are put together that are summed while a backward goes on.

    Args:
        bucket_bytes: how much is summed at once, at most; a larger parameter is summed alone, and 0 sums each alone.
        first_bytes: the same for the gradients that are ready first, where it is less; a larger one joins them.
        cycle_ms: gradients that are ready later than the first of their bucket by more wait for the next; 0 for any.
        tune: whether other sizes are tried while training, and the fastest kept.

    Source:
        Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020, section 3.2.
        Sergeev and Del Balso, Horovod: fast and easy distributed deep learning in TensorFlow, 2018 (tensor fusion).

    Example:
        >>> list(BucketConfig(bucket_bytes=2**26, cycle_ms=2.5, tune=False).options())
        ['bucket=64MiB', 'cycle=2.5', 'tune=off']
    """

    bucket_bytes: int = 25 * 2**20
    first_bytes: int = 2**20
    cycle_ms: float = 0.0
    tune: bool = True

    def __post_init__(self) -> None:
        if self.bucket_bytes < 0 or self.first_bytes < 0:
            raise PlanError(
                f"buckets of {self.bucket_bytes} and first {self.first_bytes} bytes cannot be; give 0 or more bytes"
            )
        if not (self.cycle_ms >= 0 and isfinite(self.cycle_ms)):
            raise PlanError(f"cycle={self.cycle_ms} is no time; give milliseconds, such as cycle=5, or 0 for none")

    @staticmethod
    def parse(bucket: str = "", first_bucket: str = "", cycle: str = "", tune: str = "") -> BucketConfig:
        """Read the options of a plan; those that are not given are as they are by default.

        Raises:
            PlanError: one is no size, no time, or neither on nor off.
        """
        default = DEFAULT_BUCKETS
        if tune not in {"", "on", "off"}:
            raise PlanError(f"there is no tune={tune}; give tune=on or tune=off")
        try:
            cycle_ms = float(cycle) if cycle else default.cycle_ms
        except ValueError:
            raise PlanError(f"cycle={cycle} is no time; give milliseconds, such as cycle=5") from None
        return BucketConfig(
            parse_bytes("bucket", bucket) if bucket else default.bucket_bytes,
            parse_bytes("first_bucket", first_bucket) if first_bucket else default.first_bytes,
            cycle_ms,
            tune == "on" if tune else default.tune,
        )

    def options(self) -> Iterator[str]:
        """Yield what a plan has to say about them, as :meth:`parse` reads it: nothing where all is as by default."""
        default = DEFAULT_BUCKETS
        if self.bucket_bytes != default.bucket_bytes:
            yield f"bucket={format_bytes(self.bucket_bytes)}"
        if self.first_bytes != default.first_bytes:
            yield f"first_bucket={format_bytes(self.first_bytes)}"
        if self.cycle_ms != default.cycle_ms:
            yield f"cycle={self.cycle_ms:g}"
        if self.tune != default.tune:
            yield f"tune={'on' if self.tune else 'off'}"


DEFAULT_BUCKETS = BucketConfig()


@dataclass(frozen=True, slots=True)
class ReadyGrad:
    """A gradient that a backward has made.

    Args:
        place: which one.
        arena: in which of the flat buffers it lies.
        num_bytes: its size.
        ready_s: when it was made, in seconds from the beginning of the backward.
    """

    index: int
    flat_buffer: int
    num_bytes: int
    ready_s: float


def assign_buckets(grads: Iterable[ReadyGrad], sizes: BucketConfig) -> tuple[tuple[int, ...], ...]:
    """Return the places of each bucket, in the order in which buckets are complete.

    Each has gradients of one buffer, at most so many bytes as ``sizes`` says, or a single gradient that is larger. What
    the first one may not hold joins the small ones before it all the same: alone, these would leave the link idle.

    Args:
        made: all gradients, in any order.
        sizes: of the first bucket, of the others, and how far apart in time the gradients of one may be.

    Example:
        >>> grads = [ReadyGrad(index, 0, 10, 0.001 * index) for index in range(5)]
        >>> assign_buckets(grads, BucketConfig(bucket_bytes=30, first_bytes=10))
        ((0,), (1, 2, 3), (4,))
    """
    closed: list[list[ReadyGrad]] = []
    growing: dict[int, list[ReadyGrad]] = {}
    firsts: set[int] = set()
    for one in sorted(grads, key=lambda ready: (ready.ready_s, ready.index)):
        bucket = growing.get(one.flat_buffer)
        if bucket is not None and not _fits(bucket, one, sizes, is_first=one.flat_buffer in firsts):
            closed.append(growing.pop(one.flat_buffer))
            firsts.discard(one.flat_buffer)
        if not closed and not growing:
            firsts.add(one.flat_buffer)
        growing.setdefault(one.flat_buffer, []).append(one)
    complete = sorted([*closed, *growing.values()], key=lambda bucket: (bucket[-1].ready_s, bucket[-1].index))
    return tuple(tuple(ready.index for ready in bucket) for bucket in complete)


def _fits(bucket: Sequence[ReadyGrad], grad: ReadyGrad, sizes: BucketConfig, *, is_first: bool) -> bool:
    """Tell whether one more gradient fits into a bucket."""
    held = sum(ready.num_bytes for ready in bucket)
    in_time = not sizes.cycle_ms or grad.ready_s - bucket[0].ready_s <= sizes.cycle_ms / 1000
    if not in_time or held + grad.num_bytes > sizes.bucket_bytes:
        return False
    is_larger = grad.num_bytes > sizes.first_bytes > held
    return not is_first or is_larger or held + grad.num_bytes <= sizes.first_bytes


def parse_bytes(name: str, text: str) -> int:
    """Return a size in bytes.

    Raises:
        PlanError: the text is no size.

    Example:
        >>> parse_bytes("bucket", "64MiB"), parse_bytes("bucket", "1000"), parse_bytes("bucket", "0")
        (67108864, 1000, 0)
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise PlanError(f"{name}={text} is no size; give whole numbers such as {name}=64MiB, 512KiB, 1000B or 0")
    return int(found[1]) * _UNITS[found[2]]


def format_bytes(size: int) -> str:
    """Write a size in the largest unit of which it is a whole number; :func:`parse_bytes` is its opposite.

    Example:
        >>> format_bytes(64 * 2**20), format_bytes(1000), format_bytes(0)
        ('64MiB', '1000B', '0')
    """
    unit = next(unit for unit, factor in _UNITS.items() if size % factor == 0)
    return f"{size // _UNITS[unit]}{unit}" if size else "0"
