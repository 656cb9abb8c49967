"""DDP on backend counterpoint compared with gloo, alternately on the same ranks."""

import json
import statistics
from pathlib import Path

from counterpoint.errors import LaunchError
from counterpoint.launchers.local import run_command, script_command
from counterpoint.testing.claims import BenchmarkOptions, BenchmarkResult

ROUNDS, RANKS, BAR = 9, 2, 1.3
WIDTHS, QUICK_WIDTHS = (1024, 4096, 4096, 1024, 10), (16, 32, 10)
MAX_PARAM_DIFFERENCE = 1e-4  # relative to the largest parameter: float32 steps with another order of sums


def on_ranks(rounds, widths):
    """Return the results of rank 0."""
    lines = []
    command = script_command(Path(__file__).with_name("ranks.py"), list(map(str, (rounds, *widths))))
    result = run_command(command, RANKS, threads_per_rank=1, on_line=lines.append)
    found = [line.text for line in lines if line.text.startswith("{")]
    if result.exit_code or not found:
        said = "\n".join(line.text for line in lines[-20:])
        raise LaunchError(f"the ranks of the measurement ended with {result.exit_code}: {result.report}\n{said}")
    return json.loads(found[0])


def measure(options: BenchmarkOptions) -> BenchmarkResult:
    rows, missed, figures = [], [], {}
    widths = QUICK_WIDTHS if options.is_quick else WIDTHS
    for setting, found in on_ranks(options.num_rounds(ROUNDS), widths).items():
        ours, theirs = found["seconds"]["counterpoint"], found["seconds"]["gloo"]
        ratios = [g / c for g, c in zip(theirs, ours, strict=True)]
        ratio = statistics.median(ratios)
        times = [f"{1e3 * statistics.median(seconds):.1f}" for seconds in (ours, theirs)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        rows.append((setting, *times, f"{ratio:.2f}", spread, f"{BAR:.1f}", f"{found['apart']:.0e}"))
        figures[setting] = {**found, "ratio": ratio}
        if not ratio >= BAR:
            missed.append(f"{setting}: {ratio:.2f} times as fast as on gloo; at least {BAR} required")
        if not found["apart"] <= MAX_PARAM_DIFFERENCE:
            missed.append(
                f"{setting}: parameters differ by {found['apart']:.0e}; at most {MAX_PARAM_DIFFERENCE:.0e} required"
            )
    columns = ("DDP", "counterpoint ms", "gloo ms", "ratio", "spread", "bar", "parameter difference")
    return BenchmarkResult(
        columns, tuple(rows), tuple(missed), figures, {"ratio:": "steps per second over those on gloo"}
    )
