"""Bucket sizes of all-reduces that overlap with the backward, as values and as text; the assignment to buckets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite

from counterpoint.errors import PlanError
from counterpoint.optim.validation import parse_digits

_SIZE = re.compile(r"([0-9]+)\s*(B|KiB|MiB|GiB|)")
_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1, "": 1}


@dataclass(frozen=True, slots=True)
class BucketConfig:
    """How gradients are grouped into buckets, each of which is all-reduced at once during the backward.

    Args:
        bucket_bytes: maximum size of a bucket; a larger parameter has its own. 0 gives each parameter its own.
        first_bytes: maximum size of the first bucket, if smaller; a larger parameter may complete it.
        cycle_ms: a gradient that is ready more than this many milliseconds after the first one of its bucket starts a
            new bucket; 0 for no limit.
        tune: whether other sizes are tried during training and the fastest one is kept.

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
                f"buckets of {self.bucket_bytes} bytes, the first of {self.first_bytes}, are negative; give 0 or more"
            )
        if not (self.cycle_ms >= 0 and isfinite(self.cycle_ms)):
            raise PlanError(
                f"cycle={self.cycle_ms} is not a time; give milliseconds, such as cycle=5, or 0 for no limit"
            )

    @staticmethod
    def parse(bucket: str = "", first_bucket: str = "", cycle: str = "", tune: str = "") -> BucketConfig:
        """Parse the options of a plan; empty ones have their defaults.

        Raises:
            PlanError: one is not a size, not a time, or neither on nor off.
        """
        default = DEFAULT_BUCKETS
        if tune not in {"", "on", "off"}:
            raise PlanError(f"there is no tune={tune}; give tune=on or tune=off")
        try:
            cycle_ms = float(cycle) if cycle else default.cycle_ms
        except ValueError:
            raise PlanError(f"cycle={cycle} is not a time; give milliseconds, such as cycle=5") from None
        return BucketConfig(
            parse_bytes("bucket", bucket) if bucket else default.bucket_bytes,
            parse_bytes("first_bucket", first_bucket) if first_bucket else default.first_bytes,
            cycle_ms,
            tune == "on" if tune else default.tune,
        )

    def options(self) -> Iterator[str]:
        """Yield the options of a plan that :meth:`parse` reads; none for defaults."""
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
    """A gradient that the backward has completed.

    Args:
        index: identifies the gradient.
        flat_buffer: index of the flat buffer that holds it; a bucket is within one buffer.
        num_bytes: its size.
        ready_s: time of its completion, in seconds from the beginning of the backward.
    """

    index: int
    flat_buffer: int
    num_bytes: int
    ready_s: float


def assign_buckets(grads: Iterable[ReadyGrad], sizes: BucketConfig) -> tuple[tuple[int, ...], ...]:
    """Return the indices of the gradients of each bucket, in the order in which buckets are complete.

    Each bucket has gradients of one flat buffer, of at most the size in ``sizes``, or a single larger gradient. A large
    gradient also joins a first bucket that is not full yet: that bucket alone would be too small to use the link.

    Args:
        grads: all gradients, in any order.
        sizes: maximum sizes, and the maximum time between gradients of one bucket.

    Example:
        >>> grads = [ReadyGrad(index, 0, 10, 0.001 * index) for index in range(5)]
        >>> assign_buckets(grads, BucketConfig(bucket_bytes=30, first_bytes=10))
        ((0,), (1, 2, 3), (4,))
    """
    closed: list[list[ReadyGrad]] = []
    open_buckets: dict[int, list[ReadyGrad]] = {}
    firsts: set[int] = set()
    for grad in sorted(grads, key=lambda ready: (ready.ready_s, ready.index)):
        bucket = open_buckets.get(grad.flat_buffer)
        if bucket is not None and not _fits(bucket, grad, sizes, is_first=grad.flat_buffer in firsts):
            closed.append(open_buckets.pop(grad.flat_buffer))
            firsts.discard(grad.flat_buffer)
        if not closed and not open_buckets:
            firsts.add(grad.flat_buffer)
        open_buckets.setdefault(grad.flat_buffer, []).append(grad)
    complete = sorted([*closed, *open_buckets.values()], key=lambda bucket: (bucket[-1].ready_s, bucket[-1].index))
    return tuple(tuple(ready.index for ready in bucket) for bucket in complete)


def _fits(bucket: Sequence[ReadyGrad], grad: ReadyGrad, sizes: BucketConfig, *, is_first: bool) -> bool:
    size = sum(ready.num_bytes for ready in bucket)
    in_time = not sizes.cycle_ms or grad.ready_s - bucket[0].ready_s <= sizes.cycle_ms / 1000
    if not in_time or size + grad.num_bytes > sizes.bucket_bytes:
        return False
    completes_first = grad.num_bytes > sizes.first_bytes > size
    return not is_first or completes_first or size + grad.num_bytes <= sizes.first_bytes


def parse_bytes(name: str, text: str) -> int:
    """Parse a size in bytes.

    Raises:
        PlanError: the text is not a size.

    Example:
        >>> parse_bytes("bucket", "64MiB"), parse_bytes("bucket", "1000"), parse_bytes("bucket", "0")
        (67108864, 1000, 0)
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise PlanError(f"{name}={text} is not a size; give whole numbers such as {name}=64MiB, 512KiB, 1000B or 0")
    return parse_digits(match[1], name) * _UNITS[match[2]]


def format_bytes(size: int) -> str:
    """Format a size in the largest unit of which it is a multiple; the inverse of :func:`parse_bytes`.

    Example:
        >>> format_bytes(64 * 2**20), format_bytes(1000), format_bytes(0)
        ('64MiB', '1000B', '0')
    """
    unit = next(unit for unit, factor in _UNITS.items() if size % factor == 0)
    return f"{size // _UNITS[unit]}{unit}" if size else "0"
