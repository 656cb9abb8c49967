"""Parameter servers of Counterpoint, torch and TensorFlow: speed on one host, bytes of a table, scaling."""

import statistics
import sys
from pathlib import Path

from counterpoint.errors import LaunchError
from counterpoint.testing.claims import BenchmarkOptions, BenchmarkResult

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))

import server_workloads
from contenders import CONTENDERS, is_installed, run_once
from lab_job import CASES, SERVERS, measure_row_bytes, measure_scaling

from benchmarks.lab import Lab

ROUNDS = 3
MIN_SPEEDUP = 2.0
OUR_VARIANT = {"D": "ours, ahead", "MLP": "ours"}
"""Variant per workload: prefetched large weights are still in use at the server's update, so they are copied."""
PEERS = ("torch rpc", "tensorflow")
MAX_BYTE_DEVIATION, MIN_ROWS = 0.05, 1000
"""Allowed relative difference of the bytes per row between few and many rows."""
SCALING_BARS = {2: 1.7, 4: 2.8}
"""Required speed-up over one server, by number of servers."""


def measure_one_host(names, rounds, tell):
    """Return runs by workload and contender."""
    sides, found = [side for side in CONTENDERS if is_installed(side)], {}
    for number in range(rounds):
        for name in names:
            for side in sides[number % len(sides) :] + sides[: number % len(sides)]:
                tell(f"round {number + 1}, {name}, {side}")
                found.setdefault((name, side), []).append(run_once(side, name))
    return found


def ratio(found, name, side, figure="samples_per_s"):
    pairs = zip(found[name, OUR_VARIANT[name]], found[name, side], strict=True)
    return statistics.median(ours[figure] / other[figure] for ours, other in pairs)


def speed_rows(found, missed):
    for (name, side), turns in found.items():
        times = ratio(found, name, side)
        bar = MIN_SPEEDUP if side in PEERS else None
        speeds = [one["samples_per_s"] for one in turns]
        spread = f"{min(speeds):,.0f} to {max(speeds):,.0f}"
        yield (
            f"{name}, {side}",
            f"{statistics.median(speeds):,.0f} samples/s",
            spread,
            f"{OUR_VARIANT[name]} {times:.2f} x",
        )
        spent = statistics.median(one["processor_ms"] for one in turns)
        own = [one["worker_ms"] for one in turns if one["worker_ms"] is not None]
        told = f"{statistics.median(own):.2f} in the worker" if own else ""
        less = 1 / ratio(found, name, side, "processor_ms")
        yield f"{name}, {side}, processor", f"{spent:.2f} ms per step", told, f"{OUR_VARIANT[name]} {less:.2f} x less"
        if bar is not None and not times >= bar:
            missed.append(f"{name}: {times:.2f} times {side}, at least {bar} required")


def table_rows(found, missed):
    """Yield the bytes of steps for numbers of rows of a table of ten million."""
    each = {count: (one["sent"] + one["received"]) / one["touched"] for count, one in found.items()}
    most = list(found)[-1]
    for count, one in found.items():
        moved = f"{one['sent']:,} sent, {one['received']:,} received"
        yield (
            f"table, {one['touched']:,} rows",
            moved,
            f"{each[count]:.0f} per row",
            f"{each[count] / each[most]:.3f} x",
        )
        if int(count) >= MIN_ROWS and not abs(each[count] / each[most] - 1) <= MAX_BYTE_DEVIATION:
            missed.append(f"table: {each[count]:.0f} bytes for each of {count} rows, {each[most]:.0f} of {most}")


def scaling_rows(found, missed):
    """Yield the speed with more servers, and the use of cores and of the servers' links."""
    for model, rate in dict.fromkeys((model, rate) for model, rate, _ in found):
        one = [turn["steps_per_s"] for turn in found[model, rate, 1]]
        for servers in [servers for *case, servers in found if case == [model, rate]]:
            turns = found[model, rate, servers]
            speeds = [turn["steps_per_s"] for turn in turns]
            times = statistics.median(a / b for a, b in zip(speeds, one, strict=True))
            cores, links = (statistics.median(turn[what] for turn in turns) for what in ("cores", "links"))
            spread = f"{min(speeds):.2f} to {max(speeds):.2f}; {cores:.2f} cores, links {links:.0%} full"
            name = f"{model} at {rate} Mbit/s, {servers} servers"
            yield name, f"{statistics.median(speeds):.2f} steps/s", spread, f"{times:.2f} x"
            if not times >= SCALING_BARS.get(servers, 1.0):
                missed.append(f"{name} are {times:.2f} times one ({statistics.median(one):.2f} steps/s)")


def measure(options: BenchmarkOptions) -> BenchmarkResult:
    if reason := Lab.unavailable_reason():
        raise LaunchError(f"simulated hosts are not available: {reason}")
    rounds, missed = options.num_rounds(ROUNDS), []
    names, cases, servers = (
        (["MLP"], CASES[:1], SERVERS[:2]) if options.is_quick else (server_workloads.WORKLOAD_KEYS, CASES, SERVERS)
    )
    speeds = measure_one_host(names, rounds, options.report_progress)
    rows = list(speed_rows(speeds, missed))
    options.report_progress("bytes of a table")
    moved = measure_row_bytes()
    rows += table_rows(moved, missed)
    scaled = measure_scaling(cases, servers, rounds, options.report_progress)
    rows += scaling_rows(scaled, missed)
    figures = {
        "turns": {f"{name}, {side}": found for (name, side), found in speeds.items()},
        "table": moved,
        "more_servers": {f"{model}, {rate}, {servers}": turns for (model, rate, servers), turns in scaled.items()},
    }
    notes = {"not installed": ", ".join(side for side in CONTENDERS if not is_installed(side)) or "none"}
    return BenchmarkResult(
        ("what", "median", "spread, or for each row", "ratio"), tuple(rows), tuple(missed), figures, notes
    )
