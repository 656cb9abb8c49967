"""All-reduces for ranks on several hosts, where ranks of one host are nearer to each other than to all others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from counterpoint.fabric.algorithms.rings import ring
from counterpoint.fabric.algorithms.schedule import Move, Rounds, Schedule, beside, placed


def hierarchical(hosts: Sequence[int], inter: Callable[[int], Schedule] = ring) -> Schedule:
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
    members = by_host(hosts)
    num_parts = min(map(len, members))
    among = inter(len(members))
    several = among.num_chunks
    share = beside(placed(exchange(len(here), num_parts), here, scale=several) for here in members)
    holders = [[here[part] for here in members] for part in range(num_parts)]
    complete = beside(placed(among.rounds, peers, first=part * several) for part, peers in enumerate(holders))
    gather = beside(placed(hand_out(len(here), num_parts), here, scale=several) for here in members)
    return Schedule(len(hosts), num_parts * several, share + complete + gather)


def by_host(hosts: Sequence[int]) -> list[list[int]]:
    """Return the ranks of each host, hosts in the order in which they first occur.

    Example:
        >>> by_host((7, 3, 7))
        [[0, 2], [1]]
    """
    return [[rank for rank, host in enumerate(hosts) if host == here] for here in dict.fromkeys(hosts)]


def exchange(num_ranks: int, num_parts: int) -> Rounds:
    """Each of the first ``num_parts`` ranks has the sum of the part with its number, straight from all others."""
    return tuple(
        tuple(Move((part + away) % num_ranks, part, range(part, part + 1), "add") for part in range(num_parts))
        for away in range(1, num_ranks)
    )


def hand_out(num_ranks: int, num_parts: int) -> Rounds:
    """The part of each of the first ``num_parts`` ranks is everywhere, straight from its holder."""
    return tuple(
        tuple(Move(part, (part + away) % num_ranks, range(part, part + 1), "copy") for part in range(num_parts))
        for away in range(1, num_ranks)
    )
