"""Several models and steps in one loop: adversaries, shared parts, and turns of several optimizers on one model."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import counterpoint as cp
from tests.training.several_models import (
    ADAM,
    BATCHES,
    MOMENTUM,
    PlainStep,
    finish,
    network,
    train_adversaries,
    train_in_turns,
)
from tests.training.trainers import build_seeded

PLANS = ("solo", "data(2)", "zero(2, level=1)", "zero3(2)", "pipeline(2)", "pipeline(2) * data(2)")


def check_equal(train, *strategies):
    """Train in a plain loop and under a plan, or under one plan for each step."""
    expected = train(PlainStep, PlainStep)
    makers = [partial(cp.parallelize, strategy=strategy) for strategy in strategies]
    losses, *weights = train(makers[0], makers[-1])
    assert losses == pytest.approx(expected[0], abs=1e-12)
    torch.testing.assert_close(weights, list(expected[1:]), rtol=0, atol=1e-12)


@pytest.mark.long(quick=["zero3(2)"])
@pytest.mark.parametrize("strategy", PLANS)
def test_a_loss_that_goes_through_another_model_is_that_of_a_plain_loop(strategy):
    """Its backward left gradients on the other model, which that one's next step added to its own on one rank."""
    check_equal(train_adversaries, strategy)


def test_models_may_have_plans_of_their_own():
    check_equal(train_adversaries, "zero3(2)", "pipeline(2)")


@pytest.mark.parametrize("strategy", ["solo", "data(2)"])
def test_gradients_that_others_have_left_are_dropped(strategy):
    def train(make, _):
        model, losses = network(3, 4), []
        step = make(model, ADAM, F.mse_loss)
        for batch in BATCHES:
            losses.append(step(batch, torch.zeros(8, 4, dtype=torch.float64)))
            model(batch).sum().backward()
        return losses, *finish(step)

    check_equal(train, strategy)


@pytest.mark.long(quick=["zero(2, level=1)"])
@pytest.mark.parametrize("strategy", PLANS)
def test_two_steps_train_one_model_in_turns(strategy):
    """Each had a copy of its own under plans of several ranks, and the last to be closed had the last word."""
    check_equal(train_in_turns, strategy)


def test_turns_may_have_different_plans():
    check_equal(train_in_turns, "data(2)", "zero3(2)")


def train_shared_trunk(make_first, make_second):
    trunk = network(3, 4)
    models = [nn.Sequential(*trunk, nn.Tanh(), build_seeded(partial(nn.Linear, 4, size))) for size in (2, 1)]
    first, second = make_first(models[0], ADAM, F.mse_loss), make_second(models[1], MOMENTUM, F.mse_loss)
    losses = []
    for batch in BATCHES:
        losses.append(first(batch, torch.zeros(8, 2, dtype=torch.float64)))
        losses.append(second(batch, torch.ones(8, 1, dtype=torch.float64)))
    return losses, *finish(first, second)


@pytest.mark.long(quick=["zero3(2)"])
@pytest.mark.parametrize("strategy", PLANS)
def test_models_with_a_part_in_common_train_it_together(strategy):
    check_equal(train_shared_trunk, strategy)


@pytest.mark.parametrize("strategy", ["data(2)", "pipeline(2)"])
def test_a_model_that_another_step_has_trained_and_left_is_trained_further(strategy):
    def train(make, _):
        model, targets = network(3, 4), torch.zeros(8, 4, dtype=torch.float64)
        first, losses = make(model, ADAM, F.mse_loss), []
        losses.append(first(BATCHES[0], targets))
        second = make(model, MOMENTUM, F.mse_loss)
        losses.append(second(BATCHES[1], targets))
        finish(second)
        losses.append(first(BATCHES[2], targets))
        return losses, *finish(first)

    check_equal(train, strategy)


def test_a_frozen_part_that_another_step_trains_is_up_to_date():
    def train(make_first, make_second):
        trunk, head, losses = network(3, 4), build_seeded(partial(nn.Linear, 4, 2)), []
        second = make_second(trunk, MOMENTUM, F.mse_loss)
        trunk.requires_grad_(False)
        first = make_first(nn.Sequential(*trunk, nn.Tanh(), head), ADAM(head.parameters()), F.mse_loss)
        for batch in BATCHES:
            losses.append(first(batch, torch.zeros(8, 2, dtype=torch.float64)))
            trunk.requires_grad_(True)
            losses.append(second(batch, torch.ones(8, 4, dtype=torch.float64)))
            trunk.requires_grad_(False)
        return losses, *finish(first, second)

    check_equal(train, "zero3(2)")


class ScaledLoss(nn.Module):
    """A loss with a parameter."""

    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, output, targets):
        return F.mse_loss(output * self.log_scale.exp(), targets)


def test_a_parameter_that_two_losses_share_is_trained_by_both_steps():
    def train(make_first, make_second):
        loss, models, losses = ScaledLoss(), [network(3, 4), network(3, 4)], []
        first, second = (
            make(model, ADAM([*model.parameters(), *loss.parameters()]), loss)
            for make, model in zip((make_first, make_second), models, strict=True)
        )
        for batch in BATCHES:
            losses += [step(batch, torch.ones(8, 4, dtype=torch.float64)) for step in (first, second)]
        return losses, *finish(first, second), loss.state_dict()

    check_equal(train, "zero3(2)")
