"""Measure the links between ranks, and choose the all-reduce algorithm that is predicted to be the fastest."""

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
    """Hosts of the ranks, and the links between them.

    Args:
        hosts: the host of each rank.
        within: the link between any two ranks of one host.
        across: the link of a host to all others, shared by its ranks.
        reduce_bytes_per_s: how fast a rank adds received values to its own.
    """

    hosts: tuple[int, ...]
    within: Link
    across: Link
    reduce_bytes_per_s: float = inf

    @property
    def uniform_link(self) -> Link | None:
        """The link between any two ranks, if all are alike; None otherwise."""
        num_hosts = len(set(self.hosts))
        if num_hosts == 1:
            return self.within
        return self.across if num_hosts == len(self.hosts) else None


@dataclass(frozen=True, slots=True)
class AlgorithmChoice:
    """An all-reduce algorithm, and its predicted time.

    Args:
        name: the call that builds it, without the ranks: ``pipelined_ring(num_segments=4)``.
        schedule: builds it.
        seconds: predicted.
    """

    name: str
    schedule: BuildSchedule
    seconds: float


def choose_algorithm(num_bytes: int, links: HostLinks) -> AlgorithmChoice:
    """Return the all-reduce that is predicted to be the fastest; of equal ones, the first candidate.

    With one kind of link, closed formulas give the cost. With two, every candidate, hierarchical ones included, is
    priced transfer by transfer as :func:`predict_s` does.

    Args:
        num_bytes: size of the value on one rank.
        links: between the ranks.

    Raises:
        PlanError: there are no ranks.
    """
    if not links.hosts:
        raise PlanError("there are no ranks to reduce over; give the host of each rank, such as (0, 0, 1, 1)")
    link = links.uniform_link
    candidates = (
        _hierarchical_candidates(num_bytes, links) if link is None else _uniform_candidates(num_bytes, links, link)
    )
    return min(candidates, key=lambda choice: choice.seconds)


def predict_s(schedule: AllReduceSchedule, num_bytes: int, links: HostLinks) -> float:
    """Predict the seconds of a schedule: per round, the slowest message and the largest addition.

    Messages of one round that leave one host, or reach it, share its link.
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
    for num_segments in SEGMENT_COUNTS:
        yield choice(
            f"double_tree(num_blocks={num_segments})",
            partial(double_tree, num_ranks, num_segments),
            formulas.double_tree(num_ranks, extent, num_segments),
        )
        yield choice(
            f"pipelined_ring(num_segments={num_segments})",
            partial(pipelined_ring, num_ranks, num_segments),
            formulas.pipelined_ring(num_ranks, extent, num_segments),
        )


def _hierarchical_candidates(num_bytes: int, links: HostLinks) -> Iterator[AlgorithmChoice]:
    """Yield candidates for hosts with several ranks, without rings that are too long to be worth their steps."""
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
    """Measure the links between the ranks; a collective call, which returns the same on all.

    One pair of ranks on one host and one pair on two exchange small and large messages: half a round trip of a small
    one is the latency, the additional time of a large one gives the bandwidth. Other ranks wait.

    Cost:
        some tens of messages of 8 bytes and three of 2 MiB each way; 10 to 100 ms.
    """
    hosts = tuple(fabric.hosts)
    local_pair = next((pair for pair in combinations(range(len(hosts)), 2) if hosts[pair[0]] == hosts[pair[1]]), None)
    remote_pair = next((pair for pair in combinations(range(len(hosts)), 2) if hosts[pair[0]] != hosts[pair[1]]), None)
    everybody = tuple(range(fabric.num_ranks))
    own = [_measure_link(fabric, pair) if pair and fabric.rank in pair else None for pair in (local_pair, remote_pair)]
    measurements = fabric.gather_values("links", [*own, _measure_add_rate()], everybody)
    measured: list[Link] = []
    for index, pair in enumerate((local_pair, remote_pair)):
        row = measurements[pair[0]] if pair else None
        figures = row[index] if isinstance(row, list) else None
        measured.append(Link(*figures) if isinstance(figures, list) else Link(0.0, inf))
    speeds = [row[2] for row in measurements if isinstance(row, list)]
    return HostLinks(
        hosts, measured[0], measured[1], min(float(speed) for speed in speeds if isinstance(speed, int | float))
    )


def _measure_link(fabric: Fabric, pair: Sequence[int]) -> list[float]:
    """Return latency in seconds, and bytes per second, between this rank and the other of a pair."""
    peer = pair[0] if fabric.rank == pair[1] else pair[1]
    small = half_round_trip_s(fabric, peer, torch.zeros(1, dtype=torch.int64), NUM_SMALL)
    large = half_round_trip_s(fabric, peer, torch.zeros(LARGE_BYTES, dtype=torch.uint8), NUM_LARGE)
    return [small, LARGE_BYTES / max(large - small, 1e-9)]


def half_round_trip_s(fabric: Fabric, peer: int, message: Tensor, num_round_trips: int) -> float:
    """Return half of the median round-trip time; both ranks call it together.

    Args:
        fabric: of one of the two.
        peer: the other one.
        message: sent by the lower rank, and back by the other.
        num_round_trips: how many to measure.
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
    """Return the bytes per second at which a rank adds two arrays."""
    total, more = (torch.zeros(LARGE_BYTES // 4) for _ in range(2))
    return LARGE_BYTES / max(median(_time_once(lambda: total.add_(more)) for _ in range(5)), 1e-9)


def _time_once(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
