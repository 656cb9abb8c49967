"""Bytes for each parameter in mixed precision, counted by the allocator of the stand-in device."""

import gc
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp
from counterpoint.testing.stand_in_accelerator import StandInAccelerator
from counterpoint.testing.stand_in_device import DEVICE

WIDTH, LAYERS = 128, 8


def observe(before, seen):
    """Note what is allocated; return a time, as a clock."""
    seen.append(DEVICE.allocated_bytes - before)
    return float(len(seen))


def bytes_per_parameter(plan, num_ranks, **options):
    """Return the bytes that a rank has for each parameter between the calls of its second step, at most."""
    gc.collect()
    before, seen = DEVICE.allocated_bytes, [0]
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    options = {"device": StandInAccelerator(), "num_microbatches": 2, **options}
    with cp.parallelize(model, optimizer, F.mse_loss, strategy=plan, **options) as step:
        batch = torch.ones(2 * num_ranks, WIDTH), torch.zeros(2 * num_ranks, WIDTH)
        step(*batch)
        for rank in step.local_ranks.ranks.values():
            rank.interpreter.use_clock(partial(observe, before, seen))
        step(*batch)
    return max(seen) / (num_ranks * WIDTH * WIDTH * LAYERS)


@pytest.mark.long(quick=["bf16(reduce=bf16)-18"])
@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        (None, 4 + 4 + 8),
        ("bf16", 4 + 4 + 8 + 2),
        ("bf16(reduce=bf16)", 4 + 4 + 8 + 2),
        ("bf16(reduce=bf16, weights=compute)", 2 + 2 + 12 + 4),
    ],
)
def test_float32_has_16_bytes_and_bf16_with_float32_masters_18(precision, expected):
    """The second microbatch's casts are there with the first one's gradients."""
    assert bytes_per_parameter("solo", 1, precision=precision) == pytest.approx(expected, abs=0.4)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_gradient_on_its_way_in_bf16_has_2_bytes_more(num_ranks):
    """Ranks in one process also keep the user's model, 4 bytes for all."""
    expected = 16 + 2 + 4 / num_ranks
    found = bytes_per_parameter(f"data({num_ranks})", num_ranks, precision="fp32(reduce=bf16)")
    assert found == pytest.approx(expected, abs=0.4)
