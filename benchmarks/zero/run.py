"""ZeRO compared with peers: contenders run alternately, each in processes of its own."""

import json
import statistics
from importlib.util import find_spec
from pathlib import Path

from counterpoint.errors import LaunchError
from counterpoint.launchers.local import run_command, script_command
from counterpoint.testing.claims import BenchmarkOptions, BenchmarkResult

ROUNDS, WORKLOADS = 3, "ABC"
SCRIPT = Path(__file__).with_name("zero_ranks.py")
CONTENDERS = {
    "data": "data(2)",
    "zero1": "zero(2, level=1)",
    "zero2": "zero(2, level=2)",
    "zero3": "zero(2, level=3)",
    "units": "zero(2, level=3, min_num_params=1000000)",
    "zero_redundancy": "DDP with ZeroRedundancyOptimizer",
    "fsdp2": "FSDP2",
    "merged_fsdp2": "FSDP2, units of 1,000,000",
    "deepspeed1": "DeepSpeed ZeRO-1",
    "deepspeed2": "DeepSpeed ZeRO-2",
    "deepspeed3": "DeepSpeed ZeRO-3",
}
PEERS_OF = {
    "zero1": ("zero_redundancy", "deepspeed1"),
    "zero2": ("deepspeed2",),
    "zero3": ("data", "fsdp2", "deepspeed3"),
    "units": ("data", "fsdp2", "merged_fsdp2", "deepspeed3"),
}
"""What each of ours is compared with in speed; in memory, with the peers among it."""
BARS = {
    ("A", "zero1", "zero_redundancy"): 1.5,
    ("C", "units", "data"): 0.7,
    **{(letter, "units", peer): 2.0 for letter in WORKLOADS for peer in ("fsdp2", "merged_fsdp2", "deepspeed3")},
}
SIZES = {"A": 64, "B": 16, "C": 128}
MAX_LOSS_DIFFERENCE = 2e-3  # relative, in float32 with another order of sums


def run_once(side, letters, extent):
    """Return by workload the output of every rank of one run."""
    lines = []
    command = script_command(SCRIPT, [side, letters, extent])
    result = run_command(command, 2, threads_per_rank=1, on_line=lines.append)
    texts = [line.text for line in lines]
    found = [json.loads(text[text.index('{"rank"') :]) for text in texts if '{"rank"' in text]
    if result.exit_code or len(found) != 2:
        others = [text for text in texts if '{"rank"' not in text]
        raise LaunchError(
            f"{side} on {letters} ended with {result.exit_code}: {result.report[:500]}\n" + "\n".join(others[-12:])
        )
    return {letter: [one["workloads"][letter] for one in found] for letter in letters}


def growth(ranks):
    """Return by how much the memory of both ranks together has grown at its peak."""
    samples = sorted((at, number, found) for number, rank in enumerate(ranks) for at, found in rank["bytes"])
    now = [rank["bytes"][0][1] for rank in ranks]
    start, most = sum(now), 0
    for _, number, found in samples:
        now[number] = found
        most = max(most, sum(now) - start)
    return most


def measure(options: BenchmarkOptions) -> BenchmarkResult:
    sides = [side for side in CONTENDERS if not side.startswith("deepspeed") or find_spec("deepspeed")]
    letters, extent = ("C", "quick") if options.is_quick else (WORKLOADS, "full")
    speeds, losses, memory = {}, {}, {}
    for number in range(options.num_rounds(ROUNDS)):
        order, turn = rotate(letters, number), rotate(sides, number)
        for side in turn:
            options.report_progress(f"round {number + 1}, {CONTENDERS[side]}")
            for letter, ranks in run_once(side, order, extent).items():
                step_s = max(statistics.median(rank["seconds"]) for rank in ranks)
                speeds.setdefault((letter, side), []).append(SIZES[letter] / step_s)
                losses[letter, side] = ranks[0]["losses"]
                if letter == order[0]:  # later workloads reuse what the allocator has kept
                    memory.setdefault((letter, side), []).append(growth(ranks))
    rows = [make_row(letter, side, speeds, losses, memory) for letter in letters for side in sides]
    missed = [
        line for letter in letters for side in sides for line in find_misses(letter, side, speeds, losses, memory)
    ]
    figures = {
        f"{letter}, {CONTENDERS[side]}": {"samples/s": found, "bytes": memory.get((letter, side), [])}
        for (letter, side), found in speeds.items()
    }
    left_out = [] if "deepspeed1" in sides else ["DeepSpeed, which is not installed: see benchmarks/README.md"]
    notes = {
        "MiB": "peak of the memory of both ranks beyond what they had before the model, shared memory counted once",
        "left out": ", ".join(left_out) or "nothing",
    }
    columns = ("workload", "contender", "samples/s", "spread", "compared with", "MiB", "loss difference")
    return BenchmarkResult(columns, tuple(rows), tuple(missed), figures, notes)


def rotate(things, number):
    """Return things in an order that starts with another one in every round."""
    first = number % len(things)
    return things[first:] + things[:first]


def ratio(letter, side, peer, speeds):
    pairs = zip(speeds[letter, side], speeds[letter, peer], strict=True)
    return statistics.median(own / other for own, other in pairs)


def compare(letter, side, speeds):
    """Yield for each contender that one is compared with its name, the ratio of speeds, and the bar or None."""
    for peer in PEERS_OF.get(side, ()):
        if (letter, peer) in speeds:
            yield peer, ratio(letter, side, peer, speeds), BARS.get((letter, side, peer))


def loss_difference(letter, side, losses):
    """Return the largest relative difference of losses from those of data parallelism."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses[letter, "data"], losses[letter, side], strict=True))


def make_row(letter, side, speeds, losses, memory):
    found = speeds[letter, side]
    ratios = [
        f"{over:.2f} {peer}" + (f" (bar {bar})" if bar else "") for peer, over, bar in compare(letter, side, speeds)
    ]
    used = memory.get((letter, side))
    return (
        letter,
        CONTENDERS[side],
        f"{statistics.median(found):,.0f}",
        f"{min(found):,.0f} to {max(found):,.0f}",
        ", ".join(ratios),
        f"{statistics.median(used) / 2**20:,.0f}" if used else "",
        f"{loss_difference(letter, side, losses):.0e}" if side != "data" else "",
    )


def find_misses(letter, side, speeds, losses, memory):
    for peer, over, bar in compare(letter, side, speeds):
        if bar is not None and not over >= bar:
            yield f"{letter}: {CONTENDERS[side]} is {over:.2f} times {CONTENDERS[peer]}, at least {bar} required"
        own, other = (memory.get((letter, one)) for one in (side, peer))
        if peer != "data" and own and other and statistics.median(own) > statistics.median(other):
            sizes = " and ".join(f"{statistics.median(one) / 2**20:,.0f} MiB" for one in (own, other))
            yield f"{letter}: {CONTENDERS[side]} needs more memory than {CONTENDERS[peer]}: {sizes}"
    if not loss_difference(letter, side, losses) <= MAX_LOSS_DIFFERENCE:
        apart = loss_difference(letter, side, losses)
        yield f"{letter}: losses of {CONTENDERS[side]} are {apart:.0e} from those of data(2)"
