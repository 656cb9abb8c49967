"""Building blocks of several systems: bucket sizes, ranks per host, and products of strategies."""

from __future__ import annotations

from counterpoint.errors import PlanError
from counterpoint.strategies.buckets import BucketConfig
from counterpoint.strategies.strategy import Strategy

_UNLIMITED_BYTES = 2**40

PER_PARAMETER = BucketConfig(bucket_bytes=0, first_bytes=0, tune=False)
"""Each parameter has its own bucket."""

SINGLE_BUCKET = BucketConfig(bucket_bytes=_UNLIMITED_BYTES, first_bytes=_UNLIMITED_BYTES, tune=False)
"""One bucket for all gradients, all-reduced after the backward."""


def uniform_buckets(num_bytes: int, *, cycle_ms: float = 0.0, tune: bool = False) -> BucketConfig:
    """Return buckets of equal size, including the first."""
    return BucketConfig(bucket_bytes=num_bytes, first_bytes=num_bytes, cycle_ms=cycle_ms, tune=tune)


def split_by_host(system: str, degree: int, per_host: int) -> tuple[int, int]:
    """Return the number of ranks of each host, and the number of hosts.

    Args:
        system: its name, for errors.
        degree: number of ranks along the axis.
        per_host: number of ranks of each host; 0 if all are on one.

    Raises:
        PlanError: the ranks cannot be distributed evenly.
    """
    inside = per_host or degree
    if inside < 1 or degree % inside:
        raise PlanError(
            f"{system}({degree}, per_host={per_host}) cannot have the same number of ranks on each host; give a "
            "per_host that "
            f"divides {degree}"
        )
    return inside, degree // inside


def drop_trivial(*strategies: Strategy) -> tuple[Strategy, ...]:
    """Return the strategies of more than one rank, or the first one if there is none."""
    found = tuple(strategy for strategy in strategies if strategy.degree > 1)
    return found or strategies[:1]
