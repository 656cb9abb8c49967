"""Weights on disk change no bit of the weights and losses, whatever the plan, the model and the optimizer."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.utils.data import TensorDataset

import counterpoint as cp
from counterpoint.testing.parity_models import ADAMW, make_parity_model, plan_for
from tests.covering import each_value_once
from tests.training.trainers import build_seeded, dataset, equal_bits, fit, make_trainer, max_difference, mlp, params_of

PASS = "offload:params=disk"
ZERO3 = "zero(2, level=3)"
PLANS = [ZERO3, "zero(3, level=3)", "zero(2, level=3) * data(2)", "data(2) * zero(2, level=3)",
         "pipeline(2) * zero(2, level=3)", "tensor(2) * zero(2, level=3)",
         "zero(2, level=3, reshard_after_forward=off)", "zero(2, level=3, persistence_threshold=20)"]  # fmt: skip
OPTIMIZERS = {
    "momentum": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": partial(optim.Adam, lr=1e-2, amsgrad=True),
    "rmsprop": partial(optim.RMSprop, lr=1e-3, momentum=0.5, centered=True),
}
PRECISIONS = ["bf16", "bf16(reduce=bf16)", "fp16"]


def train(name, plan, optimizer=ADAMW, **options):
    """Return losses and parameters of a few steps."""
    parity = make_parity_model(name)
    model, losses = parity.build(), []
    settings = {"batch_norm": "microbatch", "seed": 3, **options}
    with cp.parallelize(model, optimizer(model.parameters()), parity.loss, strategy=plan, **settings) as step:
        losses += [float(step(inputs, targets)) for inputs, targets in parity.batches]
    return losses, params_of(model)


def train_both(name, strategy, folder, passes=("overlap", "prefetch"), **options):
    """Return what becomes of a plan with its weights in memory, and on disk."""
    plan = plan_for(strategy, 12)
    plain = train(name, replace(plan, passes=passes), **options)
    return plain, train(name, replace(plan, passes=(*passes, PASS)), offload_folder=folder, **options)


def moved(strategy):
    """Return a plan with its weights on disk."""
    return replace(plan_for(strategy, 4), passes=("overlap", PASS))


PASSES = {"blocking": (), "prefetch": ("overlap", "prefetch"), "recompute": ("recompute", "prefetch")}


@pytest.mark.long(quick=["cnn-zero(3, level=3)-prefetch", "gpt-zero(2, level=3) * data(2)-recompute"])
@pytest.mark.parametrize(("name", "strategy", "passes"), each_value_once(["mlp", "cnn", "gpt"], PLANS, [*PASSES]))
def test_every_plan_ends_with_the_same_bits(name, strategy, passes, tmp_path):
    (losses, params), (found_losses, found) = train_both(name, strategy, tmp_path, PASSES[passes])
    assert found_losses == losses
    assert equal_bits(found, params)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_ends_with_the_same_bits(optimizer, tmp_path):
    plain, found = train_both("mlp", ZERO3, tmp_path, optimizer=OPTIMIZERS[optimizer])
    assert found[0] == plain[0]
    assert equal_bits(found[1], plain[1])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_weights_that_are_gathered_as_casts_end_with_the_same_bits(precision, tmp_path):
    inputs, targets = dataset(24).tensors
    data = TensorDataset(inputs.float(), targets)
    plan = plan_for(ZERO3, 4)
    plain = fit(plan, mlp().float(), data, precision=precision)
    found = fit(moved(ZERO3), mlp().float(), data, precision=precision, offload_folder=tmp_path)
    assert found[1].losses == plain[1].losses
    assert equal_bits(found[0], plain[0])


def test_weights_that_are_rounded_stochastically_end_with_the_same_bits(tmp_path):
    inputs, targets = dataset(24).tensors
    data = TensorDataset(inputs.bfloat16(), targets)
    options = {"precision": "bf16(rounding=stochastic)"}
    plain = fit(plan_for(ZERO3, 4), mlp().bfloat16(), data, **options)
    found = fit(moved(ZERO3), mlp().bfloat16(), data, offload_folder=tmp_path, **options)
    assert equal_bits(found[0], plain[0])


def batch(scale=1.0):
    return torch.ones(4, 6, dtype=torch.float64) * scale, torch.ones(4, 3, dtype=torch.float64)


def steps_of(passes, folder, scales=(1.0, 1.0), **options):
    """Return losses and weights of steps on batches of these scales."""
    model = mlp()
    options |= {"strategy": ZERO3, "passes": passes, "offload_folder": folder}
    with cp.parallelize(model, ADAMW(model.parameters()), nn.MSELoss(), **options) as step:
        losses = [float(step(*batch(scale))) for scale in scales]
    return losses, params_of(model)


@pytest.mark.parametrize(
    "options",
    [{"clip_norm": 0.01}, {"clip_value": 1e-3}, {"nonfinite": "skip", "scales": (1.0, torch.inf, 1.0)}],
    ids=lambda options: " ".join(options),
)
def test_gradients_that_are_clipped_and_steps_that_are_skipped_end_with_the_same_bits(options, tmp_path):
    plain, found = (steps_of(passes, tmp_path, **options) for passes in (("overlap",), ("overlap", PASS)))
    assert str(found[0]) == str(plain[0])
    assert equal_bits(found[1], plain[1])


def test_a_step_that_fails_leaves_the_weights_where_they_are(tmp_path):
    model, other = mlp(), mlp()
    options = {"strategy": ZERO3, "passes": ("overlap", PASS), "offload_folder": tmp_path}
    with cp.parallelize(model, ADAMW(model.parameters()), nn.MSELoss(), **options) as step:
        step(*batch())
        with pytest.raises(cp.DataError, match="is nan"):
            step(*batch(torch.inf))
        step(*batch())
    with cp.parallelize(other, ADAMW(other.parameters()), nn.MSELoss(), strategy=ZERO3) as step:
        step(*batch())
        step(*batch())
    assert equal_bits(params_of(model), params_of(other))


def test_an_option_that_is_no_number_is_an_error_before_any_unit_is_updated(tmp_path):
    model = mlp()
    first, *others = model.parameters()
    optimizer = optim.AdamW([{"params": [first]}, {"params": others}], lr=0.1)
    options = {"strategy": ZERO3, "passes": ("overlap", PASS), "offload_folder": tmp_path}
    with cp.parallelize(model, optimizer, nn.MSELoss(), **options) as step:
        step(*batch())
        before = params_of(model)
        optimizer.param_groups[1]["lr"] = torch.nan
        with pytest.raises(cp.PlanError, match="option lr is nan"):
            step(*batch())
        assert equal_bits(params_of(model), before)


def test_weights_that_are_changed_between_steps_are_those_of_the_next_step(tmp_path):
    def run(**options):
        model, found = mlp(), []
        with cp.parallelize(model, ADAMW(model.parameters()), nn.MSELoss(), strategy=ZERO3, **options) as step:
            step(*batch())
            with step.full_weights(writeback=True) as whole, torch.no_grad():
                found.append(params_of(whole))
                next(whole.parameters()).mul_(2)
            step(*batch())
        return found[0] | {f"end.{name}": value for name, value in params_of(model).items()}

    assert equal_bits(run(passes=("overlap", PASS), offload_folder=tmp_path), run())


def test_accumulated_batches_end_with_the_same_bits(tmp_path):
    def run(**options):
        model = mlp()
        with cp.parallelize(model, ADAMW(model.parameters()), nn.MSELoss(), strategy=ZERO3, **options) as step:
            for _ in range(2):
                step.accumulate(*batch())
                step.accumulate(*batch(2.0))
                step.update()
        return params_of(model)

    assert equal_bits(run(passes=("overlap", PASS), offload_folder=tmp_path), run())


@pytest.mark.parametrize("passes", [(), ("prefetch",)], ids=str)
def test_an_evaluation_between_steps_reads_the_weights(passes, tmp_path):
    def run(passes, **options):
        plan = replace(plan_for(ZERO3, 4), passes=passes)
        with make_trainer(plan, **options) as one:
            history = one.fit(dataset(), batch_size=12, epochs=2, eval_dataset=dataset(24))
        return [evaluation.metrics for evaluation in history.evaluations], history.losses

    assert run((*passes, PASS), offload_folder=tmp_path) == run(passes)


def saved_under(plan, root, **options):
    """Train two epochs with a checkpoint after each; return the parameters."""
    fit_options = {"checkpoint_dir": root, "save_every": 4, "resume": "auto"}
    return fit(plan, epochs=2, fit_options=fit_options, **options)[0]


@pytest.mark.parametrize("other", ["pipeline(2) * zero(2, level=1)", "solo", "zero(3, level=3)"])
@pytest.mark.parametrize("direction", ["out", "in"])
def test_a_run_goes_on_under_another_plan_from_memory_to_disk_and_back(other, direction, tmp_path):
    disk = {"offload_folder": tmp_path / "disk"}
    cases = [(plan_for(other, 12), {}), (replace(plan_for(ZERO3, 12), passes=(PASS, "offload:state=disk")), disk)]
    (first, options), (second, next_options) = cases if direction == "in" else cases[::-1]
    expected = saved_under(plan_for("solo", 12), tmp_path / "expected")
    fit(first, fit_options={"checkpoint_dir": tmp_path / "run", "save_every": 4}, **options)
    found = saved_under(second, tmp_path / "run", **next_options)
    assert max_difference(found, expected) <= 1e-12


def test_the_optimizer_tells_its_whole_state_before_and_after_steps(tmp_path):
    def run(**options):
        model = mlp()
        optimizer = ADAMW(model.parameters())
        with cp.parallelize(model, optimizer, nn.MSELoss(), strategy=ZERO3, **options) as step:
            step(*batch())
            state = optimizer.state_dict()
            step(*batch())
            optimizer.load_state_dict(state)
            step(*batch())
        return {str(key): value["exp_avg"] for key, value in optimizer.state_dict()["state"].items()}

    assert equal_bits(run(passes=("overlap", PASS), offload_folder=tmp_path), run())


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))[:, :3]


@pytest.mark.parametrize("strategy", PLANS[:5])
def test_a_weight_that_is_used_twice_ends_with_the_same_bits(strategy, tmp_path):
    plain = fit(plan_for(strategy, 12), build_seeded(Tied))
    found = fit(replace(plan_for(strategy, 12), passes=(PASS,)), build_seeded(Tied), offload_folder=tmp_path)
    assert found[1].losses == plain[1].losses
    assert equal_bits(found[0], plain[0])
