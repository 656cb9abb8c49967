"""Narrow weights with master weights of shards where commits leave decisions on the stand-in device."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp
from counterpoint.testing.stand_in_accelerator import StandInAccelerator

WIDTH, OVERFLOWS_AT = 6, 4


def train(plan, precision, **options):
    """Return losses and trained values of some steps; in fp16 one of them is skipped."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    optimizer, draw = optim.AdamW(model.parameters(), lr=0.01), torch.Generator().manual_seed(1)
    options = {"device": StandInAccelerator(), "strategy": plan, "precision": precision, **options}
    losses = []
    with cp.parallelize(model, optimizer, F.mse_loss, **options) as step:
        for number in range(8):
            x, y = (torch.randn(8, WIDTH, generator=draw) for _ in range(2))
            losses.append(step(x * (1e4 if number == OVERFLOWS_AT else 1.0), y))
        assert all(rank.interpreter.decides_on_device for rank in step.local_ranks.ranks.values())
        step.export_weights()
    return list(map(float, losses)), [param.detach().cpu().tolist() for param in model.parameters()]


@pytest.mark.long(quick=["fp16-clip_norm-zero(2, level=2)"])
@pytest.mark.parametrize("plan", ["zero(2, level=1)", "zero(2, level=2)"])
@pytest.mark.parametrize("clip", [{}, {"clip_norm": 0.3}, {"clip_value": 0.01}], ids=["", "clip_norm", "clip_value"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_bits_are_those_of_level_3(dtype, clip, plan):
    """It has the same flat parameters; in others, torch's fused AdamW may round the last bit differently."""
    held = train(plan, f"{dtype}(reduce={dtype}, weights=compute)", **clip)
    assert held == train("zero(2, level=3)", f"{dtype}(reduce={dtype})", **clip)
