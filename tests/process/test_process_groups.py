"""Plans whose ranks exchange tensors over c10d process groups, of gloo: the code that NCCL runs, too."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp
from counterpoint.launchers.environment import detect
from tests.process.forked_ranks import run_forked

pytestmark = pytest.mark.process
WIDTH, SIZES = 6, (12, 12, 11, 12)
PAIR_PLANS = [
    ("data(2)", 1),
    ("zero(2, level=1)", 2),
    ("zero(2, level=2)", 1),
    ("zero(2, level=3)", 2),
    ("pipeline(2)", 2),
    ("tensor(2)", 1),
]
QUARTET_PLANS = [("pipeline(2) * zero(2, level=3)", 2), ("data(2) * tensor(2)", 1)]


def build():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH + 1), nn.Tanh(), nn.Linear(WIDTH + 1, WIDTH)
    ).double()


def train(strategy, num_microbatches, environment):
    """Return the losses of some steps with batches of two sizes."""
    losses = []
    with cp.parallelize(
        build(), partial(optim.AdamW, lr=1e-2), F.mse_loss, strategy=strategy, num_microbatches=num_microbatches,
        environment=environment,
    ) as step:  # fmt: skip
        for number, size in enumerate(SIZES):
            x = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
            losses.append(float(step(x, x.flip(0))))
    return losses


def compare(plans):
    """Return for each plan by how much its losses differ from solo's."""
    detected = detect()
    assert detected is not None, "a rank has been told who it is"
    environment = replace(detected, transport="process_group")
    expected = train("solo", 1, replace(environment, world_size=1, rank=0))
    result = {}
    for text, num_microbatches in plans:
        losses = train(text, num_microbatches, environment)
        result[text] = max(abs(mine / theirs - 1) for mine, theirs in zip(losses, expected, strict=True))
    return result


@pytest.mark.long
@pytest.mark.parametrize("plans", [PAIR_PLANS, QUARTET_PLANS], ids=["two", "four"])
def test_plans_on_process_groups_train_as_one_process_does(plans):
    num_ranks = 2 if plans is PAIR_PLANS else 4
    for by_plan in run_forked(compare, ranks=num_ranks, args=[plans]):
        assert isinstance(by_plan, dict), by_plan
        assert by_plan.keys() == {text for text, _ in plans}
        assert max(by_plan.values()) <= 1e-12, by_plan
