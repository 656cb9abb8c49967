"""Pipelines compared with torch's and DeepSpeed's: the processes of all contenders stay alive and run alternately."""

import statistics
import sys
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from counterpoint.testing.claims import BenchmarkOptions, BenchmarkResult

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.pipeline.turn_taking import ContenderProcesses

ROUNDS, BATCH = 24, 16
CONTENDERS = {
    "gpipe": ("Counterpoint", "pipeline(2, schedule=gpipe)", 2),
    "torch gpipe": ("TorchPipeline", "GPipe", 2),
    "1f1b": ("Counterpoint", "pipeline(2)", 2),
    "torch 1f1b": ("TorchPipeline", "1F1B", 2),
    "interleaved": ("Counterpoint", "interleaved(2)", 2),
    "torch interleaved": ("TorchPipeline", "Interleaved1F1B", 2),
    "zero bubble": ("Counterpoint", "zero_bubble(2)", 2),
    "torch zero bubble": ("TorchPipeline", "InterleavedZeroBubble", 2),
    "zero bubble, V": ("Counterpoint", "zero_bubble(2, chunks_per_stage=2)", 2),
    "torch zero bubble, V": ("TorchPipeline", "ZBVZeroBubble", 2),
    "pipedream": ("Counterpoint", "pipedream(2)", 2),
    "pipedream, whole batches": ("Counterpoint", "pipedream(2) in 1", 2),
    "pipedream 2bw": ("Counterpoint", "pipedream_2bw(2)", 2),
    "deepspeed 1f1b": ("DeepSpeed", "", 2),
    "one process": ("SingleProcess", "", 1),
    "stages alone": ("StagesAlone", "", 2),
}
SYNCHRONOUS = ("gpipe", "1f1b", "interleaved", "zero bubble", "zero bubble, V")
TORCH_COUNTERPARTS = {
    "gpipe": "torch gpipe",
    "1f1b": "torch 1f1b",
    "interleaved": "torch interleaved",
    "zero bubble": "torch zero bubble",
    "zero bubble, V": "torch zero bubble, V",
}
"""Torch's schedule of the same name."""
QUICK = ("gpipe", "torch gpipe", "pipedream", "deepspeed 1f1b", "one process", "stages alone")
MIN_SPEEDUP_SAME_SCHEDULE, MIN_SPEEDUP_BEST, MIN_SPEEDUP_ASYNC = 1.05, 1.05, 1.15
MAX_LOSS_DIFFERENCE = 1e-4


def is_installed(side):
    return CONTENDERS[side][0] != "DeepSpeed" or find_spec("deepspeed") is not None


def measure(options: BenchmarkOptions) -> BenchmarkResult:
    sides = [side for side in (QUICK if options.is_quick else CONTENDERS) if is_installed(side)]
    size = "quick" if options.is_quick else "full"
    synchronous = [side for side in SYNCHRONOUS if side in sides]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="counterpoint-")))
        running = {}
        for number, side in enumerate(sides):
            options.report_progress(f"building {side}")
            running[side] = stack.enter_context(
                ContenderProcesses(side, *CONTENDERS[side], folder / str(number), size=size)
            )
        for number in range(options.num_rounds(ROUNDS)):
            options.report_progress(f"round {number + 1}")
            order = sides[number % len(sides) :] + sides[: number % len(sides)]
            for side in order if number % 2 else order[::-1]:
                running[side].run_turn()
        found = {side: running[side].collect_results() for side in sides}
    speeds = {
        side: [
            BATCH / (statistics.fmean if side == "stages alone" else max)(took)
            for took in zip(*(rank["seconds"] for rank in ranks), strict=True)
        ]
        for side, ranks in found.items()
    }
    losses = {
        side: max((rank["losses"] for rank in ranks), key=lambda given: given[0]) for side, ranks in found.items()
    }
    memory = {side: sum(rank["bytes"] for rank in ranks) for side, ranks in found.items()}
    best = {
        whose: max(names, key=lambda side: statistics.median(normalize_by_round(speeds)[side]))
        for whose, names in (("ours", synchronous), ("torch", [side for side in sides if side.startswith("torch")]))
    }
    rows = [make_row(side, speeds, losses, memory, best["torch"]) for side in sides]
    columns = (
        "side",
        "samples/s",
        "spread",
        "over torch's of the same name",
        "over torch's best",
        "MiB",
        "loss difference",
    )
    notes = {"torch's best": best["torch"], "our best synchronous one": best["ours"]}
    missed = tuple(find_misses(sides, speeds, losses, memory, best))
    return BenchmarkResult(columns, tuple(rows), missed, {"samples/s": speeds, "bytes": memory}, notes)


def normalize_by_round(speeds):
    """Return speeds relative to the mean of their round, since the machine's speed varies between rounds."""
    means = [statistics.fmean(found) for found in zip(*speeds.values(), strict=True)]
    return {side: [one / mean for one, mean in zip(found, means, strict=True)] for side, found in speeds.items()}


def ratio(speeds, side, other):
    return statistics.median(a / b for a, b in zip(speeds[side], speeds[other], strict=True))


def loss_difference(losses, side):
    """Return the largest relative difference of the losses from single-process training; 0 where they may differ."""
    pairs = zip(losses[side], losses["one process"], strict=True)
    return max(abs(a - b) / abs(b) for a, b in pairs) if has_same_losses(side) else 0.0


def has_same_losses(side):
    """Tell whether a contender trains as one process does: asynchronous ones, and stages alone, do not."""
    return "pipedream" not in side and side != "stages alone"


def make_row(side, speeds, losses, memory, best):
    found = speeds[side]
    return (
        side,
        f"{statistics.median(found):.1f}",
        f"{min(found):.1f} to {max(found):.1f}",
        f"{ratio(speeds, side, TORCH_COUNTERPARTS[side]):.2f}" if side in TORCH_COUNTERPARTS else "",
        f"{ratio(speeds, side, best):.2f}",
        f"{memory[side] / 2**20:,.0f}",
        f"{loss_difference(losses, side):.0e}" if has_same_losses(side) else "",
    )


def find_misses(sides, speeds, losses, memory, best):
    for side, other in TORCH_COUNTERPARTS.items():
        if side not in sides:
            continue
        if not ratio(speeds, side, other) >= MIN_SPEEDUP_SAME_SCHEDULE:
            times = ratio(speeds, side, other)
            yield f"{side} is {times:.2f} times {other}, at least {MIN_SPEEDUP_SAME_SCHEDULE} required"
        if not memory[side] <= memory[other]:
            yield f"{side} needs more memory than {other}"
    if not ratio(speeds, best["ours"], best["torch"]) >= MIN_SPEEDUP_BEST:
        times = ratio(speeds, best["ours"], best["torch"])
        yield f"{best['ours']} is {times:.2f} times torch's best, not {MIN_SPEEDUP_BEST}"
    if not ratio(speeds, "pipedream", best["torch"]) >= MIN_SPEEDUP_ASYNC:
        times = ratio(speeds, "pipedream", best["torch"])
        yield f"pipedream is {times:.2f} times torch's best, not {MIN_SPEEDUP_ASYNC}"
    for side in sides:
        if not loss_difference(losses, side) <= MAX_LOSS_DIFFERENCE:
            apart = loss_difference(losses, side)
            yield f"losses of {side} are {apart:.0e} from those of one process, at most {MAX_LOSS_DIFFERENCE} required"
