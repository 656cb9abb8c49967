"""Measure a cluster by its own ranks: compute speed, memory bandwidth, contention, and links."""

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
"""Messages of at least this size in bytes determine the bandwidth."""
MIN_ROUND_TRIPS, MAX_ROUND_TRIPS = 3, 50
"""Round trips of each message size, within ``NUM_DURATIONS`` durations of the configuration if possible."""
NUM_DURATIONS = 3
MAX_SIZE_S = 2.0
"""Message sizes that would take longer are skipped, with all larger ones."""


def time_messages_by_size(fabric: Fabric, peer: int, config: ProbeConfig) -> list[tuple[int, float]]:
    """Return for each message size the seconds from one rank of a pair to the other.

    Both call it with each other. The lower rank decides how often each size is sent and when to stop, and returns the
    result; the other one returns nothing.
    """
    timings: list[tuple[int, float]] = []
    for size in config.message_bytes:
        num_round_trips = _agree_on_count(
            fabric, peer, _num_round_trips(timings, size, NUM_DURATIONS * config.duration_s)
        )
        if num_round_trips == 0:
            break
        seconds = half_round_trip_s(fabric, peer, torch.zeros(size, dtype=torch.uint8), num_round_trips)
        timings.append((size, seconds))
    return timings if fabric.rank < peer else []


def time_stream(fabric: Fabric, peer: int, message: Tensor, num_messages: int) -> float:
    """Return how long the lower rank of a pair takes to send messages to the other; both call it."""
    began = time.perf_counter()
    for _ in range(num_messages):
        if fabric.rank < peer:
            fabric.send(peer, "stream", [message])
        else:
            fabric.recv(peer, "stream")
    if fabric.rank < peer:
        fabric.recv(peer, "all received")
    else:
        fabric.send(peer, "all received", [message[:1]])
    return time.perf_counter() - began


def fit_link(timings: Sequence[tuple[int, float]]) -> Link:
    """Return the link that fits the times of messages of several sizes.

    The latency is that of the smallest message; the bandwidth is that of all large messages together, beyond the
    latency.

    Example:
        >>> fit_link([(8, 50e-6), (10**6, 1050e-6), (10**7, 10050e-6)])
        Link(latency_s=5e-05, bytes_per_s=1000000000.0, is_shared_memory=False)
    """
    latency_s = timings[0][1]
    large = [timing for timing in timings if timing[0] >= BANDWIDTH_MIN_BYTES] or list(timings[-1:])
    beyond_s = sum(max(seconds - latency_s, 1e-9) for _, seconds in large)
    return Link(latency_s, float(f"{sum(size for size, _ in large) / beyond_s:.6g}"))


def _num_round_trips(timings: Sequence[tuple[int, float]], size: int, span_s: float) -> int:
    """Return how often the next size is sent there and back; 0 if that would take too long."""
    if not timings:
        return MAX_ROUND_TRIPS
    last_size, seconds = timings[-1]
    trip_s = 2 * seconds * (size / last_size if last_size >= BANDWIDTH_MIN_BYTES else 1)
    if MIN_ROUND_TRIPS * trip_s > MAX_SIZE_S:
        return 0
    return max(MIN_ROUND_TRIPS, min(MAX_ROUND_TRIPS, int(span_s / trip_s)))


def _agree_on_count(fabric: Fabric, peer: int, count: int) -> int:
    """Return the number of the lower rank of a pair, on both."""
    if fabric.rank < peer:
        fabric.send(peer, "count", [torch.tensor([count])])
        return count
    (received,) = fabric.recv(peer, "count")
    return int(received.item())


NUM_TRIES = 2
"""Runs of each rank while the others wait; the fastest counts, since temporary slowdowns are not the rank's speed."""
NUM_SPEED_ROUNDS = 7
"""Comparisons of each rank's speed with that of the others: the speed of a shared machine varies for all."""
SPEED_TOLERANCE = 0.15
"""A rank has a speed of its own if it deviates from the median by more than this fraction every time."""
SHARED_LINK_SLOWDOWN = 1.5
"""A link is shared if two pairs of ranks that use it at once are each slower by this factor."""
STREAM_S, STREAM_MESSAGES = 0.1, 8
"""Number and duration of the messages that are sent to find that out."""
LARGE_MESSAGE_BYTES = 1 << 20
"""The slowest of several links is the one on which a message of this size takes longest."""
DEFAULT_PROBE = ProbeConfig()
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class MatmulRate:
    """Rate of multiplying matrices of one size with a number of threads."""

    threads: int
    size: int
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class LinkTimings:
    """Times of messages between two ranks.

    Args:
        ranks: the pair.
        level: name of the cluster level whose link this is.
        messages: bytes and seconds of each size.
    """

    ranks: tuple[int, int]
    level: str
    messages: tuple[tuple[int, float], ...]

    @property
    def link(self) -> Link:
        """Latency and bandwidth that fit the times."""
        link = fit_link(self.messages)
        return Link(round_figure(link.latency_s), round_figure(link.bytes_per_s))


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Measurements of a cluster.

    Args:
        cluster: what predictions need.
        num_ranks: number of ranks.
        threads: threads of each rank.
        matmul_rates: by threads and size.
        link_timings: by pairs of ranks.
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
            "matmuls": [asdict(entry) for entry in self.matmul_rates],
            "links": [{**asdict(entry), **asdict(entry.link)} for entry in self.link_timings],
        }

    def _comment(self) -> str:
        ranks, threads = format_count(self.num_ranks, "rank"), format_count(self.threads, "thread")
        lines = [f"measured by `counterpoint probe` on {ranks} with {threads} each"]
        if not self.link_timings:
            lines.append("one rank has no link: the link below is a default")
        return "".join(f"# {line}\n" for line in lines)


def probe_cluster(
    fabric: Fabric,
    *,
    host_memory_bytes: int,
    max_threads: int,
    host: str | None = None,
    config: ProbeConfig = DEFAULT_PROBE,
) -> ProbeResult:
    """Measure the cluster and return the result, which is equal on all ranks.

    All ranks call it together; no other program should run. Each rank multiplies matrices while the others wait; then
    1, 2, ... ranks of each host do so at once, and in time slices. The first two ranks of each host send each other
    messages, and so do the first ranks of the first host and of each other host; the slowest link of a level counts.

    Args:
        fabric: connects the ranks.
        host_memory_bytes: memory that the ranks of this host may use together.
        max_threads: threads that one rank may use at most while the others wait.
        host: identity of this rank's host; by default it is detected.
        config: what is measured, the same on all ranks.

    Raises:
        PlanError: the hosts have different numbers of ranks, or ranks are not numbered host by host.

    Cost:
        Some seconds for each rank of a host, half a second to ten for each pair of ranks.
    """
    hosts = _find_hosts(fabric, host_key() if host is None else host)
    per_host, num_hosts = hosts.count(0), len(set(hosts))
    flops = _measure_in_turn(fabric, per_host, lambda: measure_flops_by_size(config))
    measured_speeds = _measure_speeds(fabric, per_host, config)
    compute_rates, memory_rates, host_timings, time_slices = _measure_rounds(fabric, hosts, per_host, config)
    figures = {
        "threads": torch.get_num_threads(),
        "flops": list(flops.items()),
        "speeds": measured_speeds,
        "compute_contention": relative_rates(compute_rates),
        "memory_contention": relative_rates(memory_rates),
        "time_slicing": [
            list(map(median, zip(*(parts for parts, _ in time_slices), strict=True))),
            median(s for _, s in time_slices),
        ],
        "memory_bytes": host_memory_bytes // per_host // MIB * MIB,
        "memory_bytes_per_s": vector_sum_bytes(config) * median(rates[0] for rates in memory_rates),
    }
    all_figures = _gather(fabric, "figures", figures)
    matmul_rates = _measure_matmuls(fabric, all_figures[0]["threads"], all_figures[0]["flops"], max_threads, config)
    first_ranks = range(0, len(hosts), per_host)
    timings = (*host_timings, *_time_links(fabric, [(0, first) for first in first_ranks[1:]], "network", config))
    is_shared = _is_link_shared(fabric, timings, per_host)
    first_figures, speeds = (
        all_figures[::per_host],
        [median(rate for _, rate in rank_figures["flops"]) for rank_figures in all_figures],
    )
    device = Device(
        round_figure(median(speeds)),
        min(rank_figures["memory_bytes"] for rank_figures in all_figures),
        round_figure(median(rank_figures["memory_bytes_per_s"] for rank_figures in first_figures)),
    )
    cluster = Cluster(
        device,
        speeds=relative_speeds([rank_figures["speeds"] for rank_figures in all_figures]),
        levels=_mark_shared_memory(fabric, per_host, _build_levels(timings, per_host, num_hosts, is_shared=is_shared)),
        compute_contention=contention_curve([rank_figures["compute_contention"] for rank_figures in first_figures]),
        memory_contention=contention_curve([rank_figures["memory_contention"] for rank_figures in first_figures]),
        time_slicing=_time_slicing([rank_figures["time_slicing"] for rank_figures in first_figures], max_threads)
        if per_host > 1
        else None,
    )
    return ProbeResult(cluster, fabric.num_ranks, all_figures[0]["threads"], matmul_rates, timings)


def _time_slicing(hosts: Sequence[tuple[Sequence[float], float]], cores: int) -> TimeSlicing:
    """Return how ranks share cores in time slices, given the measurements of each host."""
    return TimeSlicing(
        cores, contention_curve([rates for rates, _ in hosts]), round_figure(median(seconds for _, seconds in hosts))
    )


def _measure_matmuls(
    fabric: Fabric, threads: int, own_rates: Sequence[tuple[int, float]], max_threads: int, config: ProbeConfig
) -> tuple[MatmulRate, ...]:
    """Return the rates of rank 0 with its own number of threads and with others, while other ranks wait."""
    counts = [count for count in thread_counts(max_threads) if count != threads]
    local_rates = measure_flops_by_threads(counts, config) if fabric.rank == 0 else {}
    (other_counts, *_) = _gather(
        fabric, "threads", [[count, list(rates.items())] for count, rates in local_rates.items()]
    )
    rates_by_threads = sorted(
        [(threads, own_rates), *((count, rates) for count, rates in other_counts)], key=lambda entry: entry[0]
    )
    return tuple(
        MatmulRate(count, size, round_figure(rate)) for count, rates in rates_by_threads for size, rate in rates
    )


def _gather(fabric: Fabric, label: str, value: Any) -> list[Any]:  # noqa: ANN401 - JSON, whose parts are known here
    """Return the values of all ranks."""
    return list(fabric.gather_values(label, value, tuple(range(fabric.num_ranks))))


def _find_hosts(fabric: Fabric, host: str) -> list[int]:
    """Return for every rank the first rank of its host."""
    names = _gather(fabric, "host", host)
    hosts = [names.index(name) for name in names]
    per_host = hosts.count(0)
    if len(hosts) % per_host or hosts != [rank - rank % per_host for rank in range(len(hosts))]:
        counts = ", ".join(str(hosts.count(first)) for first in dict.fromkeys(hosts))
        raise PlanError(
            f"the hosts have {counts} ranks, and those of rank 0, 1, ... are {hosts}; a cluster file describes hosts "
            "with equally many ranks that are numbered host by host; start them in that order"
        )
    return hosts


def _measure_in_turn(fabric: Fabric, per_host: int, work: Callable[[], dict[int, float]]) -> dict[int, float]:
    """Return the best of repeated runs of the work; one rank of each host works at a time."""
    best: dict[int, float] = {}
    for round_index in range(NUM_TRIES * per_host):
        fabric.barrier(tuple(range(fabric.num_ranks)))
        if round_index % per_host == fabric.rank % per_host:
            best = {rows: max(rate, best.get(rows, 0.0)) for rows, rate in work().items()}
    return best


def _measure_speeds(fabric: Fabric, per_host: int, config: ProbeConfig) -> list[float]:
    """Return repeated measurements of this rank's speed; one rank of each host computes at a time."""
    work, rates = layer_work(config), []
    for round_index in range(NUM_SPEED_ROUNDS * per_host):
        fabric.barrier(tuple(range(fabric.num_ranks)))
        if round_index % per_host == fabric.rank % per_host:
            rates.append(concurrent_rate([work()]))
    return rates


def _measure_rounds(
    fabric: Fabric, hosts: Sequence[int], per_host: int, config: ProbeConfig
) -> tuple[list[list[float]], list[list[float]], tuple[LinkTimings, ...], list[tuple[list[float], float]]]:
    """Repeat the measurements under contention, since the speed of a machine varies; medians count later.

    Returns:
        For each round the compute rates of 1, 2, ... concurrent ranks of this host; likewise the memory rates; times of
        messages inside each host; for each round the rates in time slices and the CPU time of a message. All but the
        messages are known to the first rank of the host.
    """
    compute_rates: list[list[float]] = []
    memory_rates: list[list[float]] = []
    host_timings: list[tuple[LinkTimings, ...]] = []
    time_slices: list[tuple[list[float], float]] = []
    first = fabric.rank - fabric.rank % per_host
    pairs = [(first, first + 1) for first in range(0, len(hosts), per_host) if per_host > 1]
    for _ in range(config.num_rounds):
        compute_rates.append(measure_contention(fabric, per_host, config))
        memory_rates.append(measure_contention(fabric, per_host, config, memory_work))
        host_timings.append(_time_links(fabric, pairs, "host", config))
        rates = measure_time_slice_rates(fabric, per_host, config)
        is_in_pair = per_host > 1 and fabric.rank < first + 2
        time_slices.append(
            (
                rates,
                time_contended_message(fabric, _peer((first, first + 1), fabric.rank), config) if is_in_pair else 0.0,
            )
        )
    return (
        compute_rates,
        memory_rates,
        tuple(median_timings(rows) for rows in zip(*host_timings, strict=True)),
        time_slices,
    )


def _time_links(
    fabric: Fabric, pairs: Sequence[tuple[int, int]], level: str, config: ProbeConfig
) -> tuple[LinkTimings, ...]:
    """Return times of messages between the ranks of each pair, one pair after the other."""
    timings = []
    for pair in pairs:
        fabric.barrier(tuple(range(fabric.num_ranks)))
        local = time_messages_by_size(fabric, _peer(pair, fabric.rank), config) if fabric.rank in pair else []
        measured = _gather(fabric, "timings", local)[pair[0]]
        timings.append(LinkTimings(pair, level, tuple((int(size), float(seconds)) for size, seconds in measured)))
    return tuple(timings)


def median_timings(rows: Sequence[LinkTimings]) -> LinkTimings:
    """Return the median times of messages between two ranks, for the sizes that were sent in every round.

    Example:
        >>> rounds = [LinkTimings((0, 1), "host", ((8, seconds),)) for seconds in (3e-05, 9e-05, 4e-05)]
        >>> median_timings(rounds).messages
        ((8, 4e-05),)
    """
    times = [dict(row.messages) for row in rows]
    sizes = [size for size, _ in rows[0].messages if all(size in seconds_by_size for seconds_by_size in times)]
    return replace(
        rows[0], messages=tuple((size, median(seconds_by_size[size] for seconds_by_size in times)) for size in sizes)
    )


def _is_link_shared(fabric: Fabric, timings: Sequence[LinkTimings], per_host: int) -> bool:
    """Return whether two ranks of the first host slow each other down when both send to the second host."""
    messages = next((entry.messages for entry in timings if entry.level == "network"), None)
    if per_host < 2 or messages is None:
        return False
    pairs, seconds_by_run = ((0, per_host), (1, per_host + 1)), []
    message = torch.zeros(max((size for size, s in messages if s <= STREAM_S), default=8), dtype=torch.uint8)
    for busy in (pairs, pairs[:1], pairs):  # the first run connects them
        fabric.barrier(tuple(range(fabric.num_ranks)))
        local_pairs = [pair for pair in busy if fabric.rank in pair]
        seconds = (
            time_stream(fabric, _peer(local_pairs[0], fabric.rank), message, STREAM_MESSAGES) if local_pairs else 0.0
        )
        seconds_by_run.append(max(_gather(fabric, "seconds", seconds)))
    return bool(seconds_by_run[2] > SHARED_LINK_SLOWDOWN * seconds_by_run[1])


def _peer(pair: tuple[int, int], rank: int) -> int:
    """Return the other rank of a pair."""
    return pair[1] if rank == pair[0] else pair[0]


def _build_levels(
    timings: Sequence[LinkTimings], per_host: int, num_hosts: int, *, is_shared: bool
) -> tuple[Level, ...]:
    """Return the levels with the slowest link of each; hosts of one rank have the link of the network."""
    slowest = {
        name: max(
            (entry.link for entry in timings if entry.level == name), key=lambda link: link.seconds(LARGE_MESSAGE_BYTES)
        )
        for name in dict.fromkeys(entry.level for entry in timings)
    }
    if not slowest:
        return ()
    inner = Level("host", per_host, slowest.get("host", slowest[timings[-1].level]))
    return (inner, Level("network", num_hosts, slowest["network"], is_shared)) if num_hosts > 1 else (inner,)


def _mark_shared_memory(fabric: Fabric, per_host: int, levels: tuple[Level, ...]) -> tuple[Level, ...]:
    """Return the levels, the innermost marked as shared memory if the ranks of a host share memory."""
    if per_host < 2 or fabric.hosts[0] != fabric.hosts[1]:
        return levels
    return (replace(levels[0], link=replace(levels[0].link, is_shared_memory=True)), *levels[1:])


def relative_speeds(speeds: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return the speed of each rank relative to the median; nothing if all are equal within the tolerance.

    Args:
        speeds: repeated measurements of each rank.

    Example:
        >>> relative_speeds([[4.0, 4.0, 3.0], [4.0, 3.0, 4.0], [2.0, 2.0, 2.5]])
        (1.0, 1.0, 0.5)
        >>> relative_speeds([[4.0, 4.0, 3.0], [4.0, 3.0, 4.0], [2.0, 2.0, 4.0]])
        ()
    """
    medians = list(map(median, speeds))
    usual = median(medians)
    fractions = [
        round_figure(median_speed / usual)
        if max(measured) < (1 - SPEED_TOLERANCE) * usual or min(measured) > (1 + SPEED_TOLERANCE) * usual
        else 1.0
        for measured, median_speed in zip(speeds, medians, strict=True)
    ]
    return tuple(fractions) if set(fractions) != {1.0} else ()
