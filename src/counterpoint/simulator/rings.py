"""How long collectives take on a ring, from their size, their members and the link between them."""

from __future__ import annotations

from fractions import Fraction

from counterpoint.program.codes import find_code
from counterpoint.program.instruction import Collective
from counterpoint.world.cluster import Link


def ring_all_reduce_s(value_bytes: Fraction | float, num_ranks: int, link: Link) -> float:
    """Predict how long a ring all-reduce occupies every link of the ring.

    Args:
        value_bytes: size of the value on one rank.
        num_ranks: members of the ring; 1 means nothing to do and costs 0.
        link: the slowest link of the ring.

    Returns:
        Seconds: ``2 (n-1) (latency + value_bytes / n / bandwidth)``.

    Source:
        Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, JPDC 2009.
    """
    return 2 * ring_half_s(value_bytes, num_ranks, link)


def ring_half_s(value_bytes: Fraction | float, num_ranks: int, link: Link) -> float:
    """Predict how long a ring reduce-scatter, or a ring all-gather, occupies every link of the ring.

    Args:
        value_bytes: size of the whole value.
        num_ranks: members of the ring; 1 means nothing to do and costs 0.
        link: the slowest link of the ring.

    Returns:
        Seconds: ``(n-1) (latency + value_bytes / n / bandwidth)``.

    Source:
        Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, JPDC 2009, section 3.
    """
    return (num_ranks - 1) * link.seconds(float(value_bytes) / num_ranks)


def star_copy_s(value_bytes: Fraction | float, num_ranks: int, link: Link) -> float:
    """Predict how long the first member takes to send a value to all others, one after the other.

    Returns:
        Seconds: ``(n-1) (latency + value_bytes / bandwidth)``.

    Source:
        Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, 2005, section 4.
    """
    return (num_ranks - 1) * link.seconds(float(value_bytes))


def memory_half_s(value_bytes: Fraction | float, num_ranks: int, link: Link) -> float:
    """Predict how long the ranks of a host take to add up one part each in memory, or to gather all parts.

    Args:
        value_bytes: size of the whole value.
        num_ranks: how many they are; 1 means nothing to do and costs 0.
        link: what one rank moves of what others have.

    Returns:
        Seconds: ``latency + (n-1)/n value_bytes / bandwidth``.
    """
    return link.seconds(float(value_bytes) * (num_ranks - 1) / num_ranks) if num_ranks > 1 else 0.0


def halves(word: Collective, value_bytes: Fraction | float) -> tuple[int, Fraction | float]:
    """Return how many reduce-scatters or all-gathers a collective is, and of a value of how many bytes.

    Args:
        word: what is called, but for a copy.
        value_bytes: as for :func:`collective_s`.
    """
    way = find_code(word.code).kind.way if word.code else "reduce"
    match word.verb:
        case "all_reduce" if way == "gather":
            return 1, len(word.group) * value_bytes
        case "all_reduce" if way == "reduce twice":
            return 4, value_bytes / 2
        case "all_reduce" | "all_reduce_mean":
            return 2, value_bytes
        case "reduce_scatter" | "all_gather" | "broadcast":
            return 1, value_bytes


def collective_s(word: Collective, value_bytes: Fraction | float, link: Link) -> float:
    """Predict how long a collective in a ring of its members occupies their links.

    Args:
        word: what is called.
        value_bytes: size of what each member brings (before a share) or has in the end (after a join); encoded for a
            sum with a code.
        link: the link of each member.
    """
    if word.verb == "broadcast":
        return star_copy_s(value_bytes, len(word.group), link)
    times, half_bytes = halves(word, value_bytes)
    return times * ring_half_s(half_bytes, len(word.group), link)
