"""A model of 3 billion parameters whose optimizer state is in host memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp
from benchmarks.gpu.checks import Check, passes_if
from benchmarks.gpu.target import Target
from counterpoint.viz.number_format import format_bytes

NUM_LAYERS = 12


def measure(target: Target) -> Iterator[Check]:
    """Yield whether the device held weights and gradients only, and how long a step took."""
    width, passes = target.size(16_000, 32), ("overlap", "offload:state=host")
    gc.collect()  # what the parts before have left is not counted
    before_bytes = target.accelerator.memory_stats().allocated_bytes
    layers = [nn.Linear(width, width, bias=False, device=target.device) for _ in range(NUM_LAYERS)]
    model, draw = nn.Sequential(*layers), torch.Generator().manual_seed(0)
    inputs, targets = (torch.randn(8, width, generator=draw) for _ in range(2))
    optimizer = optim.AdamW(model.parameters(), lr=1e-4)
    seconds = []
    with cp.parallelize(
        model,
        optimizer,
        F.mse_loss,
        strategy="solo",
        passes=passes,
        device=target.accelerator,
        cross_sample="accept",
    ) as step:
        for _ in range(2):
            start_s = time.perf_counter()
            step(inputs, targets)
            target.accelerator.synchronize()
            seconds.append(time.perf_counter() - start_s)
        allocated_bytes = target.accelerator.memory_stats().allocated_bytes - before_bytes
    weight_bytes = 4 * NUM_LAYERS * width * width
    yield Check(
        "3 B, state in host memory",
        passes_if(allocated_bytes <= 2.1 * weight_bytes),
        f"{format_bytes(allocated_bytes)} on the device, {seconds[-1]:.2f} s for a step",
        f"weights and gradients are {format_bytes(2 * weight_bytes)}; with state it would be twice as much",
        {"allocated_bytes": allocated_bytes, "weight_bytes": weight_bytes, "seconds": seconds},
    )
