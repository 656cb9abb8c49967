"""The same batches of ten lengths under a pipeline, in changing order and sorted by length, alternately."""

import json
import statistics
from importlib.util import find_spec
from pathlib import Path

from counterpoint.errors import LaunchError
from counterpoint.launchers.local import run_command, script_command
from counterpoint.testing.claims import BenchmarkOptions, BenchmarkResult

TURNS, MAX_RATIO = 5, 1.05
SCRIPT = Path(__file__).with_name("ranks.py")


def run_once(kind, form, num_turns):
    """Return the output of both ranks, in rank order."""
    lines = []
    command = script_command(SCRIPT, [kind, form, str(num_turns)])
    result = run_command(command, 2, threads_per_rank=1, on_line=lambda line: lines.append(line.text))
    found = [json.loads(text[text.index('{"rank"') :]) for text in lines if '{"rank"' in text]
    if result.exit_code or len(found) != 2:
        raise LaunchError(f"{kind} ended with {result.exit_code}: {result.report}\n" + "\n".join(lines[-12:]))
    return sorted(found, key=lambda one: one["rank"])


def measure(options: BenchmarkOptions) -> BenchmarkResult:
    kinds = ["gpt", *(["gpt2"] if find_spec("transformers") else [])]
    rows, missed, figures = [], [], {}
    for kind in kinds:
        options.report_progress(kind)
        form, turns = ("quick", 1) if options.is_quick else ("full", options.num_rounds(TURNS))
        found = figures[kind] = run_once(kind, form, turns)
        seconds = {
            order: [max(pair) for pair in zip(*(rank[order] for rank in found), strict=True)]
            for order in ("sorted", "changing")
        }
        ratios = [a / b for a, b in zip(seconds["changing"], seconds["sorted"], strict=True)]
        ratio, later = statistics.median(ratios), sum(rank["later_traces"] for rank in found)
        shown = [f"{statistics.median(seconds[order]):.2f}" for order in ("sorted", "changing")]
        traces = sum(rank["traces"] for rank in found)
        rows.append((kind, *shown, f"{ratio:.3f}", f"{min(ratios):.3f} to {max(ratios):.3f}", f"{traces}", f"{later}"))
        if not ratio <= MAX_RATIO:
            missed.append(f"{kind} takes {ratio:.3f} times as long in changing order; at most {MAX_RATIO} may be")
        if later:
            missed.append(f"{kind} was traced {later} times after the tenth distinct length")
    columns = ("model", "sorted, s", "changing, s", "ratio", "spread", "traces", "later traces")
    return BenchmarkResult(columns, tuple(rows), tuple(missed), figures)
