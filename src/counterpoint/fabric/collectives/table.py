"""Table of all algorithms: how each is built, its cost in closed form, and its figures in the seed document."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

from counterpoint.fabric.collectives import formulas
from counterpoint.fabric.collectives.algorithms import (
    binomial_tree,
    butterfly,
    double_tree,
    fixed_tree,
    halving_doubling,
    hierarchical,
    pipelined_ring,
    ring,
    shard_owners,
    star,
    torus,
)
from counterpoint.fabric.collectives.schedule import AllReduceSchedule, ChunkLayout

NUM_SHARDS = 32
RANKS_PER_HOST = 2


@dataclass(frozen=True, slots=True)
class AllReduceAlgorithm:
    """An algorithm for any number of ranks ``K``, with its other parameters fixed.

    Args:
        schedule: for a number of ranks.
        cost: for a number of ranks and elements, in closed form.
        steps: the same as text; ``P`` is the largest power of two up to ``K``, ``[E]`` is 1 if ``P < K``.
        messages: sent by a rank.
        elements: sent by a rank, without remainders, of ``n``.
        printed: amount per node and frequency in seed document 002, if it has the algorithm.
        group: the rank that holds each member's buffer, if not the rank of the same number.
    """

    schedule: Callable[[int], AllReduceSchedule]
    cost: Callable[[int, ChunkLayout], formulas.AllReduceCost]
    steps: str
    messages: str
    elements: str
    printed: tuple[str, str] | None = None
    group: Callable[[int], tuple[int, ...]] = lambda num_ranks: tuple(range(num_ranks))


def pairs_per_host(num_ranks: int) -> tuple[int, ...]:
    """Return hosts of two consecutive ranks; the last one also has an odd rank."""
    num_hosts = max(1, num_ranks // RANKS_PER_HOST)
    return tuple(min(rank // RANKS_PER_HOST, num_hosts - 1) for rank in range(num_ranks))


def alternate_hosts(num_ranks: int) -> tuple[int, ...]:
    """Return two hosts with alternating ranks."""
    return tuple(rank % 2 for rank in range(num_ranks))


ALGORITHMS = MappingProxyType({
    "star": AllReduceAlgorithm(
        star, formulas.star,
        "2(K-1)", "hub K-1, leaf 1", "hub (K-1)n, leaf n", ("2n", "2K"),
    ),
    "binomial_tree": AllReduceAlgorithm(
        binomial_tree, formulas.binomial_tree,
        "2 ceil(log2 K)", "[r>0] + min(trailing zeros of r, bits of K-1-r)", "n per message",
        ("2n log2 K = K", "2 log2 K"),
    ),
    "double_tree": AllReduceAlgorithm(
        double_tree, formulas.double_tree,
        "4 (floor(log2 K) + b - 1), b = 4; two less for K = 4, 2b for K = 2",
        "b (1 + children) in each tree, root b children",
        "n/2 (1 + children) in each tree, root n/2 children",
    ),
    "butterfly": AllReduceAlgorithm(
        butterfly, formulas.butterfly,
        "log2 P + 2[E]", "log2 P, +1 with a folded partner; folded 1", "n per message", ("n log2 K = K", "log2 K"),
    ),
    "halving_doubling": AllReduceAlgorithm(
        halving_doubling, formulas.halving_doubling,
        "2 log2 P + 2[E]", "2 log2 P, +1 with a folded partner; folded 1",
        "2n(P-1)/P, +n with a folded partner; folded n",
    ),
    "ring": AllReduceAlgorithm(
        ring, formulas.ring,
        "2(K-1)", "2(K-1)", "2n(K-1)/K", ("n = K", "2(K-1)"),
    ),
    "pipelined_ring": AllReduceAlgorithm(
        pipelined_ring, formulas.pipelined_ring,
        "2(K-1)s, s = 2", "2(K-1)s", "2n(K-1)/K",
    ),
    "torus": AllReduceAlgorithm(
        torus, formulas.torus,
        "2(C-1) + 2(R-1), RC = K", "2(C-1) + 2(R-1)", "2n(K-1)/K",
    ),
    "hierarchical, hosts of 2 in order": AllReduceAlgorithm(
        lambda num_ranks: hierarchical(pairs_per_host(num_ranks)),
        lambda num_ranks, extent: formulas.hierarchical(pairs_per_host(num_ranks), extent),
        "2(L-1) + 2(H-1), L the most ranks of a host",
        "2(L-1) + 2(H-1); beyond the smallest host's L: L", "2n(L-1)/L + 2n(H-1)/(HL) where hosts are alike",
    ),
    "hierarchical, 2 hosts in turns": AllReduceAlgorithm(
        lambda num_ranks: hierarchical(alternate_hosts(num_ranks), inter=butterfly),
        lambda num_ranks, extent: formulas.hierarchical(alternate_hosts(num_ranks), extent, inter=formulas.butterfly),
        "2(L-1) + 1, L the most ranks of a host",
        "2(L-1) + 1; beyond the smaller host's L: L", "2n(L-1)/L + n/L where hosts are alike",
    ),
    f"fixed_tree, {NUM_SHARDS} shards": AllReduceAlgorithm(
        lambda _num_ranks: fixed_tree(NUM_SHARDS),
        lambda num_ranks, extent: formulas.fixed_tree(shard_owners(NUM_SHARDS, num_ranks), extent),
        "as binomial_tree where K divides V = 32; else twice the levels at which a shard's sum leaves its rank",
        "1 per sum that leaves the rank, 1 per rank below it", "n per message",
        group=lambda num_ranks: shard_owners(NUM_SHARDS, num_ranks),
    ),
})  # fmt: skip
