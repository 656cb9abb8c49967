"""A GPT trained by one rank and by a hand-written loop, alternately: step times, and the memory of a step.

Both run in bfloat16 by autocast, or in float32 with TF32, with a fused AdamW. A step is timed from its call to the end
of its kernels. Model FLOPs utilization counts 6 FLOPs per parameter and token, and the attention's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

import counterpoint as cp
from benchmarks.gpu.checks import Check, passes_if, skip
from benchmarks.gpu.target import SPEED_REASON, Target
from counterpoint.jobs.job import sequence_loss
from counterpoint.jobs.models import GPT, GPTShape
from counterpoint.partitioning.partitioned_model import as_call_args
from counterpoint.plan.plan import Plan
from counterpoint.planner.ranking import predict_rank_bytes
from counterpoint.training.model_partition import finest_partition
from counterpoint.viz.number_format import format_bytes
from counterpoint.world.cluster import Cluster

PEAK_FLOPS = 798e12
"""bf16 matrix product of 8192 x 8192 x 8192, as measured on an H100."""
RATIO = 0.99
MEMORY_TOLERANCE = 0.1


class ModelSize(NamedTuple):
    """Args:
    shape: of the GPT.
    batch_size: sequences of a batch.
    """

    shape: GPTShape
    batch_size: int


SIZES = {
    "0.9B": ModelSize(GPTShape(num_layers=16, width=2048, head_dim=128, context=1024, num_tokens=32768), 8),
    "0.1B": ModelSize(GPTShape(num_layers=12, width=768, head_dim=64, context=1024, num_tokens=32768), 16),
}
DRY_SIZE = ModelSize(GPTShape(num_layers=2, width=16, head_dim=8, context=8, num_tokens=32), 2)


class Row(NamedTuple):
    """One comparison.

    Args:
        size: a key of ``SIZES``.
        precision: ``bf16`` or ``fp32``.
        is_compiled: whether by torch.compile, both of them.
        needed_s: time without which it is not begun.
    """

    size: str
    precision: str
    is_compiled: bool
    needed_s: float

    def __str__(self) -> str:
        return f"{self.size}, {self.precision}, {'compiled' if self.is_compiled else 'eager'}"


ROWS = (
    Row("0.9B", "bf16", False, 25),
    Row("0.9B", "bf16", True, 90),
    Row("0.1B", "bf16", False, 10),
    Row("0.9B", "fp32", False, 30),
    Row("0.1B", "fp32", False, 15),
)


def measure(target: Target) -> Iterator[Check]:
    """Yield for each row the ratio of step times, and the memory of a step."""
    torch.set_float32_matmul_precision("high")
    own_calls, hand_calls = count_compiled_calls()
    for row in ROWS if not target.is_dry_run else ROWS[:2] + ROWS[3:4]:
        if row.is_compiled and (own_calls < hand_calls or target.is_dry_run):
            found = f"torch.compile gets {own_calls} of the {hand_calls} operations of a model in parallelize"
            yield skip(str(row), found + (", and none of the stand-in device" if target.is_dry_run else ""))
            continue
        if target.seconds_left() < row.needed_s:
            yield skip(str(row), f"{target.seconds_left():.0f} s left, it needs {row.needed_s:.0f}")
            continue
        try:
            yield from check_row(row, target)
        except Exception as error:  # noqa: BLE001 - a line of the table
            yield Check(str(row), "FAIL", reason=f"{type(error).__name__}: {error}"[:500])
        if target.device.type == "cuda":
            torch.cuda.empty_cache()


def check_row(row: Row, target: Target) -> Iterator[Check]:
    """Yield the checks of one comparison."""
    figures = compare_loops(row, target)
    text = f"ratio {figures['ratio']:.3f}, MFU {figures['mfu']['ours']:.0%}"
    if target.is_dry_run:
        yield Check(str(row), "SKIP", text, SPEED_REASON, figures)
    else:
        yield Check(
            str(row), passes_if(figures["ratio"] >= RATIO), text, f"at least {RATIO} of a loop by hand", figures
        )
    yield check_memory(row, figures["ours_bytes"], predicted_bytes(row, target), target)


def check_memory(row: Row, measured: int, predicted: int | None, target: Target) -> Check:
    """Return whether a step takes the memory that was predicted."""
    name, text = f"{row}, peak memory", format_bytes(measured)
    if predicted is None:
        return Check(name, "-", text, "there is no prediction of steps with autocast", {"bytes": measured})
    figures, reason = {"bytes": measured, "predicted_bytes": predicted}, f"{format_bytes(predicted)} predicted"
    if target.is_dry_run:  # logits, which no prediction counts twice, are most of so small a model
        return Check(name, "-", text, reason, figures)
    holds = abs(measured / predicted - 1) <= MEMORY_TOLERANCE
    return Check(name, passes_if(holds), text, f"within {MEMORY_TOLERANCE:.0%} of {reason}", figures)


def size_of(row: Row, target: Target) -> ModelSize:
    return target.size(SIZES[row.size], DRY_SIZE)


def predicted_bytes(row: Row, target: Target) -> int | None:
    """Return the planner's prediction for one rank; None with autocast, of which it does not know."""
    if row.precision != "fp32":
        return None
    shape, batch_size = size_of(row, target)
    tokens = torch.zeros(batch_size, shape.context, dtype=torch.int64, device=target.device)
    model, cluster = build(shape, target), Cluster()
    profile = cp.profile(
        model, tokens, tokens, loss=sequence_loss, roofline_device=cluster.device, microbatch_sizes=[batch_size]
    )
    spec = finest_partition(model, as_call_args(tokens), ("blocks",)).spec
    return predict_rank_bytes(Plan.parse("solo"), spec, cluster, batch_size=batch_size, profile=profile)[0]


def compare_loops(row: Row, target: Target) -> dict[str, Any]:
    """Return times and memory of both loops."""
    (shape, batch_size), accelerator, num_rounds = size_of(row, target), target.accelerator, target.size(20, 2)
    hand_step = make_hand_step(build(shape, target), row, target)
    tokens = torch.randint(0, shape.num_tokens, (batch_size, shape.context + 1)).to(target.device)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    hand_step(inputs, targets)  # makes the state of its optimizer
    accelerator.synchronize()
    hand_bytes = accelerator.memory_stats().allocated_bytes
    own_model = build(shape, target)
    num_params = sum(parameter.numel() for parameter in own_model.parameters())
    optimizer = torch.optim.AdamW(own_model.parameters(), lr=1e-4, fused=not target.is_dry_run)
    if row.is_compiled:
        own_model.compile()
    times: dict[str, list[float]] = {"hand": [], "ours": []}
    losses, peaks = {"hand": 0.0, "ours": 0.0}, {"hand": 0, "ours": 0}
    with cp.parallelize(own_model, optimizer, sequence_loss, strategy="solo", num_microbatches=1) as step:

        def own_step(inputs: torch.Tensor, targets: torch.Tensor) -> float:
            with autocast(row, target):
                return float(step(inputs, targets))

        for number in range(num_rounds + target.size(3, 1)):
            for name, run in (("hand", hand_step), ("ours", own_step)):
                accelerator.synchronize()
                accelerator.reset_peak_memory_stats()
                start = time.perf_counter()
                losses[name] = run(inputs, targets)
                accelerator.synchronize()
                if number >= target.size(3, 1):
                    times[name].append(time.perf_counter() - start)
                peaks[name] = accelerator.memory_stats().peak_allocated_bytes
    medians = {name: statistics.median(values) for name, values in times.items()}
    flops_per_token = 6 * num_params + 12 * shape.num_layers * shape.width * shape.context
    num_tokens = batch_size * shape.context
    return {
        "num_params": num_params,
        "batch_size": batch_size,
        "median_s": medians,
        "spread": {name: (max(values) - min(values)) / medians[name] for name, values in times.items()},
        "ratio": medians["hand"] / medians["ours"],
        "tokens_per_s": {name: num_tokens / seconds for name, seconds in medians.items()},
        "mfu": {name: num_tokens * flops_per_token / seconds / PEAK_FLOPS for name, seconds in medians.items()},
        "peak_bytes": peaks,
        "ours_bytes": peaks["ours"] - hand_bytes,
        "last_losses": losses,
    }


def build(shape: GPTShape, target: Target) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(target.device):
        return GPT(shape)


def autocast(row: Row, target: Target) -> Any:
    """Return autocast for bfloat16, which the stand-in device has not."""
    is_used = row.precision == "bf16" and not target.is_dry_run
    return torch.autocast(target.device.type, torch.bfloat16) if is_used else nullcontext()


def make_hand_step(model: nn.Module, row: Row, target: Target) -> Callable[[torch.Tensor, torch.Tensor], float]:
    """Return a step as a user writes it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=not target.is_dry_run)
    if row.is_compiled:
        model.compile()

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        with autocast(row, target):
            loss = sequence_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def count_compiled_calls() -> tuple[int, int]:
    """Return how many operations of a step's forward torch.compile gets, under ``parallelize`` and by hand.

    On the CPU: it is Dynamo that counts, and not the device.
    """
    return _count_calls(_train_own), _count_calls(_train_by_hand)


def _count_calls(train: Callable[[nn.Module, Callable[[], None]], None]) -> int:
    calls: list[int] = []

    def backend(module: Any, _: object) -> Callable[..., Any]:
        num_calls = sum(node.op in {"call_function", "call_method"} for node in module.graph.nodes)

        def run(*arguments: Any) -> Any:
            calls.append(num_calls)
            return module.forward(*arguments)

        return run

    torch.compiler.reset()
    model = ThreeCalls()
    model.compile(backend=backend)
    train(model, calls.clear)
    return sum(calls)


class ThreeCalls(nn.Module):
    """A model whose forward calls three operations; a container of torch's own would not be compiled alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


def _train_own(model: nn.Module, start: Callable[[], None]) -> None:
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.zeros(2, 4)
    with cp.parallelize(model, optimizer, nn.functional.mse_loss, strategy="solo") as step:
        for _ in range(4):  # the first, second and third check the loss
            start()
            step(x, x)


def _train_by_hand(model: nn.Module, start: Callable[[], None]) -> None:
    for _ in range(2):
        start()
        model(torch.zeros(2, 4)).sum().backward()
