"""Compiled steps compared with eager ones, and with torch.compile in a loop by hand, under several plans."""

import json
import statistics
from pathlib import Path

from counterpoint.errors import LaunchError
from counterpoint.launchers.local import run_command, script_command
from counterpoint.testing.claims import BenchmarkOptions, BenchmarkResult

ROUNDS, NUM_STEPS, MODELS = 7, 5, ("mlp", "gpt")
BY_HAND, MIN_SHARE = "by hand", 0.97
SCRIPT = Path(__file__).with_name("ranks.py")


def run_ranks(model, num_ranks, rounds, num_steps):
    """Return for each side, a plan and whether it is compiled, the slower rank's first step and steps by round."""
    lines = []
    command = script_command(SCRIPT, [model, str(rounds), str(num_steps)])
    result = run_command(command, num_ranks, threads_per_rank=1, on_line=lines.append)
    found = [json.loads(line.text[line.text.index('{"rank"') :]) for line in lines if '{"rank"' in line.text]
    if result.exit_code or len(found) != num_ranks:
        raise LaunchError(f"{model} on {num_ranks} ranks ended with {result.exit_code}: {result.report}")
    sides = {}
    for ranks in zip(*(one["sides"] for one in found), strict=True):
        key = ranks[0]["plan"], ranks[0]["is_compiled"]
        rounds_of = [max(values) for values in zip(*(one["seconds"] for one in ranks), strict=True)]
        sides[key] = max(one["first"] for one in ranks), rounds_of
    return sides


def speedup(sides, key, other):
    """Return how many times as fast a side is as another one, the median over rounds."""
    return statistics.median(b / a for a, b in zip(sides[key][1], sides[other][1], strict=True))


def measure(options: BenchmarkOptions) -> BenchmarkResult:
    rounds, num_steps = options.num_rounds(ROUNDS), 1 if options.is_quick else NUM_STEPS
    rows, missed, figures = [], [], {}
    for model in MODELS[:1] if options.is_quick else MODELS:
        gains = True
        for num_ranks in (1, 2):
            options.report_progress(f"{model} on {num_ranks} ranks")
            sides = run_ranks(model, num_ranks, rounds, num_steps)
            for plan in dict.fromkeys(plan for plan, _ in sides):
                eager, compiled = (plan, False), (plan, True)
                gain = speedup(sides, compiled, eager)
                share = f"{speedup(sides, compiled, (BY_HAND, True)):.3f}" if (BY_HAND, True) in sides else "-"
                first, seconds = sides[compiled]
                spread = f"{1e3 * min(seconds):.0f} to {1e3 * max(seconds):.0f}"
                eager_ms, ms = (f"{1e3 * statistics.median(sides[key][1]):.1f}" for key in (eager, compiled))
                rows.append((model, plan, eager_ms, ms, spread, f"{gain:.3f}", share, f"{first:.0f}"))
                figures[f"{model}, {plan}"] = {"eager": sides[eager], "compiled": sides[compiled]}
                if plan == BY_HAND:
                    gains = gain >= 1
                elif num_ranks == 1 and not float(share) >= MIN_SHARE:
                    missed.append(
                        f"{model}, {plan}: {share} times torch.compile by hand; at least {MIN_SHARE} required"
                    )
                elif gains and not gain >= 1:
                    missed.append(
                        f"{model}, {plan}: compiled is {gain:.3f} times as fast as eager; torch.compile gains"
                    )
    columns = ("model", "plan", "eager ms", "compiled ms", "spread", "over eager", "over by hand", "first step s")
    return BenchmarkResult(columns, tuple(rows), tuple(missed), figures)
