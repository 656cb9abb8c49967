"""Loss scaling with ranks in processes, which share memory or exchange gradients: the same bits, and one decision."""

import math
import os

import pytest
import torch
import torch.nn.functional as F
from torch import optim

import counterpoint as cp
from tests.process.forked_ranks import run_forked
from tests.training.test_nonfinite_gradients import marked_data, planted
from tests.training.trainers import dataset, mlp

pytestmark = pytest.mark.process
PLANS = ["data(2)", "zero(2, level=1)", "zero(2, level=3)", "pipeline(2)", "data(2, compress=powersgd)"]


def train(plan, loss_scale, clip_norm):
    """Return losses and weights of a few steps in float32, as texts."""
    torch.manual_seed(0)
    model = mlp().float()
    inputs, targets = dataset(24).tensors
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    options = {"loss_scale": loss_scale, "clip_norm": clip_norm}
    with cp.parallelize(model, optimizer, F.cross_entropy, strategy=plan, **options) as step:
        losses = [float(step(inputs.float(), targets)) for _ in range(4)]
    values = [value.double().flatten().tolist() for value in model.state_dict().values()]
    return [losses, values]


@pytest.mark.long
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_a_scale_changes_no_bit(plan, clip_norm):
    scaled, plain = (run_forked(train, ranks=2, args=(plan, scale, clip_norm)) for scale in (2.0**16, None))
    assert scaled == plain
    assert math.isfinite(sum(scaled[0][0]))


def overflow_on_one_rank(plan):
    """Take three steps; in the second a gradient of one rank is not finite. Return the states of the scale."""
    model, scales = planted(math.inf), []
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with cp.parallelize(model, optimizer, F.cross_entropy, strategy=plan, loss_scale="dynamic") as step:
        for batch in marked_data(step=1, sample=11):
            step(*batch)
            rank = step.local_ranks.ranks[int(os.environ["RANK"])]
            scales.append(rank.interpreter.state.loss_scaler.scale)
    return scales


@pytest.mark.long(quick=["data(2)"])
@pytest.mark.parametrize("plan", ["data(2)", "pipeline(2)"])
def test_an_overflow_on_one_rank_halves_the_scale_of_all(plan):
    assert run_forked(overflow_on_one_rank, ranks=2, args=(plan,)) == [[2.0**16, 2.0**15, 2.0**15]] * 2
