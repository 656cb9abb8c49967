"""All-reduces along trees: everything goes up to a root and comes down again, so what one adds up all others copy.

All-reduces in which ranks exchange with a partner at twice the distance each time.

Partners add the same two numbers, one as ``a + b`` and the other as ``b + a``; rounding does not see the difference, so
both go on with the same bits.

Off powers of two the ranks above the largest power ``P`` fold: rank ``P + i`` hands its buffer to rank ``i`` first and
gets the sum from it in the end. That is two more steps and ``2n`` more on the longest path for any number of ranks.
Binary blocks move less for some numbers (6 = 4 + 2), but need as many steps as their blocks differ in size (16 more
each way for 17 = 16 + 1); where it matters, a ring moves less than either, on any number of ranks.

Source:
    Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, 2005.

All-reduces around rings: every rank sends to the next one only, and none sends more than ``2n``.

Each chunk is added up on its way around by one rank after the other, and copied from the last of them.

Source:
    Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, JPDC 2009.

All-reduces for ranks on several hosts, where ranks of one host are nearer to each other than to all others.
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
    """All send to rank 0, one after the other, and get the sum back from it: a parameter server.

    Cost:
        ``2 (K-1)`` steps of ``n`` elements; rank 0 sends ``(K-1) n``, every other rank ``n``.
    """
    up = tuple((ChunkTransfer(rank, 0, WHOLE, "add"),) for rank in range(1, num_ranks))
    down = tuple((ChunkTransfer(0, rank, WHOLE, "copy"),) for rank in range(1, num_ranks))
    return AllReduceSchedule(num_ranks, 1, up + down)


def binomial_tree(num_ranks: int) -> AllReduceSchedule:
    """Sums meet pairwise until rank 0 has all, and go back the same way: the binary tree without an idle step.

    A node of a plain binary tree hears its two children one after the other; here its left child is itself.
    Chunks are added as ``((0+1) + (2+3)) + ((4+5) + ...)``.

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
    """The members are the shards of a batch, not ranks: they are added the same way wherever they are held.

    Run it with a group that says which rank holds which shard, as :func:`shard_owners` does. Sums of shards of one
    rank need no message, so where the number of ranks divides a power of two of shards, the messages are those of
    :func:`binomial_tree` among the ranks.

    Promise:
        The same bits for any number of ranks; with a power of two of them and as many shards, also those of
        :func:`~counterpoint.fabric.collectives.algorithms.butterfly` and of
        :func:`~counterpoint.fabric.collectives.algorithms.halving_doubling`.

    Cost:
        A rank sends at most ``2 log2 V`` partial sums for ``V`` shards, and one where the shards are dealt evenly.
    """
    return binomial_tree(num_shards)


def shard_owners(num_shards: int, num_ranks: int) -> tuple[int, ...]:
    """Return which rank holds each shard: runs of neighbours, as even as can be.

    Example:
        >>> shard_holders(8, 3)
        (0, 0, 0, 1, 1, 1, 2, 2)
    """
    return tuple(shard * num_ranks // num_shards for shard in range(num_shards))


@dataclass(frozen=True, slots=True)
class TreeEdge:
    """A place where a tree hands something down, ``depth`` edges from its root; ``tree`` is 0 or 1."""

    tree: int
    parent: int
    child: int
    depth: int


def double_tree(num_ranks: int, num_blocks: int = 4) -> AllReduceSchedule:
    """Each half of the buffer goes along a tree of its own, in blocks; who is inner in one tree is a leaf of the other.

    So a rank sends to two children in all and has two parents. The edges get two colours such that no rank sends or
    receives twice in one colour, and take turns: each tree moves one block every two steps.

    Args:
        num_ranks: members.
        num_blocks: into which each half is cut.

    Cost:
        ``4 (floor(log2 K) + b - 1)`` steps of ``n / 2b`` elements, two less for four ranks, ``2b`` for two; a rank
        sends at most ``2n``.

    Source:
        Sanders, Speck and Traeff, Two-tree algorithms for full bandwidth broadcast, reduction and scan, 2009.
    """
    first = tuple(TreeEdge(0, parent, child, depth) for parent, child, depth in in_order_tree(0, num_ranks))
    second = tuple(
        TreeEdge(1, mirror_rank(e.parent, num_ranks), mirror_rank(e.child, num_ranks), e.depth) for e in first
    )
    down = _broadcast_rounds(first + second, num_blocks)
    up = tuple(tuple(ChunkTransfer(m.receiver, m.sender, m.chunks, "add") for m in moves) for moves in reversed(down))
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
    """Return who stands in the second tree where the rank stands in the first: an even one for an odd one.

    The second tree is the first one's mirror image, or, where the number of ranks is odd, the first one moved by one.
    """
    return num_ranks - 1 - rank if num_ranks % 2 == 0 else (rank + 1) % num_ranks


def edge_coloring(edges: Sequence[TreeEdge]) -> tuple[int, ...]:
    """Return 0 or 1 per edge, different where two edges have the same parent or the same child.

    A rank has at most two edges down and two up, so edges that meet form paths and circles of even length.
    """
    meeting: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for index, edge in enumerate(edges):
        meeting["parent", edge.parent].append(index)
        meeting["child", edge.child].append(index)
    colours: dict[int, int] = {}
    for start in range(len(edges)):
        waiting = [(start, 0)]
        while waiting:
            index, colour = waiting.pop()
            if index in colours:
                continue
            colours[index] = colour
            near = meeting["parent", edges[index].parent] + meeting["child", edges[index].child]
            waiting += [(other, 1 - colour) for other in near if other != index]
    return tuple(colours[index] for index in range(len(edges)))


def _broadcast_rounds(edges: Sequence[TreeEdge], num_blocks: int) -> Rounds:
    """Return the rounds in which both trees hand their blocks down; one in which nobody would move is left out."""
    rounds: defaultdict[int, Round] = defaultdict(tuple)
    for edge, colour in zip(edges, edge_coloring(edges), strict=True):
        for block in range(num_blocks):
            chunk = edge.tree * num_blocks + block
            at = 2 * (edge.depth - 1 + block) + colour
            rounds[at] += (ChunkTransfer(edge.parent, edge.child, range(chunk, chunk + 1), "copy"),)
    return tuple(rounds[at] for at in sorted(rounds))


def butterfly(num_ranks: int) -> AllReduceSchedule:
    """Recursive doubling: each rank exchanges all it has with the rank 1, 2, 4, ... away.

    Cost:
        ``log2 P`` steps of ``n`` elements, and two more off powers of two; a rank sends ``n log2 P``.
    """
    power = largest_power_of_two(num_ranks)
    exchanges = tuple(
        tuple(ChunkTransfer(rank, rank ^ 2**level, range(1), "add") for rank in range(power))
        for level in range(power.bit_length() - 1)
    )
    return AllReduceSchedule(num_ranks, 1, fold_remainder(exchanges, num_ranks, num_chunks=1))


def halving_doubling(num_ranks: int) -> AllReduceSchedule:
    """Rabenseifner's: each rank exchanges half of what it still has to add, then gathers what others have added.

    The largest exchanges are between neighbours, and every chunk is added as ``((0+1) + (2+3)) + ...``.

    Cost:
        ``2 log2 P`` steps, and two more off powers of two; a rank sends ``2 n (P-1) / P`` elements, and one with a
        folded partner ``n`` more.

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
    """Return what a rank still adds up after so many halvings: its lower bits say which half it took each time.

    Example:
        >>> [chunks_kept(1, halvings, 3) for halvings in range(4)]
        [range(0, 8), range(4, 8), range(4, 6), range(4, 5)]
    """
    start = sum((rank >> level & 1) << (num_levels - 1 - level) for level in range(num_halvings))
    return range(start, start + 2 ** (num_levels - num_halvings))


def largest_power_of_two(num_ranks: int) -> int:
    """Return the largest power of two that is not above ``num_ranks``."""
    return int(2 ** (num_ranks.bit_length() - 1))


def fold_remainder(rounds: Rounds, num_ranks: int, *, num_chunks: int) -> Rounds:
    """Return rounds among a power of two of ranks with one before and one after, for the ranks above."""
    power = largest_power_of_two(num_ranks)
    fold = tuple(ChunkTransfer(rank, rank - power, range(num_chunks), "add") for rank in range(power, num_ranks))
    return ((fold,) if fold else ()) + rounds + (reverse_as_broadcast((fold,)) if fold else ())


def ring(num_ranks: int) -> AllReduceSchedule:
    """Every chunk goes around twice, once to be added up and once to be copied.

    Cost:
        ``2 (K-1)`` steps of ``n / K`` elements; a rank sends ``2 n (K-1) / K``, the least that is possible.
    """
    return AllReduceSchedule(num_ranks, num_ranks, ring_reduce_scatter(num_ranks) + ring_all_gather(num_ranks))


def pipelined_ring(num_ranks: int, num_segments: int = 2) -> AllReduceSchedule:
    """A ring whose chunks travel in segments: while one is on its way, the one before is added.

    Cost:
        ``2 (K-1) s`` steps of ``n / (K s)`` elements, bytes as :func:`ring`; adding is hidden behind the link.

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
    """Ranks in a grid: rings along the rows share the sum, rings along the columns complete it, the rows gather it.

    Args:
        num_ranks: members; rank ``i * num_columns + j`` stands in row ``i``.
        num_rows: a divisor of ``num_ranks``; by default the largest up to its root. A prime number of ranks has one
            row, which is :func:`ring`.

    Cost:
        ``2 (C-1) + 2 (R-1)`` steps for ``R`` rows of ``C``; a rank sends ``2 n (K-1) / K`` elements.

    Source:
        Mikami et al., Massively distributed SGD, ImageNet/ResNet-50 training in a flash, 2018.
    """
    rows, columns = torus_grid(num_ranks, num_rows)
    across = [[row * columns + column for column in range(columns)] for row in range(rows)]
    down = [[row * columns + column for row in range(rows)] for column in range(columns)]
    share = in_parallel(remap(ring_reduce_scatter(columns), members, scale=rows) for members in across)
    complete = in_parallel(remap(ring(rows).rounds, members, first=part * rows) for part, members in enumerate(down))
    gather = in_parallel(remap(ring_all_gather(columns), members, scale=rows) for members in across)
    return AllReduceSchedule(num_ranks, num_ranks, share + complete + gather)


def torus_grid(num_ranks: int, num_rows: int | None = None) -> tuple[int, int]:
    """Return the rows and columns of a torus, as square as the number of ranks allows.

    Example:
        >>> grid(12), grid(13)
        ((3, 4), (1, 13))
    """
    rows = num_rows or next(rows for rows in range(isqrt(num_ranks), 0, -1) if num_ranks % rows == 0)
    if num_ranks % rows != 0:
        raise ValueError(f"{num_ranks} ranks do not stand in {rows} rows; give a divisor of {num_ranks}")
    return rows, num_ranks // rows


def ring_reduce_scatter(num_ranks: int) -> Rounds:
    """Each rank has the sum of one chunk, the one with its number."""
    return _ring_rounds(num_ranks, ahead=-1, op="add")


def ring_all_gather(num_ranks: int) -> Rounds:
    """Each rank's chunk, the one with its number, is everywhere."""
    return _ring_rounds(num_ranks, ahead=0, op="copy")


def _ring_rounds(num_ranks: int, *, ahead: int, op: TransferOp) -> Rounds:
    """Return rounds in which every rank first sends the chunk ``ahead`` of its number, and then what just came."""
    return tuple(
        tuple(
            ChunkTransfer(
                rank, (rank + 1) % num_ranks, range(chunk := (rank + ahead - turn) % num_ranks, chunk + 1), op
            )
            for rank in range(num_ranks)
        )
        for turn in range(num_ranks - 1)
    )


def hierarchical(hosts: Sequence[int], inter: Callable[[int], AllReduceSchedule] = ring) -> AllReduceSchedule:
    """Each host shares its sum among its ranks, the holders of one part complete it across hosts, each host gathers.

    There are as many parts as the smallest host has ranks; on a larger host the ranks beyond that number give all they
    have to the others and get the result from them.

    Args:
        hosts: the host of each rank, in any order: ``(0, 0, 1, 1)`` as well as ``(0, 1, 0, 1)``.
        inter: the all-reduce among the holders of one part, one on each host.

    Cost:
        ``2 (L-1)`` steps of ``n / L`` elements within hosts of ``L`` ranks, and those of ``inter`` for ``n / L``
        elements between ``H`` hosts. With a ring between them, a host sends ``2 n (H-1) / H`` in all.

    Source:
        Cho et al., BlueConnect, decomposing all-reduce for deep learning on heterogeneous network hierarchy, 2019;
        within a host the pairwise exchange of Thakur, Rabenseifner and Gropp, 2005.
    """
    members = group_by_host(hosts)
    num_parts = min(map(len, members))
    among = inter(len(members))
    several = among.num_chunks
    share = in_parallel(remap(intra_host_reduce_scatter(len(here), num_parts), here, scale=several) for here in members)
    holders = [[here[part] for here in members] for part in range(num_parts)]
    complete = in_parallel(remap(among.rounds, peers, first=part * several) for part, peers in enumerate(holders))
    gather = in_parallel(remap(intra_host_all_gather(len(here), num_parts), here, scale=several) for here in members)
    return AllReduceSchedule(len(hosts), num_parts * several, share + complete + gather)


def group_by_host(hosts: Sequence[int]) -> list[list[int]]:
    """Return the ranks of each host, hosts in the order in which they first occur.

    Example:
        >>> by_host((7, 3, 7))
        [[0, 2], [1]]
    """
    return [[rank for rank, host in enumerate(hosts) if host == here] for here in dict.fromkeys(hosts)]


def intra_host_reduce_scatter(num_ranks: int, num_parts: int) -> Rounds:
    """Each of the first ``num_state_slots`` ranks has the sum of the part with its number, straight from all others."""
    return tuple(
        tuple(ChunkTransfer((part + away) % num_ranks, part, range(part, part + 1), "add") for part in range(num_parts))
        for away in range(1, num_ranks)
    )


def intra_host_all_gather(num_ranks: int, num_parts: int) -> Rounds:
    """The part of each of the first ``num_state_slots`` ranks is everywhere, straight from its holder."""
    return tuple(
        tuple(
            ChunkTransfer(part, (part + away) % num_ranks, range(part, part + 1), "copy") for part in range(num_parts)
        )
        for away in range(1, num_ranks)
    )
