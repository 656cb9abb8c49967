"""A pipeline that saves all activations compared with recomputation, alternately, in separate processes."""

import json
import statistics
from pathlib import Path

from counterpoint.errors import LaunchError
from counterpoint.launchers.local import run_command, script_command
from counterpoint.testing.claims import BenchmarkOptions, BenchmarkResult

ROUNDS, WARM_UP, STEPS = 3, 2, 6
SCRIPT = Path(__file__).with_name("ranks.py")
GPIPE = "pipeline(2, schedule=gpipe)"
CONTENDERS = {
    "never": (GPIPE, ""),
    "except_last": ("pipeline(2, schedule=gpipe, recompute=except_last)", ""),
    "always": ("pipeline(2, schedule=gpipe, recompute=always)", ""),
    "blocks": (GPIPE, "recompute"),
    "half of the blocks": (GPIPE, "recompute:50%"),
}
MAX_SAVED_RATIO, MAX_TIME_RATIO, MAX_OVER_ALWAYS, MAX_LOSS_DIFFERENCE = 0.4, 1.35, 1.02, 1e-5


def run_once(side, size, warm_up, steps):
    """Return the output of both ranks of one run, in rank order."""
    lines = []
    result = run_command(
        script_command(SCRIPT, [*CONTENDERS[side], size, str(warm_up), str(steps)]),
        2,
        threads_per_rank=1,
        on_line=lambda line: lines.append(line.text),
    )
    found = [json.loads(text[text.index('{"rank"') :]) for text in lines if '{"rank"' in text]
    if result.exit_code or len(found) != 2:
        raise LaunchError(f"{side} ended with {result.exit_code}: {result.report}\n" + "\n".join(lines[-12:]))
    return sorted(found, key=lambda one: one["rank"])


def measure(options: BenchmarkOptions) -> BenchmarkResult:
    found = {side: [] for side in CONTENDERS}
    extent = ("quick", 1, 1) if options.is_quick else ("full", WARM_UP, STEPS)
    for number in range(options.num_rounds(ROUNDS, minimum=2)):
        for side in list(CONTENDERS)[number % len(CONTENDERS) :] + list(CONTENDERS)[: number % len(CONTENDERS)]:
            options.report_progress(f"round {number + 1}, {side}")
            found[side].append(run_once(side, *extent))
    times = {
        side: [max(statistics.median(rank["seconds"]) for rank in one) for one in turns]
        for side, turns in found.items()
    }
    rows = [make_row(side, found, times) for side in CONTENDERS]
    columns = ("contender", "ms per step", "over never", "activations, MiB", "over never", "process, MiB")
    missed = tuple(find_misses(found, times))
    return BenchmarkResult(columns, tuple(rows), missed, {"seconds": times, "ranks": found})


def ratio(times, side, other="never"):
    return statistics.median(a / b for a, b in zip(times[side], times[other], strict=True))


def saved_bytes(found, side):
    """Return the peak saved bytes of each rank; they are equal in all rounds."""
    return [rank["saved"] for rank in found[side][0]]


def saved_ratios(found, side):
    return [mine / whole for mine, whole in zip(saved_bytes(found, side), saved_bytes(found, "never"), strict=True)]


def make_row(side, found, times):
    process = [statistics.median(one[rank]["process"] for one in found[side]) for rank in (0, 1)]
    return (
        side,
        f"{1e3 * statistics.median(times[side]):.0f}",
        f"{ratio(times, side):.2f}",
        ", ".join(f"{size / 2**20:.0f}" for size in saved_bytes(found, side)),
        ", ".join(f"{part:.2f}" for part in saved_ratios(found, side)),
        ", ".join(f"{size / 2**20:.0f}" for size in process),
    )


def find_misses(found, times):
    for side in ("except_last", "always"):
        if not max(saved_ratios(found, side)) <= MAX_SAVED_RATIO:
            most = max(saved_ratios(found, side))
            yield f"{side} keeps {most:.2f} times never's activations, at most {MAX_SAVED_RATIO} required"
        if not ratio(times, side) <= MAX_TIME_RATIO:
            yield f"{side} takes {ratio(times, side):.2f} times never's step, at most {MAX_TIME_RATIO} required"
    if not ratio(times, "except_last", "always") <= MAX_OVER_ALWAYS:
        yield f"except_last takes {ratio(times, 'except_last', 'always'):.2f} times always' step"
    expected = found["never"][0][0]["losses"]
    for side, turns in found.items():
        apart = max(abs(a - b) / abs(b) for one in turns for a, b in zip(one[0]["losses"], expected, strict=True))
        if not apart <= MAX_LOSS_DIFFERENCE:
            yield f"losses of {side} are {apart:.0e} from those of never, at most {MAX_LOSS_DIFFERENCE} required"
