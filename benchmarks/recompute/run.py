"""A pipeline that keeps all activations against those that recompute: sides in turns, in processes of their own."""

import json
import statistics
from pathlib import Path

from counterpoint.errors import LaunchError
from counterpoint.launchers.local import run_command, script_command
from counterpoint.testing.claims import Options, Result

ROUNDS = 3
SCRIPT = Path(__file__).with_name("ranks.py")
GPIPE = "pipeline(2, order=gpipe)"
SIDES = {
    "never": (GPIPE, ""),
    "except_last": ("pipeline(2, order=gpipe, recompute=except_last)", ""),
    "always": ("pipeline(2, order=gpipe, recompute=always)", ""),
    "blocks": (GPIPE, "recompute"),
    "half of the blocks": (GPIPE, "recompute:50%"),
}
MOST_SAVED, MOST_TIME, NO_MORE, APART = 0.4, 1.35, 1.02, 1e-5


def turn(side):
    """Return what both ranks of one turn have printed, in their order."""
    lines = []
    result = run_command(
        script_command(SCRIPT, list(SIDES[side])), 2, threads_per_rank=1, on_line=lambda line: lines.append(line.text)
    )
    found = [json.loads(text[text.index('{"rank"') :]) for text in lines if '{"rank"' in text]
    if result.exit_code or len(found) != 2:
        raise LaunchError(f"{side} ended with {result.exit_code}: {result.report}\n" + "\n".join(lines[-12:]))
    return sorted(found, key=lambda one: one["rank"])


def measure(options: Options) -> Result:
    found = {side: [] for side in SIDES}
    for number in range(max(2, options.rounds or ROUNDS)):
        for side in list(SIDES)[number % len(SIDES) :] + list(SIDES)[: number % len(SIDES)]:
            options.tell(f"round {number + 1}, {side}")
            found[side].append(turn(side))
    times = {
        side: [max(statistics.median(rank["seconds"]) for rank in one) for one in turns]
        for side, turns in found.items()
    }
    rows = [row(side, found, times) for side in SIDES]
    columns = ("side", "ms a step", "over never", "activations, MiB", "over never", "process, MiB")
    missed = tuple(misses(found, times))
    return Result(columns, tuple(rows), missed, {"seconds": times, "ranks": found})


def ratio(times, side, other="never"):
    return statistics.median(a / b for a, b in zip(times[side], times[other], strict=True))


def saved(found, side):
    """Return the bytes that each rank has saved at most; all rounds count the same."""
    return [rank["saved"] for rank in found[side][0]]


def parts(found, side):
    return [mine / whole for mine, whole in zip(saved(found, side), saved(found, "never"), strict=True)]


def row(side, found, times):
    process = [statistics.median(one[rank]["process"] for one in found[side]) for rank in (0, 1)]
    return (
        side,
        f"{1e3 * statistics.median(times[side]):.0f}",
        f"{ratio(times, side):.2f}",
        ", ".join(f"{size / 2**20:.0f}" for size in saved(found, side)),
        ", ".join(f"{part:.2f}" for part in parts(found, side)),
        ", ".join(f"{size / 2**20:.0f}" for size in process),
    )


def misses(found, times):
    for side in ("except_last", "always"):
        if not max(parts(found, side)) <= MOST_SAVED:
            yield f"{side} keeps {max(parts(found, side)):.2f} times never's activations, at most {MOST_SAVED} promised"
        if not ratio(times, side) <= MOST_TIME:
            yield f"{side} takes {ratio(times, side):.2f} times never's step, at most {MOST_TIME} promised"
    if not ratio(times, "except_last", "always") <= NO_MORE:
        yield f"except_last takes {ratio(times, 'except_last', 'always'):.2f} times always' step"
    expected = found["never"][0][0]["losses"]
    for side, turns in found.items():
        apart = max(abs(a - b) / abs(b) for one in turns for a, b in zip(one[0]["losses"], expected, strict=True))
        if not apart <= APART:
            yield f"losses of {side} are {apart:.0e} from those of never, at most {APART} promised"
