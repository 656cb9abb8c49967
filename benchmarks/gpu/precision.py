"""The built-in ``text`` job in bfloat16, float16 and float32: bits per byte of held-out text after a few hundred steps.

bfloat16 is torch's autocast around each step of one rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import fields

import torch

import counterpoint as cp
from benchmarks.gpu.checks import Check, passes_if, skip
from benchmarks.gpu.target import Target
from counterpoint.jobs.job import sequence_loss
from counterpoint.jobs.models import GPT, GPTShape
from counterpoint.jobs.registry import find_job
from counterpoint.training.options import TrainingOptions

TOLERANCE = 0.01
HELD_OUT = 64


def measure(target: Target) -> Iterator[Check]:
    """Yield each precision's bits per byte, compared with float32's."""
    precise = bits_per_byte(target, None)
    yield Check("text, fp32", "-", f"{precise:.4f} bits per byte", "", {"bits_per_byte": precise})
    if target.is_dry_run:
        yield skip("text, bf16", "the stand-in device has no autocast")
    else:
        yield compare(precise, bits_per_byte(target, torch.bfloat16))
    if "precision" not in {field.name for field in fields(TrainingOptions)}:
        yield skip("text, fp16", "losses are not scaled yet, without which float16 ends in nan")


def compare(precise: float, half: float) -> Check:
    """Return whether bfloat16 learns as float32 does."""
    difference = half / precise - 1
    reason, figures = f"within {TOLERANCE:.0%} of fp32; {difference:+.2%}", {"bits_per_byte": half}
    return Check("text, bf16", passes_if(abs(difference) <= TOLERANCE), f"{half:.4f} bits per byte", reason, figures)


def bits_per_byte(target: Target, dtype: torch.dtype | None) -> float:
    """Train the job; return the loss of held-out text in bits per byte."""
    job = find_job("text")
    train, held_out = job.build_data()
    torch.manual_seed(0)
    shape = GPTShape() if not target.is_dry_run else GPTShape(num_layers=1, width=16, head_dim=8)
    model = GPT(shape).to(target.device)
    num_steps, batch_size = target.size((300, job.batch_size), (2, 2))
    autocast = torch.autocast(target.device.type, dtype) if dtype is not None else nullcontext()
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
    optimizer = job.optimizer(model.parameters())
    with cp.parallelize(model, optimizer, sequence_loss, strategy="solo", device=target.accelerator) as step:
        for number in range(num_steps):
            chosen = order[number * batch_size : (number + 1) * batch_size].tolist()
            with autocast:
                step(*train.fetch(chosen))
    inputs, targets = held_out.fetch(range(target.size(HELD_OUT, 2)))
    with torch.no_grad(), autocast:
        loss = sequence_loss(model(inputs.to(target.device)).float(), targets.to(target.device))
    return float(loss) / 0.6931471805599453
