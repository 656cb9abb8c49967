"""Optimizers and schedules of a DeepSpeed configuration: the classes, defaults and formulas are DeepSpeed's."""

import math
from typing import Any

import pytest
import torch

import counterpoint as cp
from counterpoint.compat.deepspeed.config import read_config
from counterpoint.compat.deepspeed.schedules import resolve_scheduler
from tests.training.trainers import max_difference, params_of

COSINE = {"total_num_steps": 6, "warmup_num_steps": 2, "warmup_type": "linear", "cos_min_ratio": 0.1}
CYCLE = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_first_step_size": 2, "cycle_second_step_size": 4}
DECAY = {"decay_step_size": 2, "decay_lr_rate": 0.5, "decay_mom_rate": 0.1}
# The rates after 0, 1, 2, ... updates, from the formulas on paper.
RATES: dict[str, tuple[str, dict[str, Any], list[float]]] = {
    "a warm-up by the logarithm": (
        "WarmupLR",
        {"warmup_max_lr": 0.4, "warmup_num_steps": 4},
        [0, 0, 0.2, 0.4 * math.log(3) / math.log(4), 0.4, 0.4],
    ),
    "a linear warm-up to the optimizer's own rate": (
        "WarmupLR",
        {"warmup_min_lr": 0.2, "warmup_num_steps": 4, "warmup_type": "linear"},
        [0.2, 0.2, 0.4, 0.6, 0.8, 1.0, 1.0],
    ),
    "a warm-up of one step takes two": (
        "WarmupLR",
        {"warmup_max_lr": 0.4, "warmup_num_steps": 1, "warmup_type": "linear"},
        [0, 0, 0.2, 0.4],
    ),
    "a linear decay": (
        "WarmupDecayLR",
        {"total_num_steps": 6, "warmup_max_lr": 0.4, "warmup_num_steps": 2, "warmup_type": "linear"},
        [0, 0, 0.2, 0.4, 0.3, 0.2, 0.1, 0, 0],
    ),
    "a cosine": ("WarmupCosineLR", COSINE, [0, 0, 0.5, 0.1 + 0.45 * (1 + math.sqrt(0.5)), 0.55, 0.1 + 0.45 * (1 - math.sqrt(0.5)), 0.1, 0.1]),
    "one cycle": ("OneCycle", CYCLE, [0.1, 0.3, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1, 0.1]),
    "one cycle in stairs": (
        "OneCycle",
        CYCLE | {"cycle_first_stair_count": 1, "cycle_second_stair_count": 2},
        [0.1, 0.1, 0.5, 0.3, 0.3, 0.1, 0.1],
    ),
    "one cycle and a decay": (
        "OneCycle",
        CYCLE | DECAY,
        [0.1, 0.3, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1 / 1.25, 0.1 / 1.5],
    ),
    "a range test": ("LRRangeTest", {"lr_range_test_step_size": 2}, [0.001, 0.0015, 0.002, 0.0025]),
    "a range test in stairs": (
        "LRRangeTest",
        {"lr_range_test_step_size": 2, "lr_range_test_step_rate": 5, "lr_range_test_staircase": True},
        [0.001, 0.001, 0.006, 0.006, 0.011],
    ),
}  # fmt: skip


@pytest.mark.parametrize("title", RATES)
def test_a_schedule_has_the_rates_of_its_formula(title):
    name, params, rates = RATES[title]
    schedule = resolve_scheduler(name, params)
    found = [schedule.learning_rates(num_updates, [1.0])[0] for num_updates in range(len(rates))]
    assert found == pytest.approx(rates, rel=1e-14, abs=1e-15)


def test_one_cycle_moves_the_first_beta_against_the_rate():
    schedule = resolve_scheduler("OneCycle", CYCLE | DECAY | {"cycle_min_mom": 0.8, "cycle_max_mom": 0.9})
    found = [schedule.momentum(num_updates) for num_updates in range(9)]
    assert found == pytest.approx([0.8, 0.85, 0.8, 0.825, 0.85, 0.875, 0.9, 0.945, 0.99])


def config_of(**sections):
    return read_config({"train_batch_size": 8, **sections}, num_ranks=1)


def test_rates_and_betas_reach_the_groups_of_the_optimizer_and_a_state_restores_them():
    config = config_of(
        optimizer={"type": "AdamW", "params": {"lr": 1.0}}, scheduler={"type": "OneCycle", "params": CYCLE}
    )
    optimizer = config.make_optimizer([torch.nn.Parameter(torch.ones(2))])
    scheduler, seen = config.make_scheduler(optimizer), []
    for _ in range(3):
        seen.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]))
        optimizer.step()
        scheduler.step()
    assert [rate for rate, _ in seen] == pytest.approx([0.1, 0.3, 0.5])
    assert [betas for _, betas in seen] == [(0.8, 0.99), (pytest.approx(0.85), 0.99), (pytest.approx(0.8), 0.99)]
    again = config.make_scheduler(config.make_optimizer([torch.nn.Parameter(torch.ones(2))]))
    again.load_state_dict(scheduler.state_dict())
    again.step()
    assert again.get_last_lr() == pytest.approx([0.3])


def test_a_list_has_a_number_for_each_parameter_group():
    schedule = resolve_scheduler("WarmupLR", {"warmup_max_lr": [0.1, 0.2], "warmup_num_steps": 2})
    assert schedule.learning_rates(9, [1.0, 1.0]) == [0.1, 0.2]
    with pytest.raises(cp.PlanError, match="has 2 numbers for 1 parameter groups; give one for each, or one for all"):
        schedule.learning_rates(9, [1.0])


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        ("Adam", {}, torch.optim.AdamW([torch.ones(1, 1)], lr=1e-3, weight_decay=0.0)),
        ("adamw", {"lr": 0.1}, torch.optim.AdamW([torch.ones(1, 1)], lr=0.1, weight_decay=0.0)),
        ("Adam", {"adam_w_mode": False, "eps": 1e-6}, torch.optim.Adam([torch.ones(1, 1)], lr=1e-3, eps=1e-6)),
        ("AdamW", {"adam_w_mode": False}, torch.optim.AdamW([torch.ones(1, 1)], lr=1e-3, weight_decay=0.0)),
        ("Adam", {"torch_adam": True}, torch.optim.AdamW([torch.ones(1, 1)])),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, torch.optim.SGD([torch.ones(1, 1)], lr=0.1, momentum=0.9)),
        ("Adagrad", {"lr": 0.1}, torch.optim.Adagrad([torch.ones(1, 1)], lr=0.1)),
    ],
)
def test_an_optimizer_has_the_defaults_of_deepspeed(name, params, expected):
    optimizer = config_of(optimizer={"type": name, "params": params}).make_optimizer([torch.ones(1, 1)])
    assert type(optimizer) is type(expected)
    assert optimizer.defaults == expected.defaults


def test_a_parameter_that_torch_does_not_have_is_an_error_with_the_nearest_one():
    config = config_of(
        optimizer={"type": "SGD", "params": {"lr": 0.1, "momentom": 0.9}},
        scheduler={"type": "StepLR", "params": {"step_size": "two"}},
    )
    with pytest.raises(cp.PlanError, match=r"params of SGD has no 'momentom'; did you mean 'momentum'"):
        config.make_optimizer([torch.ones(1)])
    with pytest.raises(cp.PlanError, match="the configuration has no scheduler; add one, or make it in the script"):
        config_of().make_scheduler(torch.optim.SGD([torch.ones(1)], lr=0.1))


STAGES = [(0, 1), (0, 2), (1, 2), (2, 2), (3, 2), (3, 1)]


def train_with_config(stage, num_ranks):
    """Train with the arguments, the optimizer and the schedule of a configuration; return the losses and weights."""
    config = read_config(
        {
            "train_batch_size": 8,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0.5,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1}},
            "scheduler": {"type": "OneCycle", "params": CYCLE},
        },
        num_ranks=num_ranks,
    )
    model = small_model()
    optimizer = config.make_optimizer(model.parameters())
    scheduler = config.make_scheduler(optimizer)
    with cp.parallelize(model, optimizer, torch.nn.functional.mse_loss, **config.arguments) as step:
        losses = []
        for inputs, targets in batches():
            losses.append(float(step(inputs, targets)))
            scheduler.step()
    return losses, params_of(model)


def small_model():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2)).double()


def batches():
    generator = torch.Generator().manual_seed(5)
    for _ in range(4):
        yield tuple(torch.randn(8, size, dtype=torch.float64, generator=generator) for size in (4, 2))


def train_alone():
    """Train as a plain loop does, with the schedule's numbers written out."""
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    losses = []
    for (inputs, targets), rate, beta in zip(batches(), (0.1, 0.3, 0.5, 0.4), (0.8, 0.85, 0.8, 0.825), strict=True):
        optimizer.param_groups[0] |= {"lr": rate, "betas": (beta, 0.99)}
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, params_of(model)


@pytest.mark.parametrize(("stage", "num_ranks"), STAGES)
def test_every_stage_trains_as_a_plain_loop_with_the_configured_schedule(stage, num_ranks):
    losses, params = train_with_config(stage, num_ranks)
    alone_losses, alone_params = train_alone()
    assert losses == pytest.approx(alone_losses, rel=1e-12)
    assert max_difference(params, alone_params) <= 1e-12
