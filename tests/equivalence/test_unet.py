"""Stages are transparent for a U-Net: what is made on the way down is read on the way up, stages later."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from counterpoint.testing import parity
from counterpoint.testing.parity_models import ParityModel, TrainConfig, plan_for

ORDERS = [
    "gpipe(2)", "gpipe(3)", "gpipe(4)", "pipeline(2)", "pipeline(4)", "zero_bubble(3)", "gpipe(2, chunks_per_stage=2)",
    "interleaved(2)", "interleaved(3, chunks_per_stage=3)", "zero_bubble(3, chunks_per_stage=2)", "pipeline(3, balance=(1,8,2))",
]  # fmt: skip
WITH_REPLICAS = [
    "gpipe(3) * data(2)", "pipeline(3) * zero(2, level=1)", "interleaved(2) * zero(2, level=2)",
    "zero_bubble(2, chunks_per_stage=2) * data(2)", "pipeline(3, replicas=(1,2,1))", "zero_bubble(3, replicas=(2,1,2))",
    "pipeline(3) * data(2) + overlap",
]  # fmt: skip


def level(num_inputs, num_outputs):
    return nn.Sequential(
        nn.Conv2d(num_inputs, num_outputs, 3, padding=1), nn.GroupNorm(1, num_outputs), nn.Tanh(), nn.Dropout2d(0.1)
    )


class UNet(nn.Module):
    """Images come down two levels and up again; each level up reads what its counterpart has made."""

    def __init__(self, width=2):
        super().__init__()
        self.down = nn.ModuleList([level(1, width), level(width, 2 * width), level(2 * width, 4 * width)])
        self.up = nn.ModuleList([level(6 * width, 2 * width), level(3 * width, width)])
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        made = [self.down[0](x)]
        for stage in self.down[1:]:
            made.append(stage(F.max_pool2d(made[-1], 2)))
        x = made.pop()
        for stage in self.up:
            x = stage(torch.cat([F.interpolate(x, scale_factor=2), made.pop()], 1))
        return self.head(x)


def build():
    torch.manual_seed(3)
    return UNet().double()


def subject():
    draw = torch.Generator().manual_seed(5)
    images = [torch.randn(length, 2, 1, 8, 8, generator=draw, dtype=torch.float64) for length in (8, 8, 7, 3)]
    return ParityModel("unet", build, tuple((pair[:, 0], pair[:, 1]) for pair in images), F.mse_loss)


@cache
def alone(recipe):
    return parity.train(subject(), plan_for("solo", recipe.num_microbatches), recipe)


def max_error(strategy, recipe):
    """Return the largest relative difference of any parameter or loss from those of the model alone."""
    run, expected = parity.train(subject(), plan_for(strategy, recipe.num_microbatches), recipe), alone(recipe)
    pairs = zip(run.losses, expected.losses, strict=True)
    return max(
        *(parity.relative_difference(run.params[name], param) for name, param in expected.params.items()),
        *(abs(mine / theirs - 1) for mine, theirs in pairs),
    )


@pytest.mark.long(quick=["zero_bubble(3)", "gpipe(2, chunks_per_stage=2)"])
@pytest.mark.parametrize("strategy", ORDERS)
def test_stages_in_any_order_change_nothing(strategy):
    assert max_error(strategy, TrainConfig()) <= parity.TOLERANCE


@pytest.mark.long(quick=["pipeline(3, replicas=(1,2,1))"])
@pytest.mark.parametrize("strategy", WITH_REPLICAS)
def test_replicas_around_stages_change_nothing(strategy):
    assert max_error(strategy, TrainConfig(clip_norm=0.3)) <= parity.TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["gpipe(4)", "interleaved(3)"])
def test_fewer_microbatches_than_stages_change_nothing(strategy):
    assert max_error(strategy, TrainConfig(num_microbatches=2)) <= parity.TOLERANCE
