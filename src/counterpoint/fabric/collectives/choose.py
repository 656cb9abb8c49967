"""Which all-reduce is cheapest for a size, its ranks and their links; the figures are measured elsewhere.

The figures that a choice of algorithm needs, measured on the ranks that will use it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from math import inf
from statistics import median

import torch
from torch import Tensor

from counterpoint.errors import PlanError
from counterpoint.fabric.collectives import formulas
from counterpoint.fabric.collectives.algorithms import (
    binomial_tree,
    butterfly,
    double_tree,
    halving_doubling,
    hierarchical,
    pipelined_ring,
    ring,
    star,
    torus,
)
from counterpoint.fabric.collectives.schedule import AllReduceSchedule, ChunkLayout, ChunkTransfer
from counterpoint.fabric.fabric import Fabric
from counterpoint.world.cluster import Link

BuildSchedule = Callable[[], AllReduceSchedule]
SEGMENT_COUNTS = (2, 4, 8, 16, 32, 64)
MAX_PRICED_ROUNDS = 256  # of a schedule that is priced move by move


@dataclass(frozen=True, slots=True)
class HostLinks:
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
    def uniform_link(self) -> Link | None:
        """The kind of link that joins all ranks; None where there are two."""
        num_hosts = len(set(self.hosts))
        if num_hosts == 1:
            return self.within
        return self.across if num_hosts == len(self.hosts) else None


@dataclass(frozen=True, slots=True)
class AlgorithmChoice:
    """An all-reduce that can be built, and how long it is predicted to take.

    Args:
        name: the call that builds it, but for the ranks: ``pipelined_ring(num_segments=4)``.
        schedule: builds it.
        seconds: predicted.
    """

    name: str
    schedule: BuildSchedule
    seconds: float


def choose_algorithm(num_bytes: int, links: HostLinks) -> AlgorithmChoice:
    """Return the all-reduce that is predicted to be the fastest; of equals, the one that needs the least.

    Where all links are alike, closed formulas say what each costs. Where there are two kinds, every candidate,
    hierarchical ones among them, is priced move by move as :func:`predict_s` does.

    Args:
        num_bytes: size of the value on one rank.
        network: the ranks.

    Raises:
        PlanError: there are no ranks.
    """
    if not links.hosts:
        raise PlanError("a network of no ranks has nothing to reduce; give the host of each rank, such as (0, 0, 1, 1)")
    link = links.uniform_link
    found = _hierarchical_candidates(num_bytes, links) if link is None else _uniform_candidates(num_bytes, links, link)
    return min(found, key=lambda choice: choice.seconds)


def predict_s(schedule: AllReduceSchedule, num_bytes: int, links: HostLinks) -> float:
    """Predict how long a schedule takes on a network: round by round, the slowest message and the largest addition.

    Messages that leave one host in one round, or come to it, share its link.
    """
    return sum(_round_s(moves, schedule.num_chunks, num_bytes, links) for moves in schedule.rounds)


def _round_s(transfers: tuple[ChunkTransfer, ...], num_chunks: int, num_bytes: int, links: HostLinks) -> float:
    seconds, added = 0.0, 0
    leaving: defaultdict[tuple[str, int], int] = defaultdict(int)
    for move in transfers:
        size = ChunkLayout(num_bytes).size(move.chunks, num_chunks)
        source, target = links.hosts[move.sender], links.hosts[move.receiver]
        added = max(added, size if move.op == "add" else 0)
        if source == target:
            seconds = max(seconds, links.within.seconds(size))
        else:
            leaving["out of", source] += size
            leaving["into", target] += size
    if leaving:
        seconds = max(seconds, links.across.seconds(max(leaving.values())))
    return seconds + added / links.reduce_bytes_per_s


def _uniform_candidates(num_bytes: int, links: HostLinks, link: Link) -> Iterator[AlgorithmChoice]:
    num_ranks, extent = len(links.hosts), ChunkLayout(num_bytes)

    def choice(name: str, schedule: BuildSchedule, cost: formulas.AllReduceCost) -> AlgorithmChoice:
        return AlgorithmChoice(name, schedule, cost.seconds(link, 1, links.reduce_bytes_per_s))

    yield choice("star()", partial(star, num_ranks), formulas.star(num_ranks, extent))
    yield choice("binomial_tree()", partial(binomial_tree, num_ranks), formulas.binomial_tree(num_ranks, extent))
    yield choice("butterfly()", partial(butterfly, num_ranks), formulas.butterfly(num_ranks, extent))
    yield choice(
        "halving_doubling()", partial(halving_doubling, num_ranks), formulas.halving_doubling(num_ranks, extent)
    )
    yield choice("torus()", partial(torus, num_ranks), formulas.torus(num_ranks, extent))
    yield choice("ring()", partial(ring, num_ranks), formulas.ring(num_ranks, extent))
    for pieces in SEGMENT_COUNTS:
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


def _hierarchical_candidates(num_bytes: int, links: HostLinks) -> Iterator[AlgorithmChoice]:
    """Yield what may be fastest where hosts have several ranks; without rings too long to be worth their steps."""
    num_ranks = len(links.hosts)
    flat = {"binomial_tree()": binomial_tree, "butterfly()": butterfly, "halving_doubling()": halving_doubling}
    if 2 * num_ranks <= MAX_PRICED_ROUNDS:
        flat |= {"star()": star, "torus()": torus, "ring()": ring}
    builds: dict[str, BuildSchedule] = {name: partial(build, num_ranks) for name, build in flat.items()}
    for inter in (butterfly, halving_doubling, ring):
        builds[f"hierarchical(inter={inter.__name__})"] = partial(hierarchical, links.hosts, inter)
    for name, build in builds.items():
        yield AlgorithmChoice(name, build, predict_s(build(), num_bytes, links))


NUM_SMALL, NUM_LARGE, LARGE_BYTES = 20, 3, 2 << 20


def measure_host_links(fabric: Fabric) -> HostLinks:
    """Return where the ranks are and how they are joined, the same figures on all of them; all call it together.

    One pair of ranks of one host and one of two hosts send each other small and large messages in turns: half a round
    trip of next to nothing is the latency, what a large one takes beyond it gives the bandwidth. Other ranks wait.

    Cost:
        some tens of messages of 8 bytes and three of 2 MiB each way; 10 to 100 ms.
    """
    hosts = tuple(fabric.hosts)
    near = next((pair for pair in combinations(range(len(hosts)), 2) if hosts[pair[0]] == hosts[pair[1]]), None)
    far = next((pair for pair in combinations(range(len(hosts)), 2) if hosts[pair[0]] != hosts[pair[1]]), None)
    everybody = tuple(range(fabric.num_ranks))
    mine = [_measure_link(fabric, pair) if pair and fabric.rank in pair else None for pair in (near, far)]
    heard = fabric.gather_values("links", [*mine, _measure_add_rate()], everybody)
    found: list[Link] = []
    for index, pair in enumerate((near, far)):
        row = heard[pair[0]] if pair else None
        figures = row[index] if isinstance(row, list) else None
        found.append(Link(*figures) if isinstance(figures, list) else Link(0.0, inf))
    speeds = [row[2] for row in heard if isinstance(row, list)]
    return HostLinks(hosts, found[0], found[1], min(float(speed) for speed in speeds if isinstance(speed, int | float)))


def _measure_link(fabric: Fabric, pair: Sequence[int]) -> list[float]:
    """Return latency in seconds and bytes per second between this rank and the other one of a pair."""
    peer = pair[0] if fabric.rank == pair[1] else pair[1]
    small = half_round_trip_s(fabric, peer, torch.zeros(1, dtype=torch.int64), NUM_SMALL)
    large = half_round_trip_s(fabric, peer, torch.zeros(LARGE_BYTES, dtype=torch.uint8), NUM_LARGE)
    return [small, LARGE_BYTES / max(large - small, 1e-9)]


def half_round_trip_s(fabric: Fabric, peer: int, message: Tensor, num_round_trips: int) -> float:
    """Return the median of half the seconds of a round trip; both ranks call it together.

    Args:
        fabric: of one of the two.
        peer: the other one.
        message: what the lower rank sends and the other one sends back.
        turns: how often.
    """

    def round_trip() -> None:
        if fabric.rank < peer:
            fabric.send(peer, "there", [message])
            fabric.recv(peer, "back")
        else:
            fabric.recv(peer, "there")
            fabric.send(peer, "back", [message])

    return median(_time_once(round_trip) for _ in range(num_round_trips)) / 2


def _measure_add_rate() -> float:
    """Return how many bytes a rank adds to others in a second."""
    total, more = (torch.zeros(LARGE_BYTES // 4) for _ in range(2))
    return LARGE_BYTES / max(median(_time_once(lambda: total.add_(more)) for _ in range(5)), 1e-9)


def _time_once(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
