"""A bounded server equals its own journal, played back one by one; what workers send in a code is what is applied."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import optim

from counterpoint.data.sampler import split_batch
from counterpoint.strategies.parameter_server import Server
from counterpoint.testing import parity
from counterpoint.testing.parity_models import ADAMW, TrainConfig, make_parity_model, plan_for
from tests.references import compression
from tests.references.ssp import ssp

SSP = ["ssp(2, staleness=0)", "ssp(2, staleness=2)", "ssp(3, servers=2)", "ssp(4)"]
CODES = ["int8", "twobit:0.02", "sign", "topk:0.05"]


class Sent:
    """What a worker's gradient of a parameter becomes in a code, with what it has not sent."""

    def __init__(self, code):
        self.code, _, number = code.partition(":")
        self.number, self.residuals = float(number or 0), {}

    def __call__(self, worker, name, gradient):
        total = gradient + self.residuals.get((worker, name), 0.0)
        sent = compression.ONE_BY_ONE[self.code](total.reshape(-1), self.number).view(total.shape)
        self.residuals[worker, name] = total - sent
        return sent


def run_of(strategy, num_workers, optimizer=ADAMW):
    recipe = TrainConfig(optimizer, num_microbatches=num_workers)
    trained = make_parity_model("mlp")
    return trained, recipe, parity.train(trained, plan_for(strategy, num_workers), recipe)


def replay_journal(trained, recipe, run, num_workers, **options):
    """What the reference makes of the journals; a worker's part of a batch is what its microbatch holds."""
    parts: dict[Any, Any] = {worker: [] for worker in range(num_workers)}
    for inputs, targets in trained.batches:
        for worker, (start, stop) in enumerate(split_batch(len(inputs), recipe.num_microbatches)):
            parts[worker].append((inputs[start:stop], targets[start:stop]))
    journals = [[(entry.unit, entry.worker) for entry in journal] for journal in run.server_updates]
    model, oldest = ssp(trained.build(), units=run.compiled.model.units, journals=journals, parts=parts,
                        loss=trained.loss, optimizer=recipe.optimizer, **options)  # fmt: skip
    return {name: param.detach() for name, param in model.named_parameters()}, oldest


@pytest.mark.long(quick=["ssp(2, staleness=2)"])
@pytest.mark.parametrize("strategy", SSP)
def test_a_bounded_server_equals_its_journal_played_back_bit_for_bit(strategy):
    num_workers, server = int(strategy[4]), plan_for(strategy, int(strategy[4])).strategies[0]
    assert isinstance(server, Server)
    trained, recipe, run = run_of(strategy, num_workers, partial(optim.SGD, lr=0.1))
    expected, oldest = replay_journal(trained, recipe, run, num_workers, staleness=server.staleness)
    assert all(torch.equal(run.params[name], value) for name, value in expected.items())
    assert 0 < oldest <= server.max_intervening_updates


@pytest.mark.parametrize(("strategy", "pull_every"), [("asp(2, pull_every=3)", 3), ("asp(3, pull_every=2)", 2)])
def test_a_worker_that_pulls_rarely_continues_with_the_weights_that_it_has(strategy, pull_every):
    num_workers = int(strategy[4])
    trained, recipe, run = run_of(strategy, num_workers, partial(optim.SGD, lr=0.1))
    expected, oldest = replay_journal(trained, recipe, run, num_workers, pull_every=pull_every)
    assert all(torch.equal(run.params[name], value) for name, value in expected.items())
    assert oldest >= num_workers * (pull_every - 1)


@pytest.mark.long(quick=["downpour(3, servers=2, n_fetch=2)-optimizer1-2"])
@pytest.mark.parametrize(
    ("strategy", "optimizer", "pull_every"),
    [
        ("downpour(2)", partial(optim.Adagrad, lr=0.1), 1),
        ("downpour(3, servers=2, n_fetch=2)", partial(optim.Adagrad, lr=0.1), 2),
        ("project_adam(4, servers=2)", ADAMW, 1),
        ("parameter_server_strategy(3)", ADAMW, 1),
        ("kvstore(2, type=dist_async)", ADAMW, 1),
    ],
)
def test_an_asynchronous_system_equals_its_journal_played_back(strategy, optimizer, pull_every):
    num_workers = plan_for(strategy, 12).strategies[0].degree
    trained, recipe, run = run_of(strategy, num_workers, optimizer)
    expected, _ = replay_journal(trained, recipe, run, num_workers, pull_every=pull_every)
    assert (
        parity.max_difference(parity.relative_difference(run.params[name], value) for name, value in expected.items())
        <= parity.TOLERANCE
    )


def test_groups_that_push_apart_equal_their_journal_played_back():
    """Two groups of two ranks: each adds up among themselves, and its first rank talks to the server."""
    trained, recipe = make_parity_model("mlp"), TrainConfig(num_microbatches=4)
    run = parity.train(trained, plan_for("mxnet_mpi(4, groups=2, mode=asgd)", 4), recipe)
    journals = tuple(tuple(replace(one, worker=one.worker // 2) for one in journal) for journal in run.server_updates)
    half = TrainConfig(num_microbatches=2)
    expected, _ = replay_journal(trained, half, replace(run, server_updates=journals), 2)
    short = [batch for batch in trained.batches if len(batch[1]) % 4]
    assert len(short) == 2  # of 7 and 3 samples: their halves are of 4 and 3, and of 2 and 1, with groups as without
    assert (
        parity.max_difference(parity.relative_difference(run.params[name], value) for name, value in expected.items())
        <= parity.TOLERANCE
    )


@pytest.mark.parametrize("strategy", ["asp(2, compress=twobit:0.02)", "asp(3, compress=topk:0.05)"])
def test_an_asynchronous_server_applies_what_has_been_sent_in_the_code(strategy):
    trained, recipe, run = run_of(strategy, int(strategy[4]))
    sent = Sent(strategy.partition("compress=")[2].rstrip(")"))
    expected, _ = replay_journal(trained, recipe, run, int(strategy[4]), sent=sent)
    assert (
        parity.max_difference(parity.relative_difference(run.params[name], value) for name, value in expected.items())
        <= parity.TOLERANCE
    )
    assert parity.max_difference(float(left.abs().max()) for left in sent.residuals.values()) > 0


@pytest.mark.long(quick=["int8"])
@pytest.mark.parametrize("code", CODES)
def test_a_synchronous_server_adds_up_the_same_codes_as_replicas_do(code):
    _, _, served = run_of(f"bsp(4, servers=2, compress={code})", 4)
    _, _, summed = run_of(f"data(4, compress={code})", 4)
    error = parity.max_difference(
        parity.relative_difference(served.params[name], value) for name, value in summed.params.items()
    )
    assert error <= parity.TOLERANCE
    assert parity.max_difference([parity.check_parity("mlp", f"bsp(4, compress={code})").params]) > 1e-6


def test_a_code_of_half_the_bits_rounds_each_gradient_once():
    """float16 has 11 bits of precision; a residual keeps what is lost, so that nothing drifts."""
    assert 1e-9 < parity.check_parity("mlp", "bsp(4, compress=fp16)").params < 1e-2
