"""Trainer on one rank compared with a hand-written loop, step by step alternately."""

import copy
import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, cycle

import torch
import torch.nn.functional as F
from torch import nn

from counterpoint.jobs.job import sequence_loss, with_seed
from counterpoint.jobs.models import GPT, GPTShape, mlp
from counterpoint.testing.claims import BenchmarkOptions, BenchmarkResult
from counterpoint.training.callbacks.callback import Callback
from counterpoint.training.trainer import Trainer

ROUNDS = 7


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    inputs: Callable[[int], torch.Tensor]
    targets: Callable[[int], torch.Tensor]
    loss: Callable
    optimizer: Callable
    batch_size: int
    num_steps: int  # of one round; the first is not counted
    bar: float


def small_layers():
    return nn.Sequential(*(layer for _ in range(100) for layer in (nn.Linear(64, 64), nn.LayerNorm(64))))


CASES = {
    "mlp": Case(
        build=partial(mlp, 1024, 4096, 4096, 1024, 10),
        inputs=lambda n: torch.randn(n, 1024),
        targets=lambda n: torch.randint(0, 10, (n,)),
        loss=F.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9),
        batch_size=64,
        num_steps=8,
        bar=1.02,
    ),
    "gpt": Case(
        build=lambda: GPT(GPTShape(num_layers=6, width=256, head_dim=64, context=128, num_tokens=4096)),
        inputs=lambda n: torch.randint(0, 4096, (n, 128)),
        targets=lambda n: torch.randint(0, 4096, (n, 128)),
        loss=sequence_loss,
        optimizer=partial(torch.optim.AdamW, lr=3e-4),
        batch_size=8,
        num_steps=5,
        bar=1.02,
    ),
    "small": Case(
        build=small_layers,
        inputs=lambda n: torch.randn(n, 64),
        targets=lambda n: torch.randn(n, 64),
        loss=F.mse_loss,
        optimizer=partial(torch.optim.SGD, lr=0.01),
        batch_size=64,
        num_steps=40,
        bar=1.05,
    ),
}


@dataclass(frozen=True)
class Times:
    """Wall-clock and CPU seconds of each step."""

    wall: list
    cpu: list

    def ratio(self, other, kind):
        return statistics.median(getattr(self, kind)) / statistics.median(getattr(other, kind))


class AlternatingSteps(Callback):
    """Run a hand-written step after every step of the trainer, so that machine noise affects both equally.

    A trainer step lasts from the end of the hand-written step to the next call of `on_step`.
    """

    def __init__(self, step_by_hand):
        self.step_by_hand = step_by_hand
        self.ours, self.theirs = Times([], []), Times([], [])
        self.last = None

    def on_start(self, event):
        self.last = None

    def on_step(self, event):
        now = read_clocks()
        if self.last is not None:  # the first step of a fit is not counted
            record_times(self.ours, self.last, now)
        self.step_by_hand()
        then = read_clocks()
        if self.last is not None:
            record_times(self.theirs, now, then)
        self.last = then


def read_clocks():
    return time.perf_counter(), time.process_time()


def record_times(times, before, after):
    times.wall.append(after[0] - before[0])
    times.cpu.append(after[1] - before[1])


def keep_freed_memory():
    """Configure glibc to retain freed memory, for both loops.

    Otherwise it depends on the heap layout whether large gradients are returned to the kernel, and allocating them
    again takes a tenth of a step.
    """
    trim_threshold, mmap_threshold = -1, -3
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(trim_threshold, 2**31 - 1)
        libc.mallopt(mmap_threshold, 2**30)


def make_plain_step(case, model, data):
    inputs, targets = data.tensors
    optimizer = case.optimizer(model.parameters())
    order = torch.randperm(len(inputs))
    starts = cycle(range(0, len(inputs), case.batch_size))
    losses = []

    def step():
        start = next(starts)
        batch = order[start : start + case.batch_size]
        optimizer.zero_grad()
        loss = case.loss(model(inputs[batch]), targets[batch])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    return step


def compare(case, num_rounds):
    """Return the times of each round, and the number of parameters."""
    model = with_seed(case.build)(0)
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(case.inputs(16 * case.batch_size), case.targets(16 * case.batch_size))
    turns = AlternatingSteps(make_plain_step(case, copy.deepcopy(model), data))
    trainer = Trainer(model, loss=case.loss, optimizer=case.optimizer, strategy="solo", callbacks=[turns])
    rounds = []
    for _ in range(num_rounds + 1):  # the first round warms up
        turns.ours, turns.theirs = Times([], []), Times([], [])
        trainer.fit(data, batch_size=case.batch_size, epochs=1_000, max_steps=case.num_steps)
        rounds.append((turns.ours, turns.theirs))
    return rounds[1:], sum(param.numel() for param in model.parameters())


def measure(options: BenchmarkOptions) -> BenchmarkResult:
    keep_freed_memory()
    rows, missed, figures = [], [], {}
    cases = {"small": replace(CASES["small"], num_steps=2)} if options.is_quick else CASES
    for name, case in cases.items():
        options.report_progress(name)
        rounds, num_params = compare(case, options.num_rounds(ROUNDS))
        ratios = [ours.ratio(theirs, "wall") for ours, theirs in rounds]
        ratio, cpu = statistics.median(ratios), statistics.median(a.ratio(b, "cpu") for a, b in rounds)
        ours, theirs = (1e3 * statistics.median(chain(*(t.wall for t in side))) for side in zip(*rounds, strict=True))
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        shown = (f"{num_params / 1e6:.1f} M", f"{ours:.2f}", f"{theirs:.2f}", f"{ratio:.3f}", spread, f"{cpu:.3f}")
        rows.append((name, *shown, f"{case.bar:.2f}"))
        figures[name] = {"ratio": ratio, "rounds": ratios, "cpu_ratio": cpu, "trainer_ms": ours, "by_hand_ms": theirs}
        if not ratio <= case.bar:
            missed.append(f"{name} is {100 * (ratio - 1):.1f} % slower than by hand; at most {case.bar - 1:.0%} may be")
    figures["threads"] = torch.get_num_threads()
    columns = ("model", "parameters", "trainer ms", "by hand ms", "ratio", "spread", "processor", "bar")
    return BenchmarkResult(
        columns, tuple(rows), tuple(missed), figures, {"ratio:": f"with {torch.get_num_threads()} threads"}
    )
