"""All-reduces between simulated hosts, alternately on the same ranks."""

import json
import statistics
import sys
from pathlib import Path

from counterpoint.errors import LaunchError
from counterpoint.testing.claims import BenchmarkOptions, BenchmarkResult

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lab import Lab

ROUNDS, MEGABYTES, RATE, BYTES_PER_S = 5, 16, "1gbit", 125e6
WIRE_BYTES = {"hierarchical": 1.0, "connect": 1.0, "ring in host order": 1.5, "ring interleaved": 3.0}
MIN_SPEEDUP = {"ring in host order": 1.3, "ring interleaved": 2.5, "gloo": 1.3}
HEADER_OVERHEAD = 0.03  # of frames and message headers, relative to the bytes of the tensors
MIN_LINK_USE = 0.85


def on_hosts(hosts, per_host, kind, rounds, megabytes):
    """Return the results of each rank."""
    command = [sys.executable, str(Path(__file__).with_name("ranks.py")), kind, str(megabytes), str(rounds)]
    with Lab(hosts=hosts, rate=RATE) as lab:
        ended = lab.run_ranks(command, per_host=per_host, deadline_s=120)
        return [json.loads(one.text().splitlines()[-1]) for one in ended]


def slowest_rank_s(found, name):
    """Return the seconds of each round until the last rank has finished."""
    return [max(one[0] for one in turns) for turns in zip(*(rank[name] for rank in found), strict=True)]


def two_host_rows(rounds, megabytes, missed, figures):
    """Yield a row for each contender on 2 hosts of 2 ranks."""
    found = on_hosts(2, 2, "sums", rounds, megabytes)
    ours = slowest_rank_s(found, "connect")
    for name in ("connect", "hierarchical", "ring in host order", "ring interleaved", "gloo"):
        seconds = slowest_rank_s(found, name)
        sent = statistics.median(sent for _, sent in found[0][name]) / (megabytes << 20)
        ratio = statistics.median(s / o for s, o in zip(seconds, ours, strict=True))
        own = statistics.median(s / h for s, h in zip(seconds, slowest_rank_s(found, "hierarchical"), strict=True))
        figures[name] = {"seconds": seconds, "sent": sent, "over_connect": ratio, "over_hierarchical": own}
        yield "2 x 2", name, f"{1e3 * statistics.median(seconds):.0f}", f"{sent:.3f}", f"{ratio:.2f}", f"{own:.2f}", "-"
        if name in WIRE_BYTES and not WIRE_BYTES[name] <= sent <= WIRE_BYTES[name] * (1 + HEADER_OVERHEAD):
            missed.append(f"{name}: {sent:.3f} n sent instead of {WIRE_BYTES[name]} n")
        if name in MIN_SPEEDUP and not ratio >= MIN_SPEEDUP[name]:
            missed.append(f"connect is {ratio:.2f} times as fast as {name}; at least {MIN_SPEEDUP[name]} required")


def four_host_rows(rounds, megabytes, missed, figures):
    """Yield a row for each contender on 4 hosts of 1 rank."""
    found = on_hosts(4, 1, "link", rounds, megabytes)
    reached = (megabytes << 20) / statistics.median(found[0]["plain transfer"])
    figures["plain transfer"] = {"bytes_per_s": reached}
    least = 2 * (megabytes << 20) * 3 / 4
    for name in ("ring", "halving-doubling", "gloo"):
        seconds = statistics.median(slowest_rank_s(found, name))
        sent = statistics.median(sent for _, sent in found[0][name]) / (megabytes << 20)
        nominal, measured = (least / rate / seconds for rate in (BYTES_PER_S, reached))
        figures[f"4 x 1 {name}"] = {
            "seconds": slowest_rank_s(found, name),
            "of_nominal": nominal,
            "of_measured": measured,
        }
        share = f"{nominal:.1%} / {measured:.1%}"
        yield "4 x 1", name, f"{1e3 * seconds:.0f}", f"{sent:.3f}", "-", "-", share
        if name != "gloo" and not max(nominal, measured) >= MIN_LINK_USE:
            missed.append(
                f"{name}: {share} of the link (nominal / as a plain TCP transfer); {MIN_LINK_USE:.0%} required"
            )


def measure(options: BenchmarkOptions) -> BenchmarkResult:
    if reason := Lab.unavailable_reason():
        raise LaunchError(f"simulated hosts are not available: {reason}")
    rounds, megabytes = options.num_rounds(ROUNDS), 1 if options.is_quick else MEGABYTES
    missed, figures = [], {}
    options.report_progress("2 hosts of 2 ranks")
    rows = list(two_host_rows(rounds, megabytes, missed, figures))
    options.report_progress("4 hosts of 1 rank")
    rows += four_host_rows(rounds, megabytes, missed, figures)
    columns = ("hosts", "all-reduce", "ms", "sent, n", "over connect", "over hierarchical", "of the link")
    note = {
        "of the link:": f"the minimum transfer time, at {RATE} / at the rate of a plain TCP transfer in this run, over "
        f"the measured time; a plain transfer reached {figures['plain transfer']['bytes_per_s'] / 1e6:.1f} MB/s",
    }
    return BenchmarkResult(columns, tuple(rows), tuple(missed), figures, note)
