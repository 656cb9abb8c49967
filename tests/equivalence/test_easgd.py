"""Workers that are drawn to a center equal the paper's loop, meeting by meeting; the model is the center."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import optim

from counterpoint.data.sampler import split_batch
from counterpoint.strategies.easgd import ElasticAveraging
from counterpoint.testing import parity
from counterpoint.testing.parity_models import TrainConfig, make_parity_model, plan_for
from tests.references.easgd import easgd

SGD = partial(optim.SGD, lr=0.1)
NESTEROV = partial(optim.SGD, lr=0.05, momentum=0.9, nesterov=True)
PLANS = [
    "easgd(2, alpha=0.25, tau=1)",
    "easgd(3, servers=2, alpha=0.3, tau=1)",
    "easgd(2, tau=2)",
    "easgd(3, tau=2, alpha=0.125)",
]


def train_easgd(strategy, optimizer, per_worker=1):
    """What a plan has come to, and what the reference makes of its journal; the last two batches fill all workers."""
    plan = plan_for(strategy, 6)
    elastic = plan.strategies[-1]
    assert isinstance(elastic, ElasticAveraging)
    count, each = elastic.degree, 6 // elastic.degree
    recipe, trained = TrainConfig(optimizer, num_microbatches=6), make_parity_model("mlp")
    run = parity.train(trained, plan, recipe)
    parts: dict[int, list[Any]] = {worker * per_worker: [] for worker in range(count)}
    for inputs, targets in trained.batches:
        places = split_batch(len(inputs), 6)
        for at, part in enumerate(parts.values()):
            start, stop = places[at * each][0], places[(at + 1) * each - 1][1]
            part.append((inputs[start:stop], targets[start:stop]))
    center, _ = easgd(trained.build(), units=run.compiled.model.units, parts=parts, loss=trained.loss,
                      journals=[[(one.unit, one.worker) for one in journal] for journal in run.server_updates],
                      optimizer=optimizer, alpha=float(elastic.alpha), tau=elastic.tau)  # fmt: skip
    return run, dict(center.named_parameters())


@pytest.mark.long(quick=["easgd(3, tau=2, alpha=0.125)-optimizer1"])
@pytest.mark.parametrize("optimizer", [SGD, NESTEROV])
@pytest.mark.parametrize("strategy", PLANS)
def test_an_elastic_plan_equals_the_papers_loop(strategy, optimizer):
    run, center = train_easgd(strategy, optimizer)
    error = parity.max_difference(
        parity.relative_difference(run.params[name], value.detach()) for name, value in center.items()
    )
    assert error <= parity.TOLERANCE
    assert len(run.server_updates[0]) > 0


def test_one_worker_with_one_microbatch_plays_back_bit_for_bit():
    """Sums over microbatches are rounded otherwise, so that there is one here."""
    trained, plan = make_parity_model("mlp"), plan_for("easgd(2, alpha=0.25, tau=1)", 2)
    run = parity.train(trained, plan, TrainConfig(SGD, num_microbatches=2))
    parts: dict[int, list[Any]] = {0: [], 1: []}
    for inputs, targets in trained.batches:
        for worker, (start, stop) in enumerate(split_batch(len(inputs), 2)):
            parts[worker].append((inputs[start:stop], targets[start:stop]))
    center, _ = easgd(trained.build(), units=run.compiled.model.units, parts=parts, loss=trained.loss,
                      journals=[[(one.unit, one.worker) for one in journal] for journal in run.server_updates],
                      optimizer=SGD, alpha=0.25, tau=1)  # fmt: skip
    assert all(torch.equal(run.params[name], value) for name, value in center.named_parameters())


def test_a_worker_may_be_a_group_of_ranks():
    """Three workers of two ranks each: the group's gradient is that of the mean over its samples."""
    run, center = train_easgd("mxnet_mpi(6, groups=3, mode=esgd, alpha=0.25, tau=2)", SGD, per_worker=2)
    error = parity.max_difference(
        parity.relative_difference(run.params[name], value.detach()) for name, value in center.items()
    )
    assert error <= parity.TOLERANCE
