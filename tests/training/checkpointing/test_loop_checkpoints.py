"""A custom loop that saves continues as if nothing had happened, under any plan; nothing else is loaded."""

import math
import random
import warnings
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp
from counterpoint.checkpoint import step_folders
from counterpoint.training.optimizer_state import find_form_flaw, from_json, to_json
from tests.training.trainers import build_seeded, fit, max_difference, mlp, state_of

PLANS = ["solo", "data(2)", "zero3(2)", "pipeline(2)", "tensor(2)"]
OTHER = {
    "solo": "zero3(2)",
    "data(2)": "pipeline(2)",
    "zero3(2)": "data(4)",
    "pipeline(2)": "tensor(2)",
    "tensor(2)": "solo",
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        return self.last(torch.tanh(self.second(self.dropout(torch.tanh(self.first(x))))))


def draw_batch():
    """Draw a batch from the global generators of torch, NumPy and Python."""
    inputs = torch.randn(8, 4, dtype=torch.float64) + np.random.rand() + random.random()
    return inputs, torch.randn(8, 3, dtype=torch.float64)


def train(plan, num_steps, folder=None, *, save_at=(), load=None, first=0, optimizer=optim.AdamW, **options):
    """Train up to a step; return losses from the load on, the model's state, the optimizer's and the learning rate."""
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    model, losses = build_seeded(Net), []
    adam = optimizer(model.parameters(), lr=0.05)
    with cp.parallelize(model, adam, F.mse_loss, strategy=plan) as step:
        scheduler = optim.lr_scheduler.StepLR(adam, 2, 0.5)
        for _ in range(first):
            step(*draw_batch())
        if load is not None:
            assert step.load(load, scheduler=scheduler, **options) == step.number
        while step.number < num_steps:
            losses.append(step(*draw_batch()))
            scheduler.step()
            if step.number in save_at:
                step.save(folder, scheduler=scheduler, **options)
        return losses, state_of(model), adam.state_dict(), adam.param_groups[0]["lr"]


def require_same_end(found, expected, num_losses):
    assert found[0] == pytest.approx(expected[0][-num_losses:], abs=1e-12)
    assert len(found[0]) == num_losses
    assert max_difference(found[1], expected[1]) <= 1e-12
    assert found[3] == expected[3]
    for index, state in expected[2]["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(found[2]["state"][index][key], value, rtol=1e-12, atol=1e-14)


@pytest.mark.long(quick=["tensor(2)-0"])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("plan", PLANS)
def test_a_loop_continues_from_its_checkpoint_under_any_plan(plan, first, tmp_path):
    """Loaded before the first step, and after one."""
    expected = train(plan, 5, tmp_path, save_at=(2,))
    for other in (plan, OTHER[plan]):
        require_same_end(train(other, 5, load=tmp_path, first=first), expected, 3)


@pytest.mark.long(quick=["data(2, staleness=1)", "data(2, sync_every=2)", "server(2)"])
@pytest.mark.parametrize("plan", ["easgd(2)", "data(2, sync_every=2)", "data(2, staleness=1)", "server(2)"])
def test_a_loop_continues_with_what_only_its_plan_has(plan, tmp_path):
    expected = train(plan, 5, tmp_path, save_at=(3,))
    require_same_end(train(plan, 5, load=tmp_path), expected, 2)


def test_an_asynchronous_pipeline_is_flushed_by_a_save(tmp_path):
    plan = "pipeline(2, schedule=pipedream)"
    model = build_seeded(Net)
    with cp.parallelize(model, optim.SGD(model.parameters(), lr=0.1), F.mse_loss, strategy=plan) as step:
        for _ in range(3):
            step(*draw_batch())
        step.save(tmp_path)
        saved = state_of(step.export_weights())
    other = build_seeded(Net)
    with cp.parallelize(other, optim.SGD(other.parameters(), lr=0.1), F.mse_loss, strategy=plan) as step:
        assert step.load(tmp_path) == 3
        assert max_difference(state_of(other), saved) == 0


def test_a_loop_starts_where_nothing_is_saved_if_it_may(tmp_path):
    step = cp.parallelize(mlp(), optim.SGD, F.cross_entropy)
    assert step.load(tmp_path / "new", if_missing="start") == 0
    with pytest.raises(cp.errors.CheckpointError, match="new"):
        step.load(tmp_path / "new")
    with pytest.raises(cp.PlanError, match=r"^if_missing='go' is not one of error, start$"):
        step.load(tmp_path, if_missing="go")  # type: ignore[arg-type]
    with pytest.raises(cp.errors.CheckpointError, match=r"^there is nothing to save before the first step"):
        step.save(tmp_path)
    step.close()
    with pytest.raises(cp.PlanError, match=r"^save\(\) was called after close\(\)"):
        step.save(tmp_path)


def test_a_checkpoint_of_another_optimizer_or_model_changes_nothing(tmp_path):
    train("data(2)", 2, tmp_path, save_at=(2,))
    model = build_seeded(Net)
    before = state_of(model)
    with cp.parallelize(model, optim.SGD(model.parameters(), lr=0.1), F.mse_loss) as step:
        with pytest.raises(
            cp.errors.CheckpointError, match=r"the optimizer AdamW and 1 parameter groups, this loop has"
        ):
            step.load(tmp_path)
        assert step.number == 0
    assert max_difference(state_of(model), before) == 0
    with cp.parallelize(mlp(), optim.AdamW, F.mse_loss) as step, pytest.raises(cp.errors.CheckpointError):
        step.load(tmp_path)


def test_only_checkpoints_of_the_run_are_removed_and_another_run_is_refused(tmp_path):
    train("zero3(2)", 4, tmp_path, save_at=(1, 2, 4), keep_last=2)
    assert [path.name for path in step_folders(tmp_path)] == ["step-00000002", "step-00000004"]
    with pytest.raises(cp.errors.CheckpointError, match="another run"):
        train("solo", 1, tmp_path, save_at=(1,))


@pytest.mark.long(quick=["zero3(2)"])
@pytest.mark.parametrize("plan", ["solo", "zero3(2)", "pipeline(2)"])
def test_what_is_changed_between_load_and_the_first_step_is_kept(plan, tmp_path):
    """The weights of a layer, and the optimizer's state; either is the user's, as after torch's own loads."""
    train(plan, 2, tmp_path, save_at=(2,))
    result = []
    for has_state in (True, False):
        model = build_seeded(Net)
        adam = optim.AdamW(model.parameters(), lr=0.05)
        with cp.parallelize(model, adam, F.mse_loss, strategy=plan) as step:
            step.load(tmp_path)
            with torch.no_grad():
                model.last.bias.fill_(7)
            if not has_state:
                adam.load_state_dict(optim.AdamW(model.parameters(), lr=0.05).state_dict())
            step(*draw_batch())
            result.append(float(adam.state[model.last.bias]["step"]))
            assert float(model.last.bias.detach().mean()) > 6
    assert result == [3, 1]


def test_the_optimizers_state_is_refused_between_load_and_the_first_step(tmp_path):
    train("data(2)", 2, tmp_path, save_at=(2,))
    model = build_seeded(Net)
    adam = optim.AdamW(model.parameters(), lr=0.05)
    with cp.parallelize(model, adam, F.mse_loss, strategy="data(2)") as step:
        step.load(tmp_path)
        for use in (adam.state_dict, lambda: adam.state[model.last.bias]):
            with pytest.raises(
                cp.DataError, match=r"between load\(\) of .*step-00000002 and the first step, which reads"
            ):
                use()
        step(*draw_batch())
        assert float(adam.state[model.last.bias]["step"]) == 3


def test_changed_optimizer_state_is_what_is_saved(tmp_path):
    model = build_seeded(Net)
    adam = optim.AdamW(model.parameters(), lr=0.05)
    with cp.parallelize(model, adam, F.mse_loss, strategy="zero3(2)") as step:
        step(*draw_batch())
        adam.state[model.last.bias]["exp_avg"].fill_(5)
        step.save(tmp_path)
    other = build_seeded(Net)
    adam = optim.AdamW(other.parameters(), lr=0.05)
    with cp.parallelize(other, adam, F.mse_loss, strategy="data(2)") as step:
        step(*draw_batch())
        step.load(tmp_path)
        assert float(adam.state[other.last.bias]["exp_avg"].mean()) == 5


def test_a_loop_continues_from_a_checkpoint_of_a_trainer(tmp_path):
    trained, _ = fit("data(2)", fit_options={"checkpoint_dir": tmp_path, "max_steps": 3})
    model = mlp()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with cp.parallelize(model, optim.AdamW, F.cross_entropy, strategy="pipeline(2)") as step:
            assert step.load(tmp_path) == 3
            assert max_difference(state_of(model), trained) == 0


lr_schedules = optim.lr_scheduler
SCHEDULES = {
    "lambda": lambda sgd: lr_schedules.LambdaLR(sgd, lambda number: 0.9**number),
    "multiplicative": lambda sgd: lr_schedules.MultiplicativeLR(sgd, lambda number: 0.9),
    "step": lambda sgd: lr_schedules.StepLR(sgd, 2, 0.5),
    "multi_step": lambda sgd: lr_schedules.MultiStepLR(sgd, [2, 5], 0.5),
    "constant": lambda sgd: lr_schedules.ConstantLR(sgd, 0.5, 5),
    "linear": lambda sgd: lr_schedules.LinearLR(sgd, 0.1, total_iters=6),
    "exponential": lambda sgd: lr_schedules.ExponentialLR(sgd, 0.9),
    "polynomial": lambda sgd: lr_schedules.PolynomialLR(sgd, 7, 2.0),
    "cosine": lambda sgd: lr_schedules.CosineAnnealingLR(sgd, 5),
    "warm_restarts": lambda sgd: lr_schedules.CosineAnnealingWarmRestarts(sgd, 3, 2),
    "cyclic": lambda sgd: lr_schedules.CyclicLR(sgd, 0.01, 0.1, step_size_up=3, mode="triangular2"),
    "one_cycle": lambda sgd: lr_schedules.OneCycleLR(sgd, 0.1, total_steps=9),
    "plateau": lambda sgd: lr_schedules.ReduceLROnPlateau(sgd, patience=0, threshold=0.5, factor=0.5),
    "swa": lambda sgd: optim.swa_utils.SWALR(sgd, 0.01, anneal_epochs=4),
    "chained": lambda sgd: lr_schedules.ChainedScheduler(
        [lr_schedules.ConstantLR(sgd, 0.5, 4), lr_schedules.ExponentialLR(sgd, 0.9)]
    ),
    "sequential": lambda sgd: lr_schedules.SequentialLR(
        sgd, [lr_schedules.LinearLR(sgd, 0.1, total_iters=3), lr_schedules.CosineAnnealingLR(sgd, 5)], [3]
    ),
}


def train_scheduled(make_schedule, train_step, optimizer, *, numbers):
    """Step a schedule after each step, by its loss if it asks for one; return the schedule."""
    schedule = make_schedule(optimizer)
    for number in numbers(schedule):
        random = torch.Generator().manual_seed(number)
        loss = train_step(torch.randn(8, 4, generator=random).double(), torch.randn(8, 3, generator=random).double())
        schedule.step(*[loss] if isinstance(schedule, lr_schedules.ReduceLROnPlateau) else [])
    return schedule


def train_plain_step(model, optimizer, inputs, targets):
    optimizer.zero_grad()
    loss = F.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    return loss.item()


def make_linear():
    model = build_seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))
    return model, optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.long(quick=["data(2)-plateau", "zero2(2)-sequential"])
@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("plan", ["data(2)", "zero2(2)"])
def test_every_schedule_of_torch_continues_exactly(plan, kind, tmp_path):
    expected, sgd = make_linear()
    plain_step = partial(train_plain_step, expected, sgd)
    train_scheduled(SCHEDULES[kind], plain_step, sgd, numbers=lambda _: range(8))
    model, sgd = make_linear()
    with cp.parallelize(model, sgd, F.mse_loss, strategy=plan) as step:
        schedule = train_scheduled(SCHEDULES[kind], step, sgd, numbers=lambda _: range(3))
        step.save(tmp_path, scheduler=schedule)
    model, sgd = make_linear()
    with cp.parallelize(model, sgd, F.mse_loss, strategy=plan) as step:
        rest = partial(step.load, tmp_path)
        train_scheduled(SCHEDULES[kind], step, sgd, numbers=lambda own: range(rest(scheduler=own), 8))
    assert max_difference(state_of(model), state_of(expected)) <= 1e-12


def test_numbers_that_json_does_not_have_come_back():
    values = {"best": math.inf, "worst": -math.inf, "last": (math.nan, 1.0)}
    saved = to_json(values)
    assert from_json(saved, values)["best"] == math.inf
    assert from_json(saved, values)["worst"] == -math.inf
    assert math.isnan(from_json(saved, values)["last"][0])
    assert not find_form_flaw(saved, to_json({"best": 0.5}), "schedule")
    assert find_form_flaw(to_json({"best": "low"}), saved, "schedule")
