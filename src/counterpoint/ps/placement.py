"""Placement of keys on shards: split large keys into ranges, hash small keys, distribute rows round-robin."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

SPLIT_THRESHOLD = 1_000_000
"""Number of elements from which a key is split over all shards, as in MXNet's KVStore."""

Name = TypeVar("Name", int, str, tuple[int, ...])


@dataclass(frozen=True, slots=True)
class KeyRange:
    """A range of a flattened key on one shard."""

    shard: int
    low: int
    high: int


def place_key(key: str, size: int, num_shards: int, *, split_threshold: int = SPLIT_THRESHOLD) -> tuple[KeyRange, ...]:
    """Return the ranges of a key, independently of other keys.

    Args:
        key: its name, whose hash selects the shard of a small key.
        size: its number of elements.
        num_shards: number of shards.
        split_threshold: number of elements from which the key is split evenly over all shards.

    Example:
        >>> place_key("weight", 10, 2, split_threshold=8)
        (KeyRange(shard=0, low=0, high=5), KeyRange(shard=1, low=5, high=10))
        >>> place_key("bias", 2, 2, split_threshold=8)
        (KeyRange(shard=1, low=0, high=2),)
    """
    if size >= split_threshold:
        return split_range(size, num_shards)
    return (KeyRange(zlib.crc32(key.encode()) % num_shards, 0, size),)


def split_range(size: int, num_shards: int) -> tuple[KeyRange, ...]:
    """Return one range per shard, as equal as possible."""
    bounds = [size * shard // num_shards for shard in range(num_shards + 1)]
    return tuple(KeyRange(shard, bounds[shard], bounds[shard + 1]) for shard in range(num_shards))


def shard_of_row(row: Any, num_shards: int) -> Any:  # noqa: ANN401 - a number, or a tensor of numbers
    """Return the shard of a row id, or of each of many."""
    return row % num_shards


def assign(sizes: Mapping[Name, int], num_shards: int) -> dict[Name, int]:
    """Return the shard of each name: largest first, each on the least loaded shard."""
    load = [0] * num_shards
    owner = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owner[name] = min(range(num_shards), key=lambda index: (load[index], index))
        load[owner[name]] += sizes[name]
    return owner
