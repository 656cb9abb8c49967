"""How long messages between two ranks take by their size, and the latency and bandwidth that say so.

What the ranks of a job, their memory and their links are like, measured by the ranks themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from counterpoint.errors import PlanError
from counterpoint.fabric.collectives.choose import half_round_trip_s
from counterpoint.fabric.fabric import Fabric
from counterpoint.fabric.rendezvous import host_key
from counterpoint.profiler.probe_compute import (
    ProbeConfig,
    concurrent_rate,
    contention_curve,
    layer_work,
    measure_contention,
    measure_flops_by_size,
    measure_flops_by_threads,
    measure_time_slice_rates,
    memory_work,
    relative_rates,
    round_figure,
    thread_counts,
    time_contended_message,
    vector_sum_bytes,
)
from counterpoint.world.cluster import Cluster, Device, Level, Link, TimeSlicing
from counterpoint.world.cluster_file import format_cluster
from counterpoint.world.topology import format_count

BANDWIDTH_MIN_BYTES = 1 << 17
"""From here on the bandwidth counts, and not only the latency."""
MIN_ROUND_TRIPS, MAX_ROUND_TRIPS = 3, 50
"""So often a message goes there and back, for some spans of the effort if these allow it."""
NUM_DURATIONS = 3
MAX_SIZE_S = 2.0
"""A size that would take longer is left out, and all above it."""


def time_messages_by_size(fabric: Fabric, peer: int, config: ProbeConfig) -> list[tuple[int, float]]:
    """Return by bytes how long a message takes from one rank of a pair to the other; both call it with each other.

    The lower rank says how often each size is sent and when it is enough, and has the answer; the other has none.
    """
    found: list[tuple[int, float]] = []
    for size in config.message_bytes:
        turns = _agree_on_count(fabric, peer, _num_round_trips(found, size, NUM_DURATIONS * config.duration_s))
        if turns == 0:
            break
        seconds = half_round_trip_s(fabric, peer, torch.zeros(size, dtype=torch.uint8), turns)
        found.append((size, seconds))
    return found if fabric.rank < peer else []


def time_stream(fabric: Fabric, peer: int, message: Tensor, num_messages: int) -> float:
    """Return how long it takes until the higher rank of a pair has so many messages of the lower one; both call it."""
    began = time.perf_counter()
    for _ in range(num_messages):
        if fabric.rank < peer:
            fabric.send(peer, "stream", [message])
        else:
            fabric.recv(peer, "stream")
    if fabric.rank < peer:
        fabric.recv(peer, "all are here")
    else:
        fabric.send(peer, "all are here", [message[:1]])
    return time.perf_counter() - began


def fit_link(timings: Sequence[tuple[int, float]]) -> Link:
    """Return the link by which messages of these bytes take these seconds, as nearly as two figures can say it.

    The latency is what the smallest takes; the bandwidth is what the large ones reach beyond it, all of them together.

    Example:
        >>> fitted([(8, 50e-6), (10**6, 1050e-6), (10**7, 10050e-6)])
        Link(latency_s=5e-05, bytes_per_s=1000000000.0, is_copied=False)
    """
    latency_s = timings[0][1]
    large = [trip for trip in timings if trip[0] >= BANDWIDTH_MIN_BYTES] or list(timings[-1:])
    beyond_s = sum(max(seconds - latency_s, 1e-9) for _, seconds in large)
    return Link(latency_s, float(f"{sum(size for size, _ in large) / beyond_s:.6g}"))


def _num_round_trips(found: Sequence[tuple[int, float]], size: int, span_s: float) -> int:
    """Return how often the next size is sent there and back; 0 where that would take too long."""
    if not found:
        return MAX_ROUND_TRIPS
    before, seconds = found[-1]
    trip_s = 2 * seconds * (size / before if before >= BANDWIDTH_MIN_BYTES else 1)
    if MIN_ROUND_TRIPS * trip_s > MAX_SIZE_S:
        return 0
    return max(MIN_ROUND_TRIPS, min(MAX_ROUND_TRIPS, int(span_s / trip_s)))


def _agree_on_count(fabric: Fabric, peer: int, count: int) -> int:
    """Return the number of the lower rank of a pair, on both."""
    if fabric.rank < peer:
        fabric.send(peer, "turns", [torch.tensor([count])])
        return count
    (told,) = fabric.recv(peer, "turns")
    return int(told.item())


NUM_TRIES = 2
"""So often every rank computes alone; the better time counts, as what slows one down for a while is not the rank."""
NUM_SPEED_ROUNDS = 7
"""So often each rank's speed is compared with that of the others: that of a shared machine jumps, for all of them."""
SPEED_TOLERANCE = 0.15
"""A rank is unlike the others that was slower than usual by more than this part every time, or faster every time."""
SHARED_LINK_SLOWDOWN = 1.5
"""A link that two pairs of ranks use at once, each so many times slower than alone, is shared."""
STREAM_S, STREAM_MESSAGES = 0.1, 8
"""To find that out, so many messages that take about so long each are sent in a row."""
LARGE_MESSAGE_BYTES = 1 << 20
"""The slowest of several links is the one by which so many bytes take longest."""
DEFAULT_PROBE = ProbeConfig()
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class MatmulRate:
    """How fast matrices of one size were multiplied with so many threads."""

    threads: int
    size: int
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class LinkTimings:
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
        link = fit_link(self.messages)
        return Link(round_figure(link.latency_s), round_figure(link.bytes_per_s))


@dataclass(frozen=True, slots=True)
class ProbeResult:
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
    matmul_rates: tuple[MatmulRate, ...]
    link_timings: tuple[LinkTimings, ...]

    def to_json_dict(self) -> dict[str, Any]:
        """Return all figures as JSON values, the cluster as the text of its file."""
        return {
            "cluster": f"{self._comment()}{format_cluster(self.cluster)}",
            "num_ranks": self.num_ranks,
            "threads": self.threads,
            "products": [asdict(one) for one in self.matmul_rates],
            "links": [{**asdict(one), **asdict(one.link)} for one in self.link_timings],
        }

    def _comment(self) -> str:
        ranks, threads = format_count(self.num_ranks, "rank"), format_count(self.threads, "thread")
        lines = [f"measured by `counterpoint probe` on {ranks} with {threads} each"]
        if not self.link_timings:
            lines.append("one rank has no link: what stands for it was not measured")
        return "".join(f"# {line}\n" for line in lines)


def probe_cluster(
    fabric: Fabric,
    *,
    host_memory_bytes: int,
    max_threads: int,
    host: str | None = None,
    config: ProbeConfig = DEFAULT_PROBE,
) -> ProbeResult:
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
    hosts = _find_hosts(fabric, host_key() if host is None else host)
    per_host, num_hosts = hosts.count(0), len(set(hosts))
    own = _measure_in_turn(fabric, per_host, lambda: measure_flops_by_size(config))
    paces = _measure_speeds(fabric, per_host, config)
    crowds, memory, inside, turns = _measure_rounds(fabric, hosts, per_host, config)
    mine = {
        "threads": torch.get_num_threads(),
        "flops": list(own.items()),
        "paces": paces,
        "crowding": relative_rates(crowds),
        "memory_crowding": relative_rates(memory),
        "turns": [list(map(median, zip(*(parts for parts, _ in turns), strict=True))), median(s for _, s in turns)],
        "memory_bytes": host_memory_bytes // per_host // MIB * MIB,
        "memory_bytes_per_s": vector_sum_bytes(config) * median(rates[0] for rates in memory),
    }
    told = _gather(fabric, "figures", mine)
    products = _measure_matmuls(fabric, told[0]["threads"], told[0]["flops"], max_threads, config)
    firsts = range(0, len(hosts), per_host)
    trips = (*inside, *_time_links(fabric, [(0, first) for first in firsts[1:]], "network", config))
    is_shared = _is_link_shared(fabric, trips, per_host)
    first_told, speeds = told[::per_host], [median(rate for _, rate in row["flops"]) for row in told]
    device = Device(
        round_figure(median(speeds)),
        min(row["memory_bytes"] for row in told),
        round_figure(median(row["memory_bytes_per_s"] for row in first_told)),
    )
    cluster = Cluster(
        device,
        speeds=relative_speeds([row["paces"] for row in told]),
        levels=_mark_shared_memory(fabric, per_host, _build_levels(trips, per_host, num_hosts, is_shared=is_shared)),
        compute_contention=contention_curve([row["crowding"] for row in first_told]),
        memory_contention=contention_curve([row["memory_crowding"] for row in first_told]),
        time_slicing=_time_slicing([row["turns"] for row in first_told], max_threads) if per_host > 1 else None,
    )
    return ProbeResult(cluster, fabric.num_ranks, told[0]["threads"], products, trips)


def _time_slicing(hosts: Sequence[tuple[Sequence[float], float]], cores: int) -> TimeSlicing:
    """Return how ranks take turns, given what the first rank of each host says."""
    return TimeSlicing(
        cores, contention_curve([parts for parts, _ in hosts]), round_figure(median(seconds for _, seconds in hosts))
    )


def _measure_matmuls(
    fabric: Fabric, threads: int, own: Sequence[tuple[int, float]], max_threads: int, config: ProbeConfig
) -> tuple[MatmulRate, ...]:
    """Return what rank 0 has computed with its own threads, and computes with others while all wait."""
    counts = [count for count in thread_counts(max_threads) if count != threads]
    mine = measure_flops_by_threads(counts, config) if fabric.rank == 0 else {}
    (others, *_) = _gather(fabric, "threads", [[count, list(row.items())] for count, row in mine.items()])
    rows = sorted([(threads, own), *((count, row) for count, row in others)], key=lambda found: found[0])
    return tuple(MatmulRate(count, size, round_figure(rate)) for count, row in rows for size, rate in row)


def _gather(fabric: Fabric, label: str, value: Any) -> list[Any]:  # noqa: ANN401 - JSON, whose parts are known here
    """Return what every rank says."""
    return list(fabric.gather_values(label, value, tuple(range(fabric.num_ranks))))


def _find_hosts(fabric: Fabric, host: str) -> list[int]:
    """Return the host of every rank, by its first one."""
    names = _gather(fabric, "host", host)
    hosts = [names.index(name) for name in names]
    per_host = hosts.count(0)
    if len(hosts) % per_host or hosts != [rank - rank % per_host for rank in range(len(hosts))]:
        counts = ", ".join(str(hosts.count(first)) for first in dict.fromkeys(hosts))
        raise PlanError(
            f"the hosts have {counts} ranks, and those of rank 0, 1, ... are {hosts}; a cluster file describes hosts "
            "with equally many ranks that are numbered host by host: start them like that"
        )
    return hosts


def _measure_in_turn(fabric: Fabric, per_host: int, work: Callable[[], dict[int, float]]) -> dict[int, float]:
    """Return the best of what the work returns here; of each host, one rank works at a time."""
    found: dict[int, float] = {}
    for turn in range(NUM_TRIES * per_host):
        fabric.barrier(tuple(range(fabric.num_ranks)))
        if turn % per_host == fabric.rank % per_host:
            found = {rows: max(rate, found.get(rows, 0.0)) for rows, rate in work().items()}
    return found


def _measure_speeds(fabric: Fabric, per_host: int, config: ProbeConfig) -> list[float]:
    """Return how fast this rank computes while no other one of its host does, again and again in turns with them."""
    pieces, found = layer_work(config), []
    for turn in range(NUM_SPEED_ROUNDS * per_host):
        fabric.barrier(tuple(range(fabric.num_ranks)))
        if turn % per_host == fabric.rank % per_host:
            found.append(concurrent_rate([pieces()]))
    return found


def _measure_rounds(
    fabric: Fabric, hosts: Sequence[int], per_host: int, config: ProbeConfig
) -> tuple[list[list[float]], list[list[float]], tuple[LinkTimings, ...], list[tuple[list[float], float]]]:
    """Return what is measured in rounds, of whose figures the middle ones count: a machine's speed jumps.

    Returns:
        by round how fast each of 1, 2, ... ranks of this host computes at once, on average, and how many bytes a second
        it reads and writes then, known to its first rank; how long messages take inside each host; by round how fast
        ranks of this host are in their turns, and what a message costs between these, known to its first rank.
    """
    crowds: list[list[float]] = []
    memory: list[list[float]] = []
    inside: list[tuple[LinkTimings, ...]] = []
    turns: list[tuple[list[float], float]] = []
    first = fabric.rank - fabric.rank % per_host
    pairs = [(first, first + 1) for first in range(0, len(hosts), per_host) if per_host > 1]
    for _ in range(config.num_rounds):
        crowds.append(measure_contention(fabric, per_host, config))
        memory.append(measure_contention(fabric, per_host, config, memory_work))
        inside.append(_time_links(fabric, pairs, "host", config))
        parts = measure_time_slice_rates(fabric, per_host, config)
        is_one = per_host > 1 and fabric.rank < first + 2
        turns.append(
            (parts, time_contended_message(fabric, _peer((first, first + 1), fabric.rank), config) if is_one else 0.0)
        )
    return crowds, memory, tuple(median_timings(rows) for rows in zip(*inside, strict=True)), turns


def _time_links(
    fabric: Fabric, pairs: Sequence[tuple[int, int]], level: str, config: ProbeConfig
) -> tuple[LinkTimings, ...]:
    """Return how long messages take between the ranks of each pair, one pair after the other."""
    found = []
    for pair in pairs:
        fabric.barrier(tuple(range(fabric.num_ranks)))
        mine = time_messages_by_size(fabric, _peer(pair, fabric.rank), config) if fabric.rank in pair else []
        told = _gather(fabric, "trips", mine)[pair[0]]
        found.append(LinkTimings(pair, level, tuple((int(size), float(seconds)) for size, seconds in told)))
    return tuple(found)


def median_timings(rows: Sequence[LinkTimings]) -> LinkTimings:
    """Return what messages between two ranks usually took, of the sizes that were sent every time.

    Example:
        >>> middle([Trips((0, 1), "host", ((8, seconds),)) for seconds in (3e-05, 9e-05, 4e-05)]).messages
        ((8, 4e-05),)
    """
    times = [dict(row.messages) for row in rows]
    sizes = [size for size, _ in rows[0].messages if all(size in took for took in times)]
    return replace(rows[0], messages=tuple((size, median(took[size] for took in times)) for size in sizes))


def _is_link_shared(fabric: Fabric, timings: Sequence[LinkTimings], per_host: int) -> bool:
    """Return whether two ranks of the first host slow each other down when both send to the second one."""
    between = next((one.messages for one in timings if one.level == "network"), None)
    if per_host < 2 or between is None:
        return False
    pairs, took = ((0, per_host), (1, per_host + 1)), []
    message = torch.zeros(max((size for size, s in between if s <= STREAM_S), default=8), dtype=torch.uint8)
    for busy in (pairs, pairs[:1], pairs):  # the first time connects them
        fabric.barrier(tuple(range(fabric.num_ranks)))
        mine = [pair for pair in busy if fabric.rank in pair]
        seconds = time_stream(fabric, _peer(mine[0], fabric.rank), message, STREAM_MESSAGES) if mine else 0.0
        took.append(max(_gather(fabric, "seconds", seconds)))
    return bool(took[2] > SHARED_LINK_SLOWDOWN * took[1])


def _peer(pair: tuple[int, int], rank: int) -> int:
    """Return the other rank of a pair."""
    return pair[1] if rank == pair[0] else pair[0]


def _build_levels(
    timings: Sequence[LinkTimings], per_host: int, num_hosts: int, *, is_shared: bool
) -> tuple[Level, ...]:
    """Return the levels with the slowest link of each; a host of one rank has that of the network."""
    slowest = {
        name: max(
            (one.link for one in timings if one.level == name), key=lambda link: link.seconds(LARGE_MESSAGE_BYTES)
        )
        for name in dict.fromkeys(one.level for one in timings)
    }
    if not slowest:
        return ()
    inner = Level("host", per_host, slowest.get("host", slowest[timings[-1].level]))
    return (inner, Level("network", num_hosts, slowest["network"], is_shared)) if num_hosts > 1 else (inner,)


def _mark_shared_memory(fabric: Fabric, per_host: int, levels: tuple[Level, ...]) -> tuple[Level, ...]:
    """Return the levels, the innermost with what it is: memory, where ranks of a host see each other's."""
    if per_host < 2 or fabric.hosts[0] != fabric.hosts[1]:
        return levels
    return (replace(levels[0], link=replace(levels[0].link, is_copied=True)), *levels[1:])


def relative_speeds(speeds: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return how many times as fast as usual each rank is; nothing where all are alike.

    Args:
        paces: how fast each of them was, every time.

    Example:
        >>> unlike([[4.0, 4.0, 3.0], [4.0, 3.0, 4.0], [2.0, 2.0, 2.5]])
        (1.0, 1.0, 0.5)
        >>> unlike([[4.0, 4.0, 3.0], [4.0, 3.0, 4.0], [2.0, 2.0, 4.0]])
        ()
    """
    middles = list(map(median, speeds))
    usual = median(middles)
    parts = [
        round_figure(middle / usual)
        if max(own) < (1 - SPEED_TOLERANCE) * usual or min(own) > (1 + SPEED_TOLERANCE) * usual
        else 1.0
        for own, middle in zip(speeds, middles, strict=True)
    ]
    return tuple(parts) if set(parts) != {1.0} else ()
