"""The built-in ``text`` job in bfloat16, float16 and float32: bits per byte of held-out text after a few hundred steps.

Modules are cast by ``precision=``, weights stay in float32, and losses are scaled in float16.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

import counterpoint as cp
from benchmarks.gpu.checks import Check, passes_if
from benchmarks.gpu.target import Target
from counterpoint.jobs.job import sequence_loss
from counterpoint.jobs.models import GPT, GPTShape
from counterpoint.jobs.registry import find_job

TOLERANCE = 0.01
HELD_OUT = 64


def measure(target: Target) -> Iterator[Check]:
    """Yield each precision's bits per byte, compared with float32's."""
    precise = bits_per_byte(target, "fp32")
    yield Check("text, fp32", "-", f"{precise:.4f} bits per byte", "", {"bits_per_byte": precise})
    for precision in ("bf16", "fp16"):
        yield compare(precision, precise, bits_per_byte(target, precision))


def compare(precision: str, precise: float, half: float) -> Check:
    """Return whether a narrower dtype learns as float32 does."""
    difference = half / precise - 1
    reason, figures = f"within {TOLERANCE:.0%} of fp32; {difference:+.2%}", {"bits_per_byte": half}
    return Check(
        f"text, {precision}", passes_if(abs(difference) <= TOLERANCE), f"{half:.4f} bits per byte", reason, figures
    )


def bits_per_byte(target: Target, precision: str) -> float:
    """Train the job; return the loss of held-out text in bits per byte."""
    job = find_job("text")
    train, held_out = job.build_data()
    torch.manual_seed(0)
    shape = GPTShape() if not target.is_dry_run else GPTShape(num_layers=1, width=16, head_dim=8)
    model = GPT(shape).to(target.device)
    num_steps, batch_size = target.size((300, job.batch_size), (2, 2))
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
    optimizer = job.optimizer(model.parameters())
    options = {"precision": precision, "device": target.accelerator}
    with cp.parallelize(model, optimizer, sequence_loss, strategy="solo", **options) as step:
        for number in range(num_steps):
            chosen = order[number * batch_size : (number + 1) * batch_size].tolist()
            step(*train.fetch(chosen))
    inputs, targets = held_out.fetch(range(target.size(HELD_OUT, 2)))
    with torch.no_grad():
        loss = sequence_loss(model(inputs.to(target.device)).float(), targets.to(target.device))
    return float(loss) / 0.6931471805599453
