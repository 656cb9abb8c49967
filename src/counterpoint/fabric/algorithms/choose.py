"""Which all-reduce is cheapest for a size, its ranks and their links; the figures are measured elsewhere."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import inf

from counterpoint.errors import PlanError
from counterpoint.fabric.algorithms import formulas
from counterpoint.fabric.algorithms.butterflies import butterfly, halving_doubling
from counterpoint.fabric.algorithms.hierarchies import hierarchical
from counterpoint.fabric.algorithms.rings import pipelined_ring, ring, torus
from counterpoint.fabric.algorithms.schedule import Extent, Move, Schedule
from counterpoint.fabric.algorithms.trees import binomial_tree, double_tree, star
from counterpoint.world.cluster import Link

Build = Callable[[], Schedule]
PIECES = (2, 4, 8, 16, 32, 64)
MOST_ROUNDS = 256  # of a schedule that is priced move by move


@dataclass(frozen=True, slots=True)
class Network:
    """Where the ranks are and how they are joined.

    Args:
        hosts: the host of each rank.
        within: the link between any two ranks of one host.
        across: the link that leads out of a host and into it, which its ranks share.
        reduce_bytes_per_s: how fast a rank adds what came to what it has.
    """

    hosts: tuple[int, ...]
    within: Link
    across: Link
    reduce_bytes_per_s: float = inf

    @property
    def only_link(self) -> Link | None:
        """The kind of link that joins all ranks; None where there are two."""
        num_hosts = len(set(self.hosts))
        if num_hosts == 1:
            return self.within
        return self.across if num_hosts == len(self.hosts) else None


@dataclass(frozen=True, slots=True)
class Choice:
    """An all-reduce that can be built, and how long it is predicted to take.

    Args:
        name: the call that builds it, but for the ranks: ``pipelined_ring(num_segments=4)``.
        schedule: builds it.
        seconds: predicted.
    """

    name: str
    schedule: Build
    seconds: float


def choose(num_bytes: int, network: Network) -> Choice:
    """Return the all-reduce that is predicted to be the fastest; of equals, the one that needs the least.

    Where all links are alike, closed formulas say what each costs. Where there are two kinds, every candidate,
    hierarchical ones among them, is priced move by move as :func:`predicted_s` does.

    Args:
        num_bytes: size of the value on one rank.
        network: the ranks.

    Raises:
        PlanError: there are no ranks.
    """
    if not network.hosts:
        raise PlanError("a network of no ranks has nothing to reduce; give the host of each rank, such as (0, 0, 1, 1)")
    link = network.only_link
    found = _over_hosts(num_bytes, network) if link is None else _on_one_level(num_bytes, network, link)
    return min(found, key=lambda choice: choice.seconds)


def predicted_s(schedule: Schedule, num_bytes: int, network: Network) -> float:
    """Predict how long a schedule takes on a network: round by round, the slowest message and the largest addition.

    Messages that leave one host in one round, or come to it, share its link.
    """
    return sum(_round_s(moves, schedule.num_chunks, num_bytes, network) for moves in schedule.rounds)


def _round_s(moves: tuple[Move, ...], num_chunks: int, num_bytes: int, network: Network) -> float:
    seconds, added = 0.0, 0
    leaving: defaultdict[tuple[str, int], int] = defaultdict(int)
    for move in moves:
        size = Extent(num_bytes).size(move.chunks, num_chunks)
        source, target = network.hosts[move.sender], network.hosts[move.receiver]
        added = max(added, size if move.verb == "add" else 0)
        if source == target:
            seconds = max(seconds, network.within.seconds(size))
        else:
            leaving["out of", source] += size
            leaving["into", target] += size
    if leaving:
        seconds = max(seconds, network.across.seconds(max(leaving.values())))
    return seconds + added / network.reduce_bytes_per_s


def _on_one_level(num_bytes: int, network: Network, link: Link) -> Iterator[Choice]:
    num_ranks, extent = len(network.hosts), Extent(num_bytes)

    def choice(name: str, schedule: Build, cost: formulas.Cost) -> Choice:
        return Choice(name, schedule, cost.seconds(link, 1, network.reduce_bytes_per_s))

    yield choice("star()", partial(star, num_ranks), formulas.star(num_ranks, extent))
    yield choice("binomial_tree()", partial(binomial_tree, num_ranks), formulas.binomial_tree(num_ranks, extent))
    yield choice("butterfly()", partial(butterfly, num_ranks), formulas.butterfly(num_ranks, extent))
    yield choice(
        "halving_doubling()", partial(halving_doubling, num_ranks), formulas.halving_doubling(num_ranks, extent)
    )
    yield choice("torus()", partial(torus, num_ranks), formulas.torus(num_ranks, extent))
    yield choice("ring()", partial(ring, num_ranks), formulas.ring(num_ranks, extent))
    for pieces in PIECES:
        yield choice(
            f"double_tree(num_blocks={pieces})",
            partial(double_tree, num_ranks, pieces),
            formulas.double_tree(num_ranks, extent, pieces),
        )
        yield choice(
            f"pipelined_ring(num_segments={pieces})",
            partial(pipelined_ring, num_ranks, pieces),
            formulas.pipelined_ring(num_ranks, extent, pieces),
        )


def _over_hosts(num_bytes: int, network: Network) -> Iterator[Choice]:
    """Yield what may be fastest where hosts have several ranks; without rings too long to be worth their steps."""
    num_ranks = len(network.hosts)
    flat = {"binomial_tree()": binomial_tree, "butterfly()": butterfly, "halving_doubling()": halving_doubling}
    if 2 * num_ranks <= MOST_ROUNDS:
        flat |= {"star()": star, "torus()": torus, "ring()": ring}
    builds: dict[str, Build] = {name: partial(build, num_ranks) for name, build in flat.items()}
    for inter in (butterfly, halving_doubling, ring):
        builds[f"hierarchical(inter={inter.__name__})"] = partial(hierarchical, network.hosts, inter)
    for name, build in builds.items():
        yield Choice(name, build, predicted_s(build(), num_bytes, network))
