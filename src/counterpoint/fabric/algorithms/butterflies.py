"""All-reduces in which ranks exchange with a partner at twice the distance each time.

Partners add the same two numbers, one as ``a + b`` and the other as ``b + a``; rounding does not see the difference, so
both go on with the same bits.

Off powers of two the ranks above the largest power ``P`` fold: rank ``P + i`` hands its buffer to rank ``i`` first and
gets the sum from it in the end. That is two more steps and ``2n`` more on the longest path for any number of ranks.
Binary blocks move less for some numbers (6 = 4 + 2), but need as many steps as their blocks differ in size (16 more
each way for 17 = 16 + 1); where it matters, a ring moves less than either, on any number of ranks.

Source:
    Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, 2005.
"""

from __future__ import annotations

from counterpoint.fabric.algorithms.schedule import Move, Rounds, Schedule, mirrored


def butterfly(num_ranks: int) -> Schedule:
    """Recursive doubling: each rank exchanges all it has with the rank 1, 2, 4, ... away.

    Cost:
        ``log2 P`` steps of ``n`` elements, and two more off powers of two; a rank sends ``n log2 P``.
    """
    power = largest_power(num_ranks)
    exchanges = tuple(
        tuple(Move(rank, rank ^ 2**level, range(1), "add") for rank in range(power))
        for level in range(power.bit_length() - 1)
    )
    return Schedule(num_ranks, 1, folded(exchanges, num_ranks, num_chunks=1))


def halving_doubling(num_ranks: int) -> Schedule:
    """Rabenseifner's: each rank exchanges half of what it still has to add, then gathers what others have added.

    The largest exchanges are between neighbours, and every chunk is added as ``((0+1) + (2+3)) + ...``.

    Cost:
        ``2 log2 P`` steps, and two more off powers of two; a rank sends ``2 n (P-1) / P`` elements, and one with a
        folded partner ``n`` more.

    Source:
        Rabenseifner, A new optimized MPI reduce algorithm, 1997; Thakur, Rabenseifner and Gropp, 2005.
    """
    power = largest_power(num_ranks)
    num_levels = power.bit_length() - 1
    halvings = tuple(
        tuple(
            Move(rank, rank ^ 2**level, chunks_kept(rank ^ 2**level, level + 1, num_levels), "add")
            for rank in range(power)
        )
        for level in range(num_levels)
    )
    rounds = halvings + mirrored(halvings)
    return Schedule(num_ranks, power, folded(rounds, num_ranks, num_chunks=power))


def chunks_kept(rank: int, num_halvings: int, num_levels: int) -> range:
    """Return what a rank still adds up after so many halvings: its lower bits say which half it took each time.

    Example:
        >>> [chunks_kept(1, halvings, 3) for halvings in range(4)]
        [range(0, 8), range(4, 8), range(4, 6), range(4, 5)]
    """
    start = sum((rank >> level & 1) << (num_levels - 1 - level) for level in range(num_halvings))
    return range(start, start + 2 ** (num_levels - num_halvings))


def largest_power(num_ranks: int) -> int:
    """Return the largest power of two that is not above ``num_ranks``."""
    return int(2 ** (num_ranks.bit_length() - 1))


def folded(rounds: Rounds, num_ranks: int, *, num_chunks: int) -> Rounds:
    """Return rounds among a power of two of ranks with one before and one after, for the ranks above."""
    power = largest_power(num_ranks)
    fold = tuple(Move(rank, rank - power, range(num_chunks), "add") for rank in range(power, num_ranks))
    return ((fold,) if fold else ()) + rounds + (mirrored((fold,)) if fold else ())
