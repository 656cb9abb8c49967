"""Local SGD and double buffering give up "equals solo"; step by step they equal a sequential loop of their rule."""

from dataclasses import replace
from functools import partial

import pytest
from torch import optim

from counterpoint.data.sampler import split_batch
from counterpoint.testing import parity
from counterpoint.testing.parity_models import ADAMW, TrainConfig, make_parity_model, plan_for
from tests.references.double_buffering import double_buffering
from tests.references.local_sgd import local_sgd

MOMENTUM = partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True)
MICROS = 4


def taking(num_batches):
    """The small network with so many batches of its five."""
    trained = make_parity_model("mlp")
    return replace(trained, batches=trained.batches[:num_batches])


def parts_of(trained, num_replicas):
    """Each replica's part of every batch: what its microbatches hold; in the fifth batch the fourth holds nothing."""
    each, parts = MICROS // num_replicas, []
    for inputs, targets in trained.batches:
        places = split_batch(len(inputs), MICROS)
        bounds = [(places[at * each][0], places[(at + 1) * each - 1][1]) for at in range(num_replicas)]
        parts.append([(inputs[start:stop], targets[start:stop]) for start, stop in bounds])
    return parts


def max_error(strategy, num_batches, recipe, expected, losses):
    run = parity.train(taking(num_batches), plan_for(strategy, MICROS), recipe)
    assert len(run.losses) == num_batches
    result = [parity.relative_difference(run.params[name], value) for name, value in expected.items()]
    return max(*result, *(abs(mine / theirs - 1) for mine, theirs in zip(run.losses, losses, strict=True)))


def off_local(strategy, num_batches, num_replicas, recipe, **rule):
    trained = taking(num_batches)
    batches = parts_of(trained, num_replicas)

    def weigh(step):
        sizes = [len(inputs) for inputs, _ in batches[step]]
        return [size / sum(sizes) for size in sizes]

    expected, losses = local_sgd(trained.build(), batches=batches, weigh=weigh, loss=trained.loss,
                                 optimizer=recipe.optimizer, clip=recipe.clip_norm, **rule)  # fmt: skip
    return max_error(strategy, num_batches, recipe, expected, losses)


@pytest.mark.long(quick=["adamw-5", "momentum-1"])
@pytest.mark.parametrize("num_batches", range(1, 6))
@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAMW], ids=["momentum", "adamw"])
def test_replicas_update_apart_and_meet_as_the_reference_does_after_every_step(num_batches, optimizer):
    recipe = TrainConfig(optimizer, MICROS)
    assert off_local("data(2, sync_every=2)", num_batches, 2, recipe, every=2) <= parity.TOLERANCE


@pytest.mark.long(quick=["2", "1"])
@pytest.mark.parametrize("num_batches", range(1, 6))
def test_gradients_are_summed_in_the_first_steps_of_post_local_sgd(num_batches):
    """And clipped by the norm of the sum, in later steps by each replica's own."""
    recipe = TrainConfig(MOMENTUM, MICROS, clip_norm=0.5)
    off_by = off_local("data(4, sync_every=3, sync_first=1)", num_batches, 4, recipe, every=3, first=1)
    assert off_by <= parity.TOLERANCE


@pytest.mark.long(quick=["data(2, compress=topk:1) * data(2, sync_every=2)-2"])
@pytest.mark.parametrize(
    ("strategy", "num_replicas"),
    [
        ("data(4, sync_every=2)", 4),
        ("pipeline(2) * data(2, sync_every=2)", 2),
        ("tensor(2) * data(2, sync_every=2)", 2),
        ("data(2) * data(2, sync_every=2)", 2),
        ("data(2, compress=topk:1) * data(2, sync_every=2)", 2),
    ],
)
def test_a_replica_may_be_a_plan_of_its_own(strategy, num_replicas):
    assert off_local(strategy, 5, num_replicas, TrainConfig(MOMENTUM, MICROS), every=2) <= parity.TOLERANCE


@pytest.mark.long(quick=["momentum-4", "adamw-3"])
@pytest.mark.parametrize("num_batches", range(1, 6))
@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAMW], ids=["momentum", "adamw"])
def test_double_buffering_applies_each_gradient_one_step_late(num_batches, optimizer):
    trained = taking(num_batches)
    expected, losses = double_buffering(trained.build(), batches=trained.batches, loss=trained.loss,
                                        optimizer=optimizer)  # fmt: skip
    assert (
        max_error("data(2, staleness=1)", num_batches, TrainConfig(optimizer, MICROS), expected, losses)
        <= parity.TOLERANCE
    )


@pytest.mark.long(quick=["pipeline(2) * data(2, staleness=1)"])
@pytest.mark.parametrize(
    "strategy", ["data(4, staleness=1)", "pipeline(2) * data(2, staleness=1)", "tensor(2) * data(2, staleness=1)",
                 "data(2) * data(2, staleness=1)"]
)  # fmt: skip
def test_double_buffering_goes_round_whatever_makes_a_replica(strategy):
    trained = taking(5)
    expected, losses = double_buffering(trained.build(), batches=trained.batches, loss=trained.loss, optimizer=ADAMW)
    assert max_error(strategy, 5, TrainConfig(ADAMW, MICROS), expected, losses) <= parity.TOLERANCE


def test_the_last_gradient_of_a_fit_is_applied_by_no_step():
    trained = taking(1)
    run = parity.train(trained, plan_for("data(2, staleness=1)", MICROS), TrainConfig(MOMENTUM, MICROS))
    assert all(run.params[name].equal(param) for name, param in trained.build().named_parameters())
