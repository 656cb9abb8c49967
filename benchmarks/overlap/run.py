"""Data parallelism between simulated hosts, with the gradient all-reduce during and after the backward."""

import json
import statistics
import sys
from pathlib import Path

from counterpoint.errors import LaunchError
from counterpoint.testing.claims import BenchmarkOptions, BenchmarkResult

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lab import Lab

ROUNDS, RATE = 15, "1gbit"
WARM_UP, TRIALS = 3, 52  # warm-up steps; more while bucket sizes are tried
BARS = {"without": 1.1, "ddp": 1.0}  # minimum speed-up of the tuned step
LABELS = {
    "without": "ours, passes=()",
    "overlap": "ours, tune=off",
    "tuned": "ours",
    "ddp": "DDP on gloo",
}


def on_hosts(rounds, warm_up, trials):
    """Return the results of two ranks on two hosts."""
    command = [sys.executable, str(Path(__file__).with_name("ranks.py")), *map(str, (rounds, warm_up, trials))]
    with Lab(hosts=2, rate=RATE) as lab:
        return [json.loads(one.text().splitlines()[-1]) for one in lab.run_ranks(command, deadline_s=240)]


def measure(options: BenchmarkOptions) -> BenchmarkResult:
    if reason := Lab.unavailable_reason():
        raise LaunchError(f"simulated hosts are not available: {reason}")
    warm_up, trials = (1, 1) if options.is_quick else (WARM_UP, TRIALS)
    found = on_hosts(options.num_rounds(ROUNDS), warm_up, trials)
    seconds = {name: list(map(max, *(rank["seconds"][name] for rank in found))) for name in LABELS}
    rows, missed = [], []
    for name, meaning in LABELS.items():
        ratios = {
            other: statistics.median(b / a for a, b in zip(seconds[name], seconds[other], strict=True))
            for other in ("without", "ddp")
        }
        count = ", ".join(map(str, found[0]["buckets"].get(name, []))) or "-"
        spread = f"{1e3 * min(seconds[name]):.0f} to {1e3 * max(seconds[name]):.0f}"
        shown = [f"{ratio:.2f}" for ratio in ratios.values()]
        rows.append((meaning, count, f"{1e3 * statistics.median(seconds[name]):.0f}", spread, *shown))
        for other, bar in BARS.items() if name == "tuned" else ():
            if not ratios[other] >= bar:
                missed.append(f"ours is {ratios[other]:.2f} times as fast as {LABELS[other]}; at least {bar} required")
    forward, backward = (statistics.median(times) for times in zip(*found[0]["alone"], strict=True))
    rows.append(("one rank without communication", "-", f"{1e3 * (forward + backward):.0f}", "-", "-", "-"))
    columns = ("2 hosts x 1 rank, 1 Gbit/s", "buckets", "ms per step", "spread", "over without", "over DDP")
    note = f"forward {1e3 * forward:.0f} ms, backward {1e3 * backward:.0f} ms; no update"
    return BenchmarkResult(
        columns, tuple(rows), tuple(missed), {"seconds": seconds, "ranks": found}, {"without communication:": note}
    )
