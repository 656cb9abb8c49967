"""Learning rates for large batches are the formulas of their papers, in every step, whatever torch's schedulers do."""

import math
from typing import Any

import pytest
import torch
from torch import nn, optim

from counterpoint.errors import PlanError
from counterpoint.optim.lr_schedules import large_batch_schedule, learning_rate_scale

EPOCHS, EACH, WARM, LR = 10, 4, 3, 0.1
FULL, START, STOP = 8 * LR, WARM * EACH, EPOCHS * EACH
RECIPE: dict[str, Any] = {
    "batch_size": 512,
    "reference_batch_size": 64,
    "epochs": EPOCHS,
    "steps_per_epoch": EACH,
    "warmup_epochs": WARM,
}


def optimizer(*rates):
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates or (LR,)]
    return optim.SGD(groups, lr=LR, momentum=0.9)


def rates(num_steps=STOP, made=None, **changes):
    """Return the learning rate of every step of a run."""
    made = made or optimizer()
    schedule = large_batch_schedule(made, **{**RECIPE, **changes})
    result = []
    for _ in range(num_steps):
        result.append(made.param_groups[-1]["lr"])
        made.step()
        schedule.step()
    return result


def share(step):
    """Return how much of the time after the warm-up is over."""
    return (step - START) / (STOP - START)


CURVES = {
    ("constant",): lambda _: 1.0,
    ("step", ("step_size", 4), ("gamma", 0.5)): lambda step: 0.5 ** (step // 16),
    ("multi-step", ("milestones", (5, 8))): lambda step: 0.1 ** ((step >= 20) + (step >= 32)),
    ("exponential", ("gamma", 0.5)): lambda step: 0.5 ** ((step - START) / EACH),
    ("polynomial", ("power", 2)): lambda step: (1 - share(step)) ** 2,
    ("cosine", ("eta_min", 0.0)): lambda step: (1 + math.cos(math.pi * share(step))) / 2,
}


@pytest.mark.parametrize("decay", CURVES, ids=lambda decay: decay[0])
def test_a_rate_warms_up_in_a_line_and_falls_along_its_curve(decay):
    result = rates(decay=decay[0], **dict(decay[1:]))
    rise = [LR + (FULL - LR) * step / START for step in range(START)]
    assert result == pytest.approx(rise + [FULL * CURVES[decay](step) for step in range(START, STOP)])


def test_the_warm_up_is_that_of_horovod():
    """Its callback: ``base / size * (epoch * (size - 1) / warmup_epochs + 1)``, the base scaled with the size."""
    size = 8
    expected = [FULL / size * (step / EACH * (size - 1) / WARM + 1) for step in range(START)]
    assert rates(num_steps=START) == pytest.approx(expected)


def test_one_cycle_is_full_when_the_warm_up_ends_and_lowest_at_the_end():
    result = rates(decay="one-cycle", final_div_factor=10.0)
    assert [result[0], result[START], result[-1]] == pytest.approx([LR, FULL, LR / 10])
    assert max(result) == result[START]


def test_one_cycle_takes_the_momentum_along_when_asked():
    made = optimizer()
    rates(num_steps=START, made=made, decay="one-cycle", cycle_momentum=True)
    assert made.param_groups[0]["momentum"] == pytest.approx(0.85)


@pytest.mark.parametrize(("rule", "scale"), [("linear", 8.0), ("sqrt", math.sqrt(8)), ("none", 1.0)])
def test_a_rate_grows_with_the_batch_by_a_rule(rule, scale):
    assert learning_rate_scale(512, reference_batch_size=64, rule=rule) == pytest.approx(scale)
    assert rates(rule=rule)[START] == pytest.approx(LR * scale)


def test_every_group_keeps_its_own_rate():
    assert rates(made=optimizer(LR, 0.01))[START] == pytest.approx(0.08)


def test_a_warm_up_starts_at_the_given_rate_and_is_optional():
    assert rates(rule="none", warmup_from=0.01)[0] == pytest.approx(LR / 100)
    assert rates(warmup_epochs=0)[0] == pytest.approx(FULL)


def test_a_batch_below_the_reference_is_scaled_down_at_once():
    assert rates(batch_size=32)[: START + 1] == pytest.approx([LR / 2] * (START + 1))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"epochs": 0}, "^epochs=0 is not a count; give a whole number, 1 or more$"),
        ({"steps_per_epoch": 2.5}, "^steps_per_epoch=2.5 is not a count"),
        ({"batch_size": 0}, "^batch_size=0 is not a count"),
        ({"warmup_epochs": 10}, "^a warm-up of 10 epochs is not shorter than the run's 10; give a shorter warmup"),
        ({"warmup_epochs": -1}, "^warmup_epochs=-1 is out of range; give a finite number, 0 or more$"),
        (
            {"warmup_from": 0.0},
            r"^warmup_from=0\.0 is not a fraction of the learning rate; give more than 0 and at most 1, or None",
        ),
        ({"rule": "linaer"}, "^rule='linaer' is not one of linear, sqrt, none; did you mean 'linear'\\?$"),
        ({"decay": "cosin"}, "^decay='cosin' is not one of constant, .*, one-cycle; did you mean 'cosine'\\?$"),
        ({"decay": "step", "gama": 0.1}, "^the decay 'step' has no option 'gama'; its options are step_size, gamma$"),
        ({"decay": "constant", "gamma": 0.1}, "^the decay 'constant' has no option 'gamma'; it has none$"),
        (
            {"decay": "multi-step", "milestones": (2, 5)},
            "^the learning rate decays at epoch 2, but the warm-up",
        ),
        ({"decay": "step", "step_size": 0}, "^step_size=0 is out of range"),
        (
            {"decay": "one-cycle", "rule": "none"},
            "^one-cycle needs a warm-up, but has 12 steps from 1 of the full .* warmup_from bel",
        ),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused_and_changes_nothing(changes, text):
    made = optimizer()
    with pytest.raises(PlanError, match=text):
        large_batch_schedule(made, **{**RECIPE, **changes})
    assert made.param_groups[0]["lr"] == LR
    assert "initial_lr" not in made.param_groups[0]


def test_a_rate_is_not_scaled_twice():
    made = optimizer()
    large_batch_schedule(made, **RECIPE)
    with pytest.raises(
        PlanError, match=r"^the optimizer has a schedule already, from a learning rate of 0\.8, and a second"
    ):
        large_batch_schedule(made, **RECIPE)
    assert made.param_groups[0]["lr"] == LR
