"""All-reduce algorithms: star, trees, butterflies, rings, torus, and hierarchical ones for several hosts.

Butterflies (recursive doubling, Rabenseifner's halving-doubling) need a power of two of ranks. Otherwise ranks above
the largest power ``P`` fold: rank ``P + i`` first sends its buffer to rank ``i`` and receives the sum at the end, which
adds two steps and ``2n`` elements on the longest path. Binary blocks move less for some numbers of ranks (6 = 4 + 2),
but need as many steps as their blocks differ in size; a ring moves less than either for any number. In a butterfly,
partners compute ``a + b`` and ``b + a``, which round identically, so all ranks get the same bits.

Source:
    Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, 2005; Patarasuk and
    Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, JPDC 2009.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isqrt

from counterpoint.fabric.collectives.schedule import (
    AllReduceSchedule,
    ChunkTransfer,
    Round,
    Rounds,
    TransferOp,
    in_parallel,
    remap,
    reverse_as_broadcast,
)

WHOLE = range(1)


def star(num_ranks: int) -> AllReduceSchedule:
    """All ranks send to rank 0, one after the other, and receive the sum from it: a parameter server.

    Cost:
        ``2 (K-1)`` steps of ``n`` elements; rank 0 sends ``(K-1) n``, every other rank ``n``.
    """
    up = tuple((ChunkTransfer(rank, 0, WHOLE, "add"),) for rank in range(1, num_ranks))
    down = tuple((ChunkTransfer(0, rank, WHOLE, "copy"),) for rank in range(1, num_ranks))
    return AllReduceSchedule(num_ranks, 1, up + down)


def binomial_tree(num_ranks: int) -> AllReduceSchedule:
    """Reduce pairwise until rank 0 has the sum, then broadcast along the same tree.

    It is a binary tree without idle steps: a node's left child is itself. Chunks are added as ``((0+1) + (2+3)) +
    ((4+5) + ...)``.

    Cost:
        ``2 ceil(log2 K)`` steps of ``n`` elements; rank 0 sends ``ceil(log2 K) n``, an odd rank ``n``.

    Source:
        Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, 2005.
    """
    up = tuple(
        tuple(ChunkTransfer(rank, rank - gap, WHOLE, "add") for rank in range(gap, num_ranks, 2 * gap))
        for gap in (2**level for level in range((num_ranks - 1).bit_length()))
    )
    return AllReduceSchedule(num_ranks, 1, up + reverse_as_broadcast(up))


def fixed_tree(num_shards: int) -> AllReduceSchedule:
    """Reduce the shards of a batch along a binomial tree, so that the order of addition is independent of the ranks.

    Run it with a group that maps shards to ranks, such as :func:`shard_owners`. Sums of shards of one rank need no
    message, so if the number of ranks divides a power of two of shards, the messages are those of :func:`binomial_tree`
    among the ranks.

    Promise:
        The same bits for any number of ranks; with a power of two of them and as many shards, also those of
        :func:`butterfly` and :func:`halving_doubling`.

    Cost:
        A rank sends at most ``2 log2 V`` partial sums for ``V`` shards, and one if the shards are distributed evenly.
    """
    return binomial_tree(num_shards)


def shard_owners(num_shards: int, num_ranks: int) -> tuple[int, ...]:
    """Return the rank that holds each shard: contiguous and nearly equal ranges.

    Example:
        >>> shard_owners(8, 3)
        (0, 0, 0, 1, 1, 1, 2, 2)
    """
    return tuple(shard * num_ranks // num_shards for shard in range(num_shards))


@dataclass(frozen=True, slots=True)
class TreeEdge:
    """An edge of a tree, ``depth`` edges from the root; ``tree`` is 0 or 1."""

    tree: int
    parent: int
    child: int
    depth: int


def double_tree(num_ranks: int, num_blocks: int = 4) -> AllReduceSchedule:
    """Reduce and broadcast each half of the buffer along its own tree, in blocks.

    An inner node of one tree is a leaf of the other, so a rank has two children and two parents in total. The edges are
    colored with two colors such that no rank sends or receives twice in one color, and the colors alternate: each tree
    moves one block every two steps.

    Args:
        num_ranks: members.
        num_blocks: blocks per half.

    Cost:
        ``4 (floor(log2 K) + b - 1)`` steps of ``n / 2b`` elements, two less for four ranks, ``2b`` for two; a rank
        sends at most ``2n``.

    Source:
        Sanders, Speck and Traeff, Two-tree algorithms for full bandwidth broadcast, reduction and scan, 2009.
    """
    first = tuple(TreeEdge(0, parent, child, depth) for parent, child, depth in in_order_tree(0, num_ranks))
    second = tuple(
        TreeEdge(1, mirror_rank(edge.parent, num_ranks), mirror_rank(edge.child, num_ranks), edge.depth)
        for edge in first
    )
    down = _broadcast_rounds(first + second, num_blocks)
    up = tuple(
        tuple(ChunkTransfer(transfer.receiver, transfer.sender, transfer.chunks, "add") for transfer in moves)
        for moves in reversed(down)
    )
    return AllReduceSchedule(num_ranks, 2 * num_blocks, up + down)


def tree_root(start: int, stop: int) -> int:
    """Return the root of the in-order tree over ranks from an even one on: an odd rank, or the only one."""
    return start if stop - start == 1 else start + 2 * ((stop - start) // 4) + 1


def in_order_tree(start: int, stop: int, depth: int = 1) -> Iterator[tuple[int, int, int]]:
    """Yield parent, child and depth of each edge of a balanced tree whose leaves are the even ranks."""
    root = tree_root(start, stop)
    for first, last in ((start, root), (root + 1, stop)):
        if first < last:
            yield root, tree_root(first, last), depth
            yield from in_order_tree(first, last, depth + 1)


def mirror_rank(rank: int, num_ranks: int) -> int:
    """Return the rank at the same position in the second tree.

    The second tree is the mirror image of the first or, for an odd number of ranks, the first shifted by one.
    """
    return num_ranks - 1 - rank if num_ranks % 2 == 0 else (rank + 1) % num_ranks


def edge_coloring(edges: Sequence[TreeEdge]) -> tuple[int, ...]:
    """Return color 0 or 1 for each edge, such that edges with a common parent or a common child differ.

    A rank has at most two edges down and two up, so adjacent edges form paths and even cycles.
    """
    adjacent: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for index, edge in enumerate(edges):
        adjacent["parent", edge.parent].append(index)
        adjacent["child", edge.child].append(index)
    colors: dict[int, int] = {}
    for start in range(len(edges)):
        waiting = [(start, 0)]
        while waiting:
            index, color = waiting.pop()
            if index in colors:
                continue
            colors[index] = color
            neighbors = adjacent["parent", edges[index].parent] + adjacent["child", edges[index].child]
            waiting += [(other, 1 - color) for other in neighbors if other != index]
    return tuple(colors[index] for index in range(len(edges)))


def _broadcast_rounds(edges: Sequence[TreeEdge], num_blocks: int) -> Rounds:
    """Return the rounds in which both trees broadcast their blocks, without empty ones."""
    rounds: defaultdict[int, Round] = defaultdict(tuple)
    for edge, color in zip(edges, edge_coloring(edges), strict=True):
        for block in range(num_blocks):
            chunk = edge.tree * num_blocks + block
            round_index = 2 * (edge.depth - 1 + block) + color
            rounds[round_index] += (ChunkTransfer(edge.parent, edge.child, range(chunk, chunk + 1), "copy"),)
    return tuple(rounds[round_index] for round_index in sorted(rounds))


def butterfly(num_ranks: int) -> AllReduceSchedule:
    """Recursive doubling: each rank exchanges its whole buffer with the rank 1, 2, 4, ... away.

    Cost:
        ``log2 P`` steps of ``n`` elements, and two more if ``P < K``; a rank sends ``n log2 P``.
    """
    power = largest_power_of_two(num_ranks)
    exchanges = tuple(
        tuple(ChunkTransfer(rank, rank ^ 2**level, range(1), "add") for rank in range(power))
        for level in range(power.bit_length() - 1)
    )
    return AllReduceSchedule(num_ranks, 1, fold_remainder(exchanges, num_ranks, num_chunks=1))


def halving_doubling(num_ranks: int) -> AllReduceSchedule:
    """Rabenseifner's algorithm: reduce-scatter by recursive halving, then all-gather by recursive doubling.

    The largest exchanges are between neighbors, and every chunk is added as ``((0+1) + (2+3)) + ...``.

    Cost:
        ``2 log2 P`` steps, and two more if ``P < K``; a rank sends ``2 n (P-1) / P`` elements, and ``n`` more if it has
        a folded partner.

    Source:
        Rabenseifner, A new optimized MPI reduce algorithm, 1997; Thakur, Rabenseifner and Gropp, 2005.
    """
    power = largest_power_of_two(num_ranks)
    num_levels = power.bit_length() - 1
    halvings = tuple(
        tuple(
            ChunkTransfer(rank, rank ^ 2**level, halving_chunks(rank ^ 2**level, level + 1, num_levels), "add")
            for rank in range(power)
        )
        for level in range(num_levels)
    )
    rounds = halvings + reverse_as_broadcast(halvings)
    return AllReduceSchedule(num_ranks, power, fold_remainder(rounds, num_ranks, num_chunks=power))


def halving_chunks(rank: int, num_halvings: int, num_levels: int) -> range:
    """Return the chunks that a rank still reduces after a number of halvings; its lower bits tell which half it kept.

    Example:
        >>> [halving_chunks(1, halvings, 3) for halvings in range(4)]
        [range(0, 8), range(4, 8), range(4, 6), range(4, 5)]
    """
    start = sum((rank >> level & 1) << (num_levels - 1 - level) for level in range(num_halvings))
    return range(start, start + 2 ** (num_levels - num_halvings))


def largest_power_of_two(num_ranks: int) -> int:
    """Return the largest power of two that is not above ``num_ranks``."""
    return int(2 ** (num_ranks.bit_length() - 1))


def fold_remainder(rounds: Rounds, num_ranks: int, *, num_chunks: int) -> Rounds:
    """Add a round before and one after, which fold the ranks above a power of two."""
    power = largest_power_of_two(num_ranks)
    fold = tuple(ChunkTransfer(rank, rank - power, range(num_chunks), "add") for rank in range(power, num_ranks))
    return ((fold,) if fold else ()) + rounds + (reverse_as_broadcast((fold,)) if fold else ())


def ring(num_ranks: int) -> AllReduceSchedule:
    """Reduce-scatter and all-gather around a ring.

    Cost:
        ``2 (K-1)`` steps of ``n / K`` elements; a rank sends ``2 n (K-1) / K``, the minimum.
    """
    return AllReduceSchedule(num_ranks, num_ranks, ring_reduce_scatter(num_ranks) + ring_all_gather(num_ranks))


def pipelined_ring(num_ranks: int, num_segments: int = 2) -> AllReduceSchedule:
    """A ring whose chunks are sent in segments: one is added while the next is in flight.

    Cost:
        ``2 (K-1) s`` steps of ``n / (K s)`` elements, bytes as :func:`ring`; additions are hidden by the link.

    Source:
        Gibiansky, Bringing HPC techniques to deep learning, 2017; gloo's ``allreduce_ring_chunked``.
    """
    rounds = tuple(
        tuple(
            ChunkTransfer(
                move.sender, move.receiver, range(at := move.chunks.start * num_segments + segment, at + 1), move.op
            )
            for move in moves
        )
        for moves in ring(num_ranks).rounds
        for segment in range(num_segments)
    )
    return AllReduceSchedule(num_ranks, num_ranks * num_segments, rounds)


def torus(num_ranks: int, num_rows: int | None = None) -> AllReduceSchedule:
    """Ranks in a grid: reduce-scatter along rows, all-reduce along columns, all-gather along rows, each around rings.

    Args:
        num_ranks: members; rank ``i * num_columns + j`` is in row ``i``.
        num_rows: a divisor of ``num_ranks``; by default the largest up to its square root. A prime number of ranks has
            one row, which is :func:`ring`.

    Cost:
        ``2 (C-1) + 2 (R-1)`` steps for ``R`` rows of ``C``; a rank sends ``2 n (K-1) / K`` elements.

    Source:
        Mikami et al., Massively distributed SGD, ImageNet/ResNet-50 training in a flash, 2018.
    """
    rows, columns = torus_grid(num_ranks, num_rows)
    row_members = [[row * columns + column for column in range(columns)] for row in range(rows)]
    column_members = [[row * columns + column for row in range(rows)] for column in range(columns)]
    scatter_rounds = in_parallel(remap(ring_reduce_scatter(columns), members, scale=rows) for members in row_members)
    column_rounds = in_parallel(
        remap(ring(rows).rounds, members, first=part * rows) for part, members in enumerate(column_members)
    )
    gather_rounds = in_parallel(remap(ring_all_gather(columns), members, scale=rows) for members in row_members)
    return AllReduceSchedule(num_ranks, num_ranks, scatter_rounds + column_rounds + gather_rounds)


def torus_grid(num_ranks: int, num_rows: int | None = None) -> tuple[int, int]:
    """Return rows and columns of a torus, as square as possible.

    Example:
        >>> torus_grid(12), torus_grid(13)
        ((3, 4), (1, 13))
    """
    rows = num_rows or next(rows for rows in range(isqrt(num_ranks), 0, -1) if num_ranks % rows == 0)
    if num_ranks % rows != 0:
        raise ValueError(f"{num_ranks} ranks do not form {rows} rows; give a divisor of {num_ranks}")
    return rows, num_ranks // rows


def ring_reduce_scatter(num_ranks: int) -> Rounds:
    """Reduce-scatter around a ring; each rank ends with the sum of the chunk of its number."""
    return _ring_rounds(num_ranks, ahead=-1, op="add")


def ring_all_gather(num_ranks: int) -> Rounds:
    """All-gather around a ring of each rank's chunk of its number."""
    return _ring_rounds(num_ranks, ahead=0, op="copy")


def _ring_rounds(num_ranks: int, *, ahead: int, op: TransferOp) -> Rounds:
    """Return rounds in which every rank sends the chunk ``ahead`` of its number, then what it just received."""
    return tuple(
        tuple(
            ChunkTransfer(
                rank, (rank + 1) % num_ranks, range(chunk := (rank + ahead - round_index) % num_ranks, chunk + 1), op
            )
            for rank in range(num_ranks)
        )
        for round_index in range(num_ranks - 1)
    )


def hierarchical(hosts: Sequence[int], inter: Callable[[int], AllReduceSchedule] = ring) -> AllReduceSchedule:
    """Reduce-scatter within each host, all-reduce of each part between hosts, all-gather within each host.

    There are as many parts as the smallest host has ranks; on a larger host, the other ranks send their whole buffer to
    the owners of parts and receive the result.

    Args:
        hosts: the host of each rank, in any order: ``(0, 0, 1, 1)`` as well as ``(0, 1, 0, 1)``.
        inter: the all-reduce among the owners of one part, one per host.

    Cost:
        ``2 (L-1)`` steps of ``n / L`` elements within hosts of ``L`` ranks, and those of ``inter`` for ``n / L``
        elements between ``H`` hosts. With a ring between them, a host sends ``2 n (H-1) / H`` in total.

    Source:
        Cho et al., BlueConnect, decomposing all-reduce for deep learning on heterogeneous network hierarchy, 2019;
        within a host the pairwise exchange of Thakur, Rabenseifner and Gropp, 2005.
    """
    members = group_by_host(hosts)
    num_parts = min(map(len, members))
    inter_schedule = inter(len(members))
    num_subchunks = inter_schedule.num_chunks
    scatter_rounds = in_parallel(
        remap(intra_host_reduce_scatter(len(local_ranks), num_parts), local_ranks, scale=num_subchunks)
        for local_ranks in members
    )
    owners = [[local_ranks[part] for local_ranks in members] for part in range(num_parts)]
    inter_rounds = in_parallel(
        remap(inter_schedule.rounds, part_owners, first=part * num_subchunks) for part, part_owners in enumerate(owners)
    )
    gather_rounds = in_parallel(
        remap(intra_host_all_gather(len(local_ranks), num_parts), local_ranks, scale=num_subchunks)
        for local_ranks in members
    )
    return AllReduceSchedule(len(hosts), num_parts * num_subchunks, scatter_rounds + inter_rounds + gather_rounds)


def group_by_host(hosts: Sequence[int]) -> list[list[int]]:
    """Return the indices of each host's ranks, hosts in the order of their first rank.

    Example:
        >>> group_by_host((7, 3, 7))
        [[0, 2], [1]]
    """
    return [[rank for rank, host in enumerate(hosts) if host == this_host] for this_host in dict.fromkeys(hosts)]


def intra_host_reduce_scatter(num_ranks: int, num_parts: int) -> Rounds:
    """Reduce-scatter by direct exchange: rank ``i < num_parts`` receives part ``i`` from all others."""
    return tuple(
        tuple(
            ChunkTransfer((part + distance) % num_ranks, part, range(part, part + 1), "add")
            for part in range(num_parts)
        )
        for distance in range(1, num_ranks)
    )


def intra_host_all_gather(num_ranks: int, num_parts: int) -> Rounds:
    """All-gather by direct exchange: rank ``i < num_parts`` sends part ``i`` to all others."""
    return tuple(
        tuple(
            ChunkTransfer(part, (part + distance) % num_ranks, range(part, part + 1), "copy")
            for part in range(num_parts)
        )
        for distance in range(1, num_ranks)
    )
