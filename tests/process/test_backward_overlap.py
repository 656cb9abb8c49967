"""Sums that begin while the backward continues, on real processes joined by gloo, and by shared memory."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp
from counterpoint.launchers.environment import detect
from counterpoint.testing.parity import relative_difference

pytestmark = pytest.mark.process
WIDTH, SIZES = 6, (12, 12, 11, 1, 12)
ROWS = [
    ("data({n}, bucket=0, tune=off)", 2),
    ("data({n}, bucket=700B, first_bucket=400B)", 2),
    ("data({n}, update=sharded, bucket=0)", 1),
    ("zero({n}, level=1)", 2),
]


class Varying(nn.Module):
    """Two branches, one of them not always taken, and a weight that is used twice."""

    def __init__(self):
        super().__init__()
        self.tied, self.rare, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        hidden = torch.tanh(self.tied(torch.tanh(self.tied(x))))
        return self.last(hidden + self.rare(hidden) if float(x.sum()) > 0 else hidden)


def train(strategy, num_microbatches=1, **options):
    """Return the parameters after some steps with batches of several sizes."""
    torch.manual_seed(0)
    model = Varying().double()
    with cp.parallelize(
        model, partial(optim.AdamW, lr=1e-2), F.mse_loss, strategy=strategy, num_microbatches=num_microbatches,
        unused_parameters="zero", share_params_on_host=False, cross_sample="accept", **options,
    ) as step:  # fmt: skip
        for number, size in enumerate(SIZES):
            draw = torch.Generator().manual_seed(number)
            x = torch.randn(size, WIDTH, generator=draw, dtype=torch.float64)
            step(x, x.flip(0))
        sites = step.local_ranks.ranks[
            step.local_ranks.world.fabrics[0].rank
        ].interpreter.communication.overlap.reducers
        num_buckets = [len(site.bucket_plan.assignment) for group in sites.values() for site in group]
    return [param.detach() for param in model.parameters()], num_buckets


def compare(num_ranks, transport):
    """Return for each row how far it is from solo, and how many buckets there were."""
    torch.set_num_threads(1)
    detected, result = detect(), []
    assert detected is not None, "a rank has been told who it is"
    environment = replace(detected, transport=transport)
    for text, micros in ROWS:
        mine, num_buckets = train(text.format(n=num_ranks), micros, environment=environment)
        theirs, _ = train("solo", micros * num_ranks, environment=replace(environment, world_size=1, rank=0))
        result.append([max(map(relative_difference, mine, theirs)), num_buckets])
    return result


@pytest.mark.long
@pytest.mark.parametrize(("num_ranks", "transport"), [(2, "gloo"), pytest.param(3, "auto", marks=pytest.mark.slow)])
def test_whatever_begins_early_ends_where_solo_ends(num_ranks, transport):
    for one in cp.launch(compare, ranks=num_ranks, args=[num_ranks, transport]):
        assert all(worst <= 1e-12 for worst, _ in one)
        assert [num_buckets for _, num_buckets in one] == [
            [4],
            [2],
            [4],
            [1],
        ]  # rank 0 does not take the rare branch at first
