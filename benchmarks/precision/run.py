"""Mixed precision: what a small GPT learns in it, and steps between simulated hosts beside DDP and FSDP2."""

import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from counterpoint.errors import LaunchError
from counterpoint.testing.claims import BenchmarkOptions, BenchmarkResult

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lab import Lab

ROUNDS, RATE, NUM_STEPS = 9, "1gbit", 650
TOLERANCE = 0.01
TRAININGS = {  # precision and dtype of the weights
    "float32": ("none", "float32"),
    "bf16": ("bf16", "float32"),
    "fp16": ("fp16", "float32"),
    "bf16 weights, rounded stochastically": ("bf16(rounding=stochastic)", "bfloat16"),
    "bf16 weights, rounded to the nearest": ("none", "bfloat16"),
}
TO_NEAREST = "bf16 weights, rounded to the nearest"
SIDES = {
    "data": "data(2), bf16(reduce=bf16)",
    "zero3": "zero(2, level=3), bf16(reduce=bf16)",
    "prefetch": "zero(2, level=3, reshard_after_forward=off) + prefetch, bf16(reduce=bf16)",
    "float32": "data(2), float32",
    "ddp": "DDP with bf16_compress_hook",
    "fsdp2": "FSDP2 with a MixedPrecisionPolicy",
}


def train_text(precision, weights, num_steps):
    """Return what one training prints."""
    command = [sys.executable, str(Path(__file__).with_name("train_text.py")), precision, weights, str(num_steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LaunchError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure_text(num_steps, missed, figures):
    """Yield a row for each precision."""
    with ThreadPoolExecutor(2) as pool:  # of one thread each
        trained = dict(
            zip(TRAININGS, pool.map(lambda one: train_text(*one, num_steps), TRAININGS.values()), strict=True)
        )
    full = trained["float32"]["bits"]
    for name, result in trained.items():
        worse = result["bits"] / full - 1
        figures[name] = result
        yield "text", name, f"{result['bits']:.4f} bits per byte", f"{worse:+.2%}", "-", "-"
        if name == TO_NEAREST and worse <= TOLERANCE:
            missed.append(f"{name}: {worse:+.2%} of float32; more than {TOLERANCE:.0%} expected, else rounding is idle")
        elif name != TO_NEAREST and worse > TOLERANCE:
            missed.append(f"{name}: {worse:+.2%} of float32; at most {TOLERANCE:+.0%} allowed")


def measure_link(rounds, mode, missed, figures):
    """Yield a row for each contender between two hosts."""
    command = [sys.executable, str(Path(__file__).with_name("link_ranks.py")), str(rounds), mode]
    with Lab(hosts=2, rate=RATE) as lab:
        found = [json.loads(one.text().splitlines()[-1]) for one in lab.run_ranks(command, deadline_s=600)]
    seconds = {name: list(map(max, *(rank["seconds"][name] for rank in found))) for name in SIDES}
    losses = {name: found[0]["losses"][name][-1] for name in SIDES}
    figures["link"] = {"seconds": seconds, "ranks": found}
    for name, meaning in SIDES.items():
        over = {
            other: statistics.median(b / a for a, b in zip(seconds[name], seconds[other], strict=True))
            for other in ("ddp", "fsdp2")
        }
        ms = f"{1e3 * statistics.median(seconds[name]):.0f} ms"
        spread = f"{1e3 * min(seconds[name]):.0f} to {1e3 * max(seconds[name]):.0f}"
        yield (
            "1 Gbit/s",
            meaning,
            f"{ms} ({spread})",
            f"loss {losses[name]:.4f}",
            *(f"{one:.2f}" for one in over.values()),
        )
        if abs(losses[name] / losses["ddp"] - 1) > TOLERANCE:
            missed.append(f"{meaning}: loss {losses[name]:.4f} after three steps, DDP's is {losses['ddp']:.4f}")
        peer = {"data": "ddp", "prefetch": "fsdp2"}.get(name)
        if peer and not over[peer] >= 1:
            missed.append(f"{meaning} is {over[peer]:.2f} times as fast as {SIDES[peer]}; at least 1 required")
    if not statistics.median(b / a for a, b in zip(seconds["data"], seconds["fsdp2"], strict=True)) >= 1:
        missed.append(f"{SIDES['data']} is slower than {SIDES['fsdp2']}")


def measure(options: BenchmarkOptions) -> BenchmarkResult:
    if reason := Lab.unavailable_reason():
        raise LaunchError(f"simulated hosts are not available: {reason}")
    missed, figures = [], {}
    options.report_progress("2 hosts, 1 Gbit/s")
    rows = [*measure_link(options.num_rounds(ROUNDS), "quick" if options.is_quick else "full", missed, figures)]
    options.report_progress("text in five precisions")
    rows += measure_text(2 if options.is_quick else NUM_STEPS, missed, figures)
    replaced = figures["bf16"]["replaced_products"]
    note = f"those of {' and '.join(replaced)} in float32, rounded once" if replaced else "torch's own kernels"
    columns = ("part", "run", "result", "compared", "over DDP", "over FSDP2")
    return BenchmarkResult(columns, tuple(rows), tuple(missed), figures, {"products of bf16 and fp16:": note})
