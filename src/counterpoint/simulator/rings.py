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


def collective_s(word: Collective, value_bytes: Fraction | float, link: Link) -> float:
    """Predict how long a collective occupies the links of its members.

    Args:
        word: what is called.
        value_bytes: size of what each member brings (before a share) or has in the end (after a join); encoded for a
            sum with a code.
        link: the link of each member.
    """
    num_ranks = len(word.group)
    way = find_code(word.code).kind.way if word.code else "reduce"
    match word.verb:
        case "sum" if way == "gather":
            return ring_half_s(num_ranks * value_bytes, num_ranks, link)
        case "sum" if way == "reduce twice":
            return 2 * ring_all_reduce_s(value_bytes / 2, num_ranks, link)
        case "sum" | "mean":
            return ring_all_reduce_s(value_bytes, num_ranks, link)
        case "share" | "join":
            return ring_half_s(value_bytes, num_ranks, link)
        case "copy":
            return star_copy_s(value_bytes, num_ranks, link)
