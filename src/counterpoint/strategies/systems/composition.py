"""What the systems' options for putting gradients together, and for hosts, amount to."""

from __future__ import annotations

from counterpoint.errors import PlanError
from counterpoint.strategies.buckets import BucketConfig
from counterpoint.strategies.strategy import Strategy

_UNLIMITED_BYTES = 2**40

PER_PARAMETER = BucketConfig(bucket_bytes=0, first_bytes=0, tune=False)
"""Every parameter's gradient is summed by itself."""

SINGLE_BUCKET = BucketConfig(bucket_bytes=_UNLIMITED_BYTES, first_bytes=_UNLIMITED_BYTES, tune=False)
"""All gradients are summed at once, when the backward is over."""


def uniform_buckets(num_bytes: int, *, cycle_ms: float = 0.0, tune: bool = False) -> BucketConfig:
    """Return buckets of which the first is as large as all others."""
    return BucketConfig(bucket_bytes=num_bytes, first_bytes=num_bytes, cycle_ms=cycle_ms, tune=tune)


def split_by_host(system: str, degree: int, per_host: int) -> tuple[int, int]:
    """Return how many ranks are inside each host, and how many hosts there are.

    Args:
        system: what errors call it.
        degree: ranks along the axis.
        per_host: ranks inside each host; 0 where all are on one.

    Raises:
        PlanError: hosts would have different numbers of ranks.
    """
    inside = per_host or degree
    if inside < 1 or degree % inside:
        raise PlanError(
            f"{system}({degree}, per_host={per_host}) cannot have as many ranks inside each host; give a per_host that "
            f"divides {degree}"
        )
    return inside, degree // inside


def drop_trivial(*strategies: Strategy) -> tuple[Strategy, ...]:
    """Return the strategies without those along which there is one rank, unless there is no other."""
    found = tuple(strategy for strategy in strategies if strategy.degree > 1)
    return found or strategies[:1]
