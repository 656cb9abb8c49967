"""All-reduces along trees: everything goes up to a root and comes down again, so what one adds up all others copy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from counterpoint.fabric.algorithms.schedule import Move, Round, Rounds, Schedule, mirrored

WHOLE = range(1)


def star(num_ranks: int) -> Schedule:
    """All send to rank 0, one after the other, and get the sum back from it: a parameter server.

    Cost:
        ``2 (K-1)`` steps of ``n`` elements; rank 0 sends ``(K-1) n``, every other rank ``n``.
    """
    up = tuple((Move(rank, 0, WHOLE, "add"),) for rank in range(1, num_ranks))
    down = tuple((Move(0, rank, WHOLE, "copy"),) for rank in range(1, num_ranks))
    return Schedule(num_ranks, 1, up + down)


def binomial_tree(num_ranks: int) -> Schedule:
    """Sums meet pairwise until rank 0 has all, and go back the same way: the binary tree without an idle step.

    A node of a plain binary tree hears its two children one after the other; here its left child is itself.
    Chunks are added as ``((0+1) + (2+3)) + ((4+5) + ...)``.

    Cost:
        ``2 ceil(log2 K)`` steps of ``n`` elements; rank 0 sends ``ceil(log2 K) n``, an odd rank ``n``.

    Source:
        Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, 2005.
    """
    up = tuple(
        tuple(Move(rank, rank - gap, WHOLE, "add") for rank in range(gap, num_ranks, 2 * gap))
        for gap in (2**level for level in range((num_ranks - 1).bit_length()))
    )
    return Schedule(num_ranks, 1, up + mirrored(up))


def fixed_tree(num_shards: int) -> Schedule:
    """The members are the shards of a batch, not ranks: they are added the same way wherever they are held.

    Run it with a group that says which rank holds which shard, as :func:`shard_holders` does. Sums of shards of one
    rank need no message, so where the number of ranks divides a power of two of shards, the messages are those of
    :func:`binomial_tree` among the ranks.

    Promise:
        The same bits for any number of ranks; with a power of two of them and as many shards, also those of
        :func:`~counterpoint.fabric.algorithms.butterflies.butterfly` and of
        :func:`~counterpoint.fabric.algorithms.butterflies.halving_doubling`.

    Cost:
        A rank sends at most ``2 log2 V`` partial sums for ``V`` shards, and one where the shards are dealt evenly.
    """
    return binomial_tree(num_shards)


def shard_holders(num_shards: int, num_ranks: int) -> tuple[int, ...]:
    """Return which rank holds each shard: runs of neighbours, as even as can be.

    Example:
        >>> shard_holders(8, 3)
        (0, 0, 0, 1, 1, 1, 2, 2)
    """
    return tuple(shard * num_ranks // num_shards for shard in range(num_shards))


@dataclass(frozen=True, slots=True)
class Edge:
    """A place where a tree hands something down, ``depth`` edges from its root; ``tree`` is 0 or 1."""

    tree: int
    parent: int
    child: int
    depth: int


def double_tree(num_ranks: int, num_blocks: int = 4) -> Schedule:
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
    first = tuple(Edge(0, parent, child, depth) for parent, child, depth in in_order_tree(0, num_ranks))
    second = tuple(Edge(1, twin(e.parent, num_ranks), twin(e.child, num_ranks), e.depth) for e in first)
    down = _handed_down(first + second, num_blocks)
    up = tuple(tuple(Move(m.receiver, m.sender, m.chunks, "add") for m in moves) for moves in reversed(down))
    return Schedule(num_ranks, 2 * num_blocks, up + down)


def root_of(start: int, stop: int) -> int:
    """Return the root of the in-order tree over ranks from an even one on: an odd rank, or the only one."""
    return start if stop - start == 1 else start + 2 * ((stop - start) // 4) + 1


def in_order_tree(start: int, stop: int, depth: int = 1) -> Iterator[tuple[int, int, int]]:
    """Yield parent, child and depth of each edge of a balanced tree whose leaves are the even ranks."""
    root = root_of(start, stop)
    for first, last in ((start, root), (root + 1, stop)):
        if first < last:
            yield root, root_of(first, last), depth
            yield from in_order_tree(first, last, depth + 1)


def twin(rank: int, num_ranks: int) -> int:
    """Return who stands in the second tree where the rank stands in the first: an even one for an odd one.

    The second tree is the first one's mirror image, or, where the number of ranks is odd, the first one moved by one.
    """
    return num_ranks - 1 - rank if num_ranks % 2 == 0 else (rank + 1) % num_ranks


def two_colours(edges: Sequence[Edge]) -> tuple[int, ...]:
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


def _handed_down(edges: Sequence[Edge], num_blocks: int) -> Rounds:
    """Return the rounds in which both trees hand their blocks down; one in which nobody would move is left out."""
    rounds: defaultdict[int, Round] = defaultdict(tuple)
    for edge, colour in zip(edges, two_colours(edges), strict=True):
        for block in range(num_blocks):
            chunk = edge.tree * num_blocks + block
            at = 2 * (edge.depth - 1 + block) + colour
            rounds[at] += (Move(edge.parent, edge.child, range(chunk, chunk + 1), "copy"),)
    return tuple(rounds[at] for at in sorted(rounds))
