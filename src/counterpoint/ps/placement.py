"""Which shard keeps what: large keys are cut into ranges, rows are dealt out, small keys fill up the emptiest shard."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

SPLIT_THRESHOLD = 1_000_000
"""Elements from which a key is cut, as in MXNet's KVStore."""

Name = TypeVar("Name", int, str, tuple[int, ...])


@dataclass(frozen=True, slots=True)
class KeyRange:
    """A range of a key, as a flat tensor, on a shard."""

    shard: int
    low: int
    high: int


def place_keys(
    sizes: Mapping[str, int], num_shards: int, *, split_threshold: int = SPLIT_THRESHOLD
) -> dict[str, tuple[KeyRange, ...]]:
    """Return where each key is kept.

    Args:
        sizes: elements of each key.
        num_shards: shards there are.
        bound: from so many elements on, a key is spread over all shards, as evenly as can be.

    Example:
        >>> place({"large": 10, "small": 2, "tiny": 1}, 2, bound=8)["large"]
        (Place(shard=0, low=0, high=5), Place(shard=1, low=5, high=10))
        >>> place({"large": 10, "small": 2, "tiny": 1}, 2, bound=8)["tiny"]
        (Place(shard=1, low=0, high=1),)
    """
    small = {key: size for key, size in sizes.items() if size < split_threshold}
    owner = assign(small, num_shards)
    return {
        key: (KeyRange(owner[key], 0, size),) if key in small else split_range(size, num_shards)
        for key, size in sizes.items()
    }


def place_key(key: str, size: int, num_shards: int, *, split_threshold: int = SPLIT_THRESHOLD) -> tuple[KeyRange, ...]:
    """Return where a key is kept by itself, whatever other keys there are.

    Args:
        key: its name, which chooses the shard of a small key.
        size: its elements.
        num_shards: shards there are.
        bound: from so many elements on, it is spread over all shards, as evenly as can be.

    Example:
        >>> home("weight", 10, 2, bound=8)
        (Place(shard=0, low=0, high=5), Place(shard=1, low=5, high=10))
        >>> home("bias", 2, 2, bound=8)
        (Place(shard=1, low=0, high=2),)
    """
    if size >= split_threshold:
        return split_range(size, num_shards)
    return (KeyRange(zlib.crc32(key.encode()) % num_shards, 0, size),)


def split_range(size: int, num_shards: int) -> tuple[KeyRange, ...]:
    """Return one range for each shard, as equal as can be."""
    bounds = [size * shard // num_shards for shard in range(num_shards + 1)]
    return tuple(KeyRange(shard, bounds[shard], bounds[shard + 1]) for shard in range(num_shards))


def shard_of_row(row: Any, num_shards: int) -> Any:  # noqa: ANN401 - a number, or a tensor of numbers
    """Return where a row of a table is kept, or each of many."""
    return row % num_shards


def assign(sizes: Mapping[Name, int], num_shards: int) -> dict[Name, int]:
    """Return the shard of each name: the largest first, each to the shard with the least."""
    load = [0] * num_shards
    owner = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owner[name] = min(range(num_shards), key=lambda index: (load[index], index))
        load[owner[name]] += sizes[name]
    return owner
