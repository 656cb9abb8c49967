"""Costs of the algorithms in closed form: steps, messages and elements of every rank, exact for every number of ranks.

``K`` ranks, ``n`` elements, ``P`` the largest power of two up to ``K``, ``E = K - P``. Every function has the arguments
of the algorithm of its name, and uses nothing of it but how a
:class:`~counterpoint.fabric.collectives.schedule.ChunkLayout` is divided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from counterpoint.fabric.collectives.algorithms import (
    group_by_host,
    largest_power_of_two,
    mirror_rank,
    torus_grid,
    tree_root,
)
from counterpoint.fabric.collectives.schedule import ChunkLayout
from counterpoint.world.cluster import Link


@dataclass(frozen=True, slots=True)
class AllReduceCost:
    """Cost of an all-reduce.

    Args:
        steps: messages on the longest path, one after the other.
        messages: sent by each rank.
        elements: sent by each rank.
        path_elements: sum of the largest message of every step; exact if chunks have equal size, else at most one
            element too much per step.
        path_added: likewise, of additions.
        hides_adding: whether a message is added while the next is in flight.
    """

    steps: int
    messages: tuple[int, ...]
    elements: tuple[int, ...]
    path_elements: int
    path_added: int
    hides_adding: bool = False

    def seconds(self, link: Link, element_bytes: float, reduce_bytes_per_s: float) -> float:
        """Predict the time on ranks with uniform links.

        Returns:
            ``steps * alpha + path bytes * beta + added bytes * gamma``; hidden additions cost what they exceed the
            link's time.
        """
        beta, gamma = 1 / link.bytes_per_s, 1 / reduce_bytes_per_s
        exposed = max(0.0, gamma - beta) if self.hides_adding else gamma
        work_s = element_bytes * (self.path_elements * beta + self.path_added * exposed)
        return self.steps * link.latency_s + work_s


def star(num_ranks: int, layout: ChunkLayout) -> AllReduceCost:
    """Rank 0 sends to all others, which send once."""
    n, others = layout.size(range(1), 1), num_ranks - 1
    messages = (others, *[1] * others)
    return AllReduceCost(2 * others, messages, tuple(n * count for count in messages), 2 * others * n, others * n)


def binomial_tree(num_ranks: int, layout: ChunkLayout) -> AllReduceCost:
    """A rank sends once up, and down once per trailing zero bit of its number, as far as there are ranks above it."""
    n, levels = layout.size(range(1), 1), (num_ranks - 1).bit_length()
    messages = tuple(
        (rank > 0) + min(trailing_zeros(rank, levels), (num_ranks - 1 - rank).bit_length()) for rank in range(num_ranks)
    )
    return AllReduceCost(2 * levels, messages, tuple(n * count for count in messages), 2 * levels * n, levels * n)


def fixed_tree(holders: Sequence[int], layout: ChunkLayout) -> AllReduceCost:
    """Shards ``a .. b - 1`` are of one rank; it sends the sums that start at ``a``, ``a + lowbit(a)``, ... below ``b``.

    It sends down one message per shard ``v >= b`` whose ``v - lowbit(v)`` is one of its own.
    """
    n, num_shards = layout.size(range(1), 1), len(holders)
    starts = [holders.index(rank) for rank in range(max(holders) + 1)]
    paths = [subtree_starts(start, num_shards) for start in starts]
    messages = []
    for rank, start, stop in zip(range(len(starts)), starts, [*starts[1:], num_shards], strict=True):
        up = sum(shard < stop for shard in paths[rank])
        messages.append(up + sum(start <= shard & (shard - 1) < stop for shard in range(stop, num_shards)))
    levels = len({trailing_zeros(shard, num_shards) for path in paths for shard in path})
    return AllReduceCost(
        2 * levels, tuple(messages), tuple(n * count for count in messages), 2 * levels * n, levels * n
    )


def double_tree(num_ranks: int, layout: ChunkLayout, num_blocks: int = 4) -> AllReduceCost:
    """One message per block and tree up, except from the root, and one per child down (0 to 2 per tree)."""
    chunks = 2 * num_blocks
    halves = layout.size(range(num_blocks), chunks), layout.size(range(num_blocks, chunks), chunks)
    edges = [[0, 0] for _ in range(num_ranks)]
    for rank in range(num_ranks):
        for tree, position in ((0, rank), (1, mirror_rank(rank, num_ranks))):
            children = 0 if rank % 2 == 0 else 1 if rank == num_ranks - 1 else 2
            edges[position][tree] += (rank != tree_root(0, num_ranks)) + children
    half_steps = {1: 0, 2: num_blocks}.get(
        num_ranks, 2 * (num_ranks.bit_length() - 2 + num_blocks) - int(num_ranks == 4)
    )
    path = half_steps * layout.largest(chunks)
    elements = tuple(first * halves[0] + second * halves[1] for first, second in edges)
    return AllReduceCost(2 * half_steps, tuple(sum(both) * num_blocks for both in edges), elements, 2 * path, path)


def butterfly(num_ranks: int, layout: ChunkLayout) -> AllReduceCost:
    """Each of the ``P`` ranks sends ``log2 P`` times, once more to a folded partner; a folded rank sends once."""
    n, power = layout.size(range(1), 1), largest_power_of_two(num_ranks)
    levels, extra = power.bit_length() - 1, num_ranks - power
    messages = tuple(levels + (rank < extra) if rank < power else 1 for rank in range(num_ranks))
    steps = levels + 2 * (extra > 0)
    return AllReduceCost(steps, messages, tuple(n * count for count in messages), steps * n, (levels + (extra > 0)) * n)


def halving_doubling(num_ranks: int, layout: ChunkLayout) -> AllReduceCost:
    """Rank ``r`` sends all chunks except its own (``r`` with reversed bits), then 1, 2, 4, ... around that one."""
    power = largest_power_of_two(num_ranks)
    levels, extra = power.bit_length() - 1, num_ranks - power
    n = layout.size(range(power), power)
    elements = [n] * num_ranks
    for rank in range(power):
        own = reversed_bits(rank, levels)
        runs = [(own >> level << level, 2**level) for level in range(levels)]
        gathered = sum(layout.size(range(start, start + width), power) for start, width in runs)
        elements[rank] = n - layout.size(range(own, own + 1), power) + gathered + n * (rank < extra)
    messages = tuple(2 * levels + (rank < extra) if rank < power else 1 for rank in range(num_ranks))
    path = sum(layout.largest(2**level) for level in range(1, levels + 1)) + n * (extra > 0)
    return AllReduceCost(2 * levels + 2 * (extra > 0), messages, tuple(elements), 2 * path, path)


def ring(num_ranks: int, layout: ChunkLayout) -> AllReduceCost:
    """Rank ``r`` sends all chunks except its own, then all except that of the next rank."""
    return pipelined_ring(num_ranks, layout, num_segments=1)


def pipelined_ring(num_ranks: int, layout: ChunkLayout, num_segments: int = 2) -> AllReduceCost:
    """The bytes of a ring, in as many more messages as a chunk has segments."""
    n, steps = layout.size(range(1), 1), 2 * (num_ranks - 1) * num_segments
    chunks = [layout.size(range(rank, rank + 1), num_ranks) for rank in range(num_ranks)]
    elements = tuple(2 * n - chunks[rank] - chunks[(rank + 1) % num_ranks] for rank in range(num_ranks))
    path = steps // 2 * layout.largest(num_ranks * num_segments)
    return AllReduceCost(steps, (steps,) * num_ranks, elements, 2 * path, path, hides_adding=num_segments > 1)


def torus(num_ranks: int, layout: ChunkLayout, num_rows: int | None = None) -> AllReduceCost:
    """A ring along a row for all elements, around a ring along a column for one part."""
    rows, columns = torus_grid(num_ranks, num_rows)
    along = ring(columns, layout)
    down = [ring(rows, layout.subrange(part, columns)) for part in range(columns)]
    steps = along.steps + down[0].steps
    elements = tuple(along.elements[rank % columns] + down[rank % columns].elements[rank // columns]
                     for rank in range(num_ranks))  # fmt: skip
    paths = along.path_elements + down[0].path_elements, along.path_added + down[0].path_added
    return AllReduceCost(steps, (steps,) * num_ranks, elements, *paths)


def hierarchical(
    hosts: Sequence[int], layout: ChunkLayout, inter: Callable[[int, ChunkLayout], AllReduceCost] = ring
) -> AllReduceCost:
    """The owner of a part exchanges it on its host, completes it between hosts, and distributes it on its host."""
    members = group_by_host(hosts)
    largest, num_parts = max(map(len, members)), min(map(len, members))
    parts = [layout.subrange(part, num_parts) for part in range(num_parts)]
    inter_costs = [inter(len(members), part) for part in parts]
    messages, elements = [0] * len(hosts), [0] * len(hosts)
    for host, local_ranks in enumerate(members):
        for local, rank in enumerate(local_ranks):
            messages[rank], elements[rank] = num_parts, layout.size(range(1), 1)
            if local < num_parts:
                messages[rank] += len(local_ranks) - 2 + inter_costs[local].messages[host]
                elements[rank] += (len(local_ranks) - 2) * parts[local].size(range(1), 1) + inter_costs[local].elements[
                    host
                ]
    path = (largest - 1) * layout.largest(num_parts)
    return AllReduceCost(
        2 * (largest - 1) + inter_costs[0].steps,
        tuple(messages),
        tuple(elements),
        2 * path + max(cost.path_elements for cost in inter_costs),
        path + max(cost.path_added for cost in inter_costs),
    )


def trailing_zeros(number: int, limit: int) -> int:
    """Return the number of trailing zero bits, at most ``limit``, which it is for zero."""
    return min((number & -number).bit_length() - 1, limit) if number else limit


def subtree_starts(start: int, stop: int) -> list[int]:
    """Return ``start``, ``start + lowbit(start)``, ... below ``stop``.

    Example:
        >>> subtree_starts(3, 16)
        [3, 4, 8]
    """
    starts = []
    while 0 < start < stop:
        starts.append(start)
        start += start & -start
    return starts


def reversed_bits(number: int, num_bits: int) -> int:
    """Return the number with its bits reversed.

    Example:
        >>> reversed_bits(0b001, 3)
        4
    """
    return sum((number >> bit & 1) << (num_bits - 1 - bit) for bit in range(num_bits))
