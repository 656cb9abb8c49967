"""Sums over the parts of a batch: the same bits, however many workers have computed them.

What floating point numbers add up to depends on the order. Here it is a tree over the parts, which their number alone
says. A worker has a run of parts, and so some whole subtrees; whoever adds up a range of the gradient gets the subtrees
of all workers and goes on where these have stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import torch
from torch import Tensor

from counterpoint.data.sampler import split
from counterpoint.fabric.fingerprint import dtype_name
from counterpoint.server.working.circle import Circle


@dataclass(frozen=True, slots=True, eq=False)
class Subtree:
    """The sum of some adjacent parts.

    Args:
        start: the first of them, a multiple of ``size``.
        size: how many, a power of two.
        value: their sum; it may be added to where it lies.
    """

    start: int
    size: int
    value: Tensor


def add(trees: list[Subtree], tree: Subtree) -> None:
    """The subtree is the last one; two that are the halves of a larger one have become that one.

    Args:
        trees: those before, adjacent and in order.
        tree: the next one.

    Example:
        >>> trees = []
        >>> for part in range(7):
        ...     add(trees, Subtree(part, 1, torch.tensor([2.0**part])))
        >>> [(tree.start, tree.size, float(tree.value)) for tree in trees]
        [(0, 4, 15.0), (4, 2, 48.0), (6, 1, 64.0)]
    """
    while trees and trees[-1].size == tree.size and trees[-1].start % (2 * tree.size) == 0:
        left = trees.pop()
        tree = Subtree(left.start, 2 * tree.size, left.value.add_(tree.value))
    trees.append(tree)


def total(trees: Sequence[Subtree]) -> Tensor:
    """Return the sum of all parts: what is left of the tree, from its right end on."""
    value = trees[-1].value
    for tree in reversed(trees[:-1]):
        value = tree.value.add_(value)
    return value


def subtrees(start: int, stop: int) -> list[tuple[int, int]]:
    """Return start and size of the subtrees that a run of parts becomes.

    Example:
        >>> subtrees(3, 7)
        [(3, 1), (4, 2), (6, 1)]
    """
    found = []
    while start < stop:
        size = 1
        while start % (2 * size) == 0 and start + 2 * size <= stop:
            size *= 2
        found.append((start, size))
        start += size
    return found


def sum_of_parts(circle: Circle, trees: Sequence[Subtree], num_parts: int, length: int, dtype: torch.dtype) -> Tensor:
    """Return the sum over all parts of a batch, which member ``i`` has run ``i`` of, cut as evenly as can be.

    Each member adds up a range of it, and tells it to the others.

    Args:
        circle: the members.
        trees: the subtrees of this member's run; they are used up.
        num_parts: of all members together.
        length: of the sum, a flat tensor.
        dtype: of the sum.

    Cost:
        with as many parts as members, each sends ``2 (n - 1) / n`` of the sum, as a ring does; with more of them, the
        first half of that once for each subtree of a run, of which there are at most ``2 log2(parts)``.
    """
    fabric = circle.fabric
    count, label = fabric.num_ranks, f"gradients in {dtype_name(dtype)}"
    if count == 1:
        return total(trees)
    bounds = [length * member // count for member in range(count + 1)]
    ranges = list(pairwise(bounds))
    runs = [subtrees(*run) for run in split(num_parts, count)]
    counts = [[len(run) * (stop - start) for start, stop in ranges] for run in runs]
    pieces = [tree.value[start:stop] for start, stop in ranges for tree in trees]
    own = torch.cat(pieces) if pieces else torch.empty(0, dtype=dtype)
    received, work = fabric.all_to_all(label, own, counts, circle.group)
    circle.settle(work)
    low, high = ranges[fabric.rank]
    mine: list[Subtree] = []
    for at, (start, size) in enumerate(chain.from_iterable(runs)):
        add(mine, Subtree(start, size, received[at * (high - low) : (at + 1) * (high - low)]))
    whole = torch.empty(length, dtype=dtype)
    whole[low:high] = total(mine)
    circle.settle(fabric.all_gather(label, whole, bounds, circle.group))
    return whole
