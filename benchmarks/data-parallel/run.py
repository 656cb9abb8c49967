"""Data parallelism compared with peers: contenders run alternately, each in separate processes."""

import json
import statistics
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from counterpoint.errors import LaunchError
from counterpoint.launchers.local import run_command, script_command
from counterpoint.testing.claims import BenchmarkOptions, BenchmarkResult

ROUNDS, WORKLOADS = 3, "ABCDE"
SCRIPT = Path(__file__).with_name("ranks.py")
CONTENDERS = {
    "ours": ("ours", 2, 1, ""),
    "ddp": ("ddp", 2, 1, ""),
    "ddp, kept memory": ("ddp", 2, 1, "kept"),
    "horovod": ("horovod", 2, 1, ""),
    "deepspeed": ("deepspeed", 2, 1, ""),
    "bound": ("half", 1, 1, ""),
    "bound, both at once": ("half", 2, 1, ""),
    "one process x 1": ("one", 1, 1, ""),
    "one process x 2": ("one", 1, 2, ""),
}
"""By contender: name in ranks.py, processes, threads of each, and allocator mode."""
UPPER_BOUNDS = {"bound", "bound, both at once"}
BARS = {
    "A": {"ddp": 3.0, "ddp, kept memory": 2.6, "one process x 2": 1.2},
    "B": {"ddp": 1.05, "one process x 2": 0.98},
    "C": {"ddp": 1.5, "bound": 0.95},
    "D": {"ddp": 2.5},
    "E": {"ddp": 3.0},
}
SIZES = {"A": 64, "B": 16, "C": 128, "D": 512, "E": 512}
MAX_MEMORY_RATIO = 0.65
MAX_LOSS_DIFFERENCE = 2e-3  # relative, of a loss after 20 steps in float32 with another order of sums


def run_once(side, letter, extent):
    """Return the output of every rank of one run."""
    name, processes, threads, memory = CONTENDERS[side]
    command = script_command(SCRIPT, [name, letter, str(threads), memory or "default", extent])
    lines = []
    if processes == 1:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        texts, code, report = (done.stdout + done.stderr).splitlines(), done.returncode, done.stderr[-500:]
    elif name == "horovod":
        launcher = [str(Path(sys.executable).with_name("horovodrun")), "--gloo", "-np", str(processes), *command]
        done = subprocess.run(launcher, capture_output=True, text=True, check=False)
        texts, code, report = (done.stdout + done.stderr).splitlines(), done.returncode, done.stderr[-500:]
    else:
        result = run_command(command, processes, threads_per_rank=threads, on_line=lines.append)
        texts, code, report = [line.text for line in lines], result.exit_code, result.report
    found = [json.loads(text[text.index('{"rank"') :]) for text in texts if '{"rank"' in text]
    if code or len(found) != processes:
        raise LaunchError(f"{side} on {letter} ended with {code}: {report}\n" + "\n".join(texts[-12:]))
    return sorted(found, key=lambda one: one["rank"])


def speed(side, letter, ranks):
    """Return samples per second of the whole job; for the bound, of two such processes."""
    return SIZES[letter] / max(statistics.median(rank["seconds"]) for rank in ranks)


def peak_memory(ranks):
    """Return the peak memory of all ranks together; a rank that has exited has none."""
    seen = [(at, number, found) for number, rank in enumerate(ranks) for at, found in rank["bytes"]]
    ends = [(rank["bytes"][-1][0] + 1e-6, number, 0) for number, rank in enumerate(ranks)]
    now, most = [0] * len(ranks), 0
    for _, number, found in sorted(seen + ends):
        now[number] = found
        most = max(most, sum(now))
    return most


def is_installed(side):
    package = {"horovod": "horovod", "deepspeed": "deepspeed"}.get(side)
    return package is None or find_spec(package) is not None


def rotate(sides, number):
    """Return the contenders in an order that starts with another one in every round."""
    first = number % len(sides)
    return sides[first:] + sides[:first]


def measure(options: BenchmarkOptions) -> BenchmarkResult:
    sides = [side for side in CONTENDERS if is_installed(side)]
    workloads, extent = ("C", "quick") if options.is_quick else (WORKLOADS, "full")
    speeds, losses, memory = {}, {}, {}
    for number in range(options.num_rounds(ROUNDS)):
        for letter in workloads:
            options.report_progress(f"round {number + 1}, workload {letter}")
            for side in rotate(sides, number):
                ranks = run_once(side, letter, extent)
                speeds.setdefault((letter, side), []).append(speed(side, letter, ranks))
                losses[letter, side] = ranks[0]["losses"]
                memory.setdefault((letter, side), []).append(peak_memory(ranks))
    rows, missed = [], []
    for letter in workloads:
        for side in sides:
            rows.append(make_row(letter, side, speeds, losses, memory))
            missed += find_misses(letter, side, speeds, losses, memory)
    columns = ("workload", "side", "samples/s", "spread", "ours over it", "bar", "MiB", "loss difference")
    figures = {f"{letter}, {side}": found for (letter, side), found in speeds.items()}
    notes = {
        "bound": "two processes without communication, each on half of the batch: one alone times two; both at once",
        "MiB": "the peak of all ranks together, shared memory counted once",
        "not installed": ", ".join(side for side in CONTENDERS if side not in sides) or "none",
    }
    return BenchmarkResult(columns, tuple(rows), tuple(missed), figures, notes)


def ratio(letter, side, speeds):
    return statistics.median(a / b for a, b in zip(speeds[letter, "ours"], speeds[letter, side], strict=True))


def loss_difference(letter, side, losses):
    """Return the largest relative difference of the first losses from ours; 0 for the bound, which trains on half."""
    if side in UPPER_BOUNDS:
        return 0.0
    return max(abs(a - b) / abs(b) for a, b in zip(losses[letter, "ours"], losses[letter, side], strict=True))


def make_row(letter, side, speeds, losses, memory):
    found = speeds[letter, side]
    return (
        letter,
        side,
        f"{statistics.median(found):,.0f}",
        f"{min(found):,.0f} to {max(found):,.0f}",
        f"{ratio(letter, side, speeds):.2f}",
        f"{BARS[letter][side]:.2f}" if side in BARS[letter] else "",
        f"{statistics.median(memory[letter, side]) / 2**20:,.0f}",
        f"{loss_difference(letter, side, losses):.0e}" if side not in {"ours", *UPPER_BOUNDS} else "",
    )


def find_misses(letter, side, speeds, losses, memory):
    bar = BARS[letter].get(side, 1.0 if side in {"horovod", "deepspeed"} else None)
    found = ratio(letter, side, speeds)
    if bar is not None and not found >= bar:
        yield f"{letter}: {found:.2f} times {side}, at least {bar} required"
    if not loss_difference(letter, side, losses) <= MAX_LOSS_DIFFERENCE:
        apart = loss_difference(letter, side, losses)
        yield f"{letter}: losses are {apart:.0e} from those of {side}, at most {MAX_LOSS_DIFFERENCE} required"
    if (letter, side) == ("A", "ddp"):
        used = statistics.median(memory[letter, "ours"]) / statistics.median(memory[letter, "ddp"])
        if not used <= MAX_MEMORY_RATIO:
            yield f"A: {used:.2f} of DDP's memory, at most {MAX_MEMORY_RATIO} required"
