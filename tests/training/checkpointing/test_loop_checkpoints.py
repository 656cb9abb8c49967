"""A custom loop that saves continues as if nothing had happened, under any plan; nothing else is loaded."""

import random
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp
from counterpoint.checkpoint import step_folders
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
