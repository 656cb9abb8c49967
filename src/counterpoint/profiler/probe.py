"""What the ranks of a job, their memory and their links are like, measured by the ranks themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch

from counterpoint.errors import PlanError
from counterpoint.fabric.fabric import Fabric
from counterpoint.fabric.meeting import host_key
from counterpoint.profiler.effort import Effort
from counterpoint.profiler.probe_compute import (
    flops_by_size,
    flops_by_threads,
    layer_pieces,
    memory_pieces,
    sum_bytes,
    thread_counts,
)
from counterpoint.profiler.probe_crowds import at_once, crowd, crowding_of, parts_of_one, rounded
from counterpoint.profiler.probe_links import fitted, stream_s, trips_by_size
from counterpoint.profiler.probe_turns import message_s, turn_parts
from counterpoint.world.cluster import Cluster, Device, Level, Link, Turns
from counterpoint.world.cluster_text import write_cluster
from counterpoint.world.topology import counted

TRIES = 2
"""So often every rank computes alone; the better time counts, as what slows one down for a while is not the rank."""
PACES = 7
"""So often each rank's speed is compared with that of the others: that of a shared machine jumps, for all of them."""
UNLIKE = 0.15
"""A rank is unlike the others that was slower than usual by more than this part every time, or faster every time."""
SHARED = 1.5
"""A link that two pairs of ranks use at once, each so many times slower than alone, is shared."""
STREAM_S, STREAM_TURNS = 0.1, 8
"""To find that out, so many messages that take about so long each are sent in a row."""
LARGE_BYTES = 1 << 20
"""The slowest of several links is the one by which so many bytes take longest."""
USUAL = Effort()
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Products:
    """How fast matrices of one size were multiplied with so many threads."""

    threads: int
    size: int
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class Trips:
    """How long messages took between two ranks.

    Args:
        ranks: between which.
        level: of the cluster, whose link this is.
        messages: bytes and seconds of each size.
    """

    ranks: tuple[int, int]
    level: str
    messages: tuple[tuple[int, float], ...]

    @property
    def link(self) -> Link:
        """Two figures for all of them."""
        link = fitted(self.messages)
        return Link(rounded(link.latency_s), rounded(link.bytes_per_s))


@dataclass(frozen=True, slots=True)
class Probe:
    """What was measured.

    Args:
        cluster: what predictions need of it.
        num_ranks: how many ranks there were.
        threads: with how many each of them computes.
        products: of matrices, by threads and size.
        trips: of messages, by pairs of ranks.
    """

    cluster: Cluster
    num_ranks: int
    threads: int
    products: tuple[Products, ...]
    trips: tuple[Trips, ...]

    def to_values(self) -> dict[str, Any]:
        """Return all figures as JSON values, the cluster as the text of its file."""
        return {
            "cluster": f"{self._comment()}{write_cluster(self.cluster)}",
            "num_ranks": self.num_ranks,
            "threads": self.threads,
            "products": [asdict(one) for one in self.products],
            "links": [{**asdict(one), **asdict(one.link)} for one in self.trips],
        }

    def _comment(self) -> str:
        ranks, threads = counted(self.num_ranks, "rank"), counted(self.threads, "thread")
        lines = [f"measured by `counterpoint probe` on {ranks} with {threads} each"]
        if not self.trips:
            lines.append("one rank has no link: what stands for it was not measured")
        return "".join(f"# {line}\n" for line in lines)


def probe(
    fabric: Fabric, *, host_memory_bytes: int, most_threads: int, host: str | None = None, effort: Effort = USUAL
) -> Probe:
    """Return what was measured, the same on all ranks; all call it together, and nothing else should run meanwhile.

    Each rank multiplies matrices while the others wait; then 1, 2, ... ranks of each host do so at once, and take turns
    with short pieces of work. The first two ranks of each host send each other messages, and so do the first ranks of
    the first host and of each other one; the slowest of a level is its link.

    Args:
        fabric: the way to the other ranks.
        host_memory_bytes: what the ranks of this host may use together.
        most_threads: with how many one rank may compute at most when it is alone.
        host: what tells this rank's host from others; found out where it is left out.
        effort: how much is measured, the same on all ranks.

    Raises:
        PlanError: the hosts have not equally many ranks, or these do not stand one behind the other.

    Cost:
        some seconds for each rank of a host, half a second to ten for each pair of ranks.
    """
    hosts = _hosts(fabric, host_key() if host is None else host)
    per_host, num_hosts = hosts.count(0), len(set(hosts))
    own = _in_turn(fabric, per_host, lambda: flops_by_size(effort))
    paces = _paces(fabric, per_host, effort)
    crowds, memory, inside, turns = _rounds(fabric, hosts, per_host, effort)
    mine = {
        "threads": torch.get_num_threads(),
        "flops": list(own.items()),
        "paces": paces,
        "crowding": parts_of_one(crowds),
        "memory_crowding": parts_of_one(memory),
        "turns": [list(map(median, zip(*(parts for parts, _ in turns), strict=True))), median(s for _, s in turns)],
        "memory_bytes": host_memory_bytes // per_host // MIB * MIB,
        "memory_bytes_per_s": sum_bytes(effort) * median(rates[0] for rates in memory),
    }
    told = _everyone(fabric, "figures", mine)
    products = _products(fabric, told[0]["threads"], told[0]["flops"], most_threads, effort)
    firsts = range(0, len(hosts), per_host)
    trips = (*inside, *_trips(fabric, [(0, first) for first in firsts[1:]], "network", effort))
    is_shared = _is_shared(fabric, trips, per_host)
    first_told, speeds = told[::per_host], [median(rate for _, rate in row["flops"]) for row in told]
    device = Device(
        rounded(median(speeds)),
        min(row["memory_bytes"] for row in told),
        rounded(median(row["memory_bytes_per_s"] for row in first_told)),
    )
    cluster = Cluster(
        device,
        speeds=unlike([row["paces"] for row in told]),
        levels=_copied(fabric, per_host, _levels(trips, per_host, num_hosts, is_shared=is_shared)),
        crowding=crowding_of([row["crowding"] for row in first_told]),
        memory_crowding=crowding_of([row["memory_crowding"] for row in first_told]),
        turns=_turns([row["turns"] for row in first_told], most_threads) if per_host > 1 else None,
    )
    return Probe(cluster, fabric.num_ranks, told[0]["threads"], products, trips)


def _turns(hosts: Sequence[tuple[Sequence[float], float]], cores: int) -> Turns:
    """Return how ranks take turns, given what the first rank of each host says."""
    return Turns(cores, crowding_of([parts for parts, _ in hosts]), rounded(median(seconds for _, seconds in hosts)))


def _products(
    fabric: Fabric, threads: int, own: Sequence[tuple[int, float]], most_threads: int, effort: Effort
) -> tuple[Products, ...]:
    """Return what rank 0 has computed with its own threads, and computes with others while all wait."""
    counts = [count for count in thread_counts(most_threads) if count != threads]
    mine = flops_by_threads(counts, effort) if fabric.rank == 0 else {}
    (others, *_) = _everyone(fabric, "threads", [[count, list(row.items())] for count, row in mine.items()])
    rows = sorted([(threads, own), *((count, row) for count, row in others)], key=lambda found: found[0])
    return tuple(Products(count, size, rounded(rate)) for count, row in rows for size, rate in row)


def _everyone(fabric: Fabric, label: str, value: Any) -> list[Any]:  # noqa: ANN401 - JSON, whose parts are known here
    """Return what every rank says."""
    return list(fabric.gather_values(label, value, tuple(range(fabric.num_ranks))))


def _hosts(fabric: Fabric, host: str) -> list[int]:
    """Return the host of every rank, by its first one."""
    names = _everyone(fabric, "host", host)
    hosts = [names.index(name) for name in names]
    per_host = hosts.count(0)
    if len(hosts) % per_host or hosts != [rank - rank % per_host for rank in range(len(hosts))]:
        counts = ", ".join(str(hosts.count(first)) for first in dict.fromkeys(hosts))
        raise PlanError(
            f"the hosts have {counts} ranks, and those of rank 0, 1, ... are {hosts}; a cluster file describes hosts "
            "with equally many ranks that are numbered host by host: start them like that"
        )
    return hosts


def _in_turn(fabric: Fabric, per_host: int, work: Callable[[], dict[int, float]]) -> dict[int, float]:
    """Return the best of what the work returns here; of each host, one rank works at a time."""
    found: dict[int, float] = {}
    for turn in range(TRIES * per_host):
        fabric.barrier(tuple(range(fabric.num_ranks)))
        if turn % per_host == fabric.rank % per_host:
            found = {rows: max(rate, found.get(rows, 0.0)) for rows, rate in work().items()}
    return found


def _paces(fabric: Fabric, per_host: int, effort: Effort) -> list[float]:
    """Return how fast this rank computes while no other one of its host does, again and again in turns with them."""
    pieces, found = layer_pieces(effort), []
    for turn in range(PACES * per_host):
        fabric.barrier(tuple(range(fabric.num_ranks)))
        if turn % per_host == fabric.rank % per_host:
            found.append(at_once([pieces()]))
    return found


def _rounds(
    fabric: Fabric, hosts: Sequence[int], per_host: int, effort: Effort
) -> tuple[list[list[float]], list[list[float]], tuple[Trips, ...], list[tuple[list[float], float]]]:
    """Return what is measured in rounds, of whose figures the middle ones count: a machine's speed jumps.

    Returns:
        by round how fast each of 1, 2, ... ranks of this host computes at once, on average, and how many bytes a second
        it reads and writes then, known to its first rank; how long messages take inside each host; by round how fast
        ranks of this host are in their turns, and what a message costs between these, known to its first rank.
    """
    crowds: list[list[float]] = []
    memory: list[list[float]] = []
    inside: list[tuple[Trips, ...]] = []
    turns: list[tuple[list[float], float]] = []
    first = fabric.rank - fabric.rank % per_host
    pairs = [(first, first + 1) for first in range(0, len(hosts), per_host) if per_host > 1]
    for _ in range(effort.rounds):
        crowds.append(crowd(fabric, per_host, effort))
        memory.append(crowd(fabric, per_host, effort, memory_pieces))
        inside.append(_trips(fabric, pairs, "host", effort))
        parts = turn_parts(fabric, per_host, effort)
        is_one = per_host > 1 and fabric.rank < first + 2
        turns.append((parts, message_s(fabric, _other((first, first + 1), fabric.rank), effort) if is_one else 0.0))
    return crowds, memory, tuple(middle(rows) for rows in zip(*inside, strict=True)), turns


def _trips(fabric: Fabric, pairs: Sequence[tuple[int, int]], level: str, effort: Effort) -> tuple[Trips, ...]:
    """Return how long messages take between the ranks of each pair, one pair after the other."""
    found = []
    for pair in pairs:
        fabric.barrier(tuple(range(fabric.num_ranks)))
        mine = trips_by_size(fabric, _other(pair, fabric.rank), effort) if fabric.rank in pair else []
        told = _everyone(fabric, "trips", mine)[pair[0]]
        found.append(Trips(pair, level, tuple((int(size), float(seconds)) for size, seconds in told)))
    return tuple(found)


def middle(rows: Sequence[Trips]) -> Trips:
    """Return what messages between two ranks usually took, of the sizes that were sent every time.

    Example:
        >>> middle([Trips((0, 1), "host", ((8, seconds),)) for seconds in (3e-05, 9e-05, 4e-05)]).messages
        ((8, 4e-05),)
    """
    times = [dict(row.messages) for row in rows]
    sizes = [size for size, _ in rows[0].messages if all(size in took for took in times)]
    return replace(rows[0], messages=tuple((size, median(took[size] for took in times)) for size in sizes))


def _is_shared(fabric: Fabric, trips: Sequence[Trips], per_host: int) -> bool:
    """Return whether two ranks of the first host slow each other down when both send to the second one."""
    between = next((one.messages for one in trips if one.level == "network"), None)
    if per_host < 2 or between is None:
        return False
    pairs, took = ((0, per_host), (1, per_host + 1)), []
    message = torch.zeros(max((size for size, s in between if s <= STREAM_S), default=8), dtype=torch.uint8)
    for busy in (pairs, pairs[:1], pairs):  # the first time connects them
        fabric.barrier(tuple(range(fabric.num_ranks)))
        mine = [pair for pair in busy if fabric.rank in pair]
        seconds = stream_s(fabric, _other(mine[0], fabric.rank), message, STREAM_TURNS) if mine else 0.0
        took.append(max(_everyone(fabric, "seconds", seconds)))
    return bool(took[2] > SHARED * took[1])


def _other(pair: tuple[int, int], rank: int) -> int:
    """Return the other rank of a pair."""
    return pair[1] if rank == pair[0] else pair[0]


def _levels(trips: Sequence[Trips], per_host: int, num_hosts: int, *, is_shared: bool) -> tuple[Level, ...]:
    """Return the levels with the slowest link of each; a host of one rank has that of the network."""
    slowest = {
        name: max((one.link for one in trips if one.level == name), key=lambda link: link.seconds(LARGE_BYTES))
        for name in dict.fromkeys(one.level for one in trips)
    }
    if not slowest:
        return ()
    inner = Level("host", per_host, slowest.get("host", slowest[trips[-1].level]))
    return (inner, Level("network", num_hosts, slowest["network"], is_shared)) if num_hosts > 1 else (inner,)


def _copied(fabric: Fabric, per_host: int, levels: tuple[Level, ...]) -> tuple[Level, ...]:
    """Return the levels, the innermost with what it is: memory, where ranks of a host see each other's."""
    if per_host < 2 or fabric.hosts[0] != fabric.hosts[1]:
        return levels
    return (replace(levels[0], link=replace(levels[0].link, is_copied=True)), *levels[1:])


def unlike(paces: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return how many times as fast as usual each rank is; nothing where all are alike.

    Args:
        paces: how fast each of them was, every time.

    Example:
        >>> unlike([[4.0, 4.0, 3.0], [4.0, 3.0, 4.0], [2.0, 2.0, 2.5]])
        (1.0, 1.0, 0.5)
        >>> unlike([[4.0, 4.0, 3.0], [4.0, 3.0, 4.0], [2.0, 2.0, 4.0]])
        ()
    """
    middles = list(map(median, paces))
    usual = median(middles)
    parts = [
        rounded(middle / usual) if max(own) < (1 - UNLIKE) * usual or min(own) > (1 + UNLIKE) * usual else 1.0
        for own, middle in zip(paces, middles, strict=True)
    ]
    return tuple(parts) if set(parts) != {1.0} else ()
