"""Optimizer state on disk changes no bit of the weights and losses, whatever the plan, the model and the optimizer."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn, optim

import counterpoint as cp
from counterpoint.optim.low_bit_adam import AdamW8bit
from counterpoint.testing.parity_models import ADAMW, make_parity_model, plan_for
from counterpoint.training.ranks import run_compiler
from tests.covering import each_value_once
from tests.training.trainers import build_seeded, dataset, equal_bits, fit, max_difference, mlp, params_of

PASSES = ("overlap", "offload:state=disk")
REDUCING = ["data(2)", "zero(2, level=1)", "zero(2, level=2)", "zero(2, level=3)", "pipeline(2) * zero(2, level=1)",
            "server(2)", "tree(2)", "data(2, sync_every=2)", "data(2, staleness=1)"]  # fmt: skip
"""Plans whose ranks sum gradients, for which these are flat anyway."""
OPTIMIZERS = {
    "sgd": partial(optim.SGD, lr=0.1),
    "momentum": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": partial(optim.Adam, lr=1e-2, amsgrad=True),
    "adagrad": partial(optim.Adagrad, lr=1e-2),
    "rmsprop": partial(optim.RMSprop, lr=1e-3, momentum=0.5, centered=True),
    "nadam": partial(optim.NAdam, lr=1e-3),
    "asgd": partial(optim.ASGD, lr=1e-2),
    "rprop": partial(optim.Rprop, lr=1e-3),
}
MASTERS = "bf16(reduce=bf16, weights=compute)"


@pytest.fixture(name="small_chunks", autouse=True)
def use_small_chunks(monkeypatch):
    """Cut weights of these small models into many chunks."""
    monkeypatch.setattr(run_compiler, "OFFLOAD_CHUNK_BYTES", 256)


class LoRA(nn.Module):
    """A frozen layer, and the product of two narrow ones that are trained."""

    def __init__(self):
        super().__init__()
        self.frozen, self.down, self.up = nn.Linear(6, 3), nn.Linear(6, 2, bias=False), nn.Linear(2, 3, bias=False)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.frozen(x) + self.up(self.down(x))


def train(name, plan, optimizer=ADAMW, **options):
    """Return losses and parameters of a few steps."""
    parity = make_parity_model(name)
    model, losses = parity.build(), []
    settings = {"batch_norm": "microbatch", "seed": 3, **options}
    with cp.parallelize(model, optimizer(model.parameters()), parity.loss, strategy=plan, **settings) as step:
        losses += [float(step(inputs, targets)) for inputs, targets in parity.batches]
    return losses, params_of(model)


def train_both(name, strategy, folder, optimizer=ADAMW, **options):
    """Return what becomes of a plan with its state in memory, and on disk."""
    plan = plan_for(strategy, 4)
    moved = replace(plan, passes=PASSES)
    plain = train(name, replace(plan, passes=("overlap",)), optimizer, **options)
    return plain, train(name, moved, optimizer, offload_folder=folder, **options)


@pytest.mark.long(quick=["gpt-zero(2, level=2)", "cnn-data(2)", "mlp-zero(2, level=3)"])
@pytest.mark.parametrize(("name", "strategy"), each_value_once(["mlp", "cnn", "gpt"], REDUCING))
def test_plans_that_sum_gradients_end_with_the_same_bits(name, strategy, tmp_path):
    (losses, params), (found_losses, found) = train_both(name, strategy, tmp_path)
    assert found_losses == losses
    assert equal_bits(found, params)


@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt"])
@pytest.mark.parametrize("strategy", ["solo", "pipeline(2)", "tensor(2)"])
def test_plans_that_sum_none_differ_by_the_order_of_sums_at_most(name, strategy, tmp_path):
    """Gradients of weights that are used twice are added up in flat memory, and not by autograd."""
    (losses, params), (found_losses, found) = train_both(name, strategy, tmp_path)
    assert found_losses == pytest.approx(losses, rel=1e-12)
    assert max_difference(found, params) <= 1e-12


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_elementwise_optimizer_ends_with_the_same_bits(optimizer, tmp_path):
    (losses, params), (found_losses, found) = train_both("mlp", "zero(2, level=1)", tmp_path, OPTIMIZERS[optimizer])
    assert found_losses == losses
    assert equal_bits(found, params)


@pytest.mark.parametrize("strategy", ["solo", "zero(2, level=3)"])
def test_frozen_weights_stay_and_adapters_end_with_the_same_bits(strategy, tmp_path):
    plain, moved = (
        fit(replace(plan_for(strategy, 4), passes=passes), build_seeded(LoRA), **options)
        for passes, options in (((), {}), (PASSES[1:], {"offload_folder": tmp_path}))
    )
    assert equal_bits(moved[0], plain[0])
    assert moved[1].losses == plain[1].losses


@pytest.mark.parametrize("strategy", ["solo", "data(2)", "zero(2, level=2)"])
def test_master_weights_on_disk_end_with_the_same_bits(strategy, tmp_path):
    inputs, targets = dataset(24).tensors
    data = torch.utils.data.TensorDataset(inputs.float(), targets)
    plain, moved = (
        fit(replace(plan_for(strategy, 4), passes=passes), mlp().float(), data, precision=MASTERS, **options)
        for passes, options in (((), {}), (PASSES[1:], {"offload_folder": tmp_path}))
    )
    assert equal_bits(moved[0], plain[0])
    assert moved[1].losses == plain[1].losses


def test_a_step_that_is_skipped_leaves_the_state_where_it_is(tmp_path):
    def run(**options):
        model = mlp()
        with cp.parallelize(model, ADAMW(model.parameters()), nn.MSELoss(), nonfinite="skip", **options) as step:
            for scale in (1.0, torch.inf, 1.0):
                step(torch.ones(4, 6, dtype=torch.float64) * scale, torch.ones(4, 3, dtype=torch.float64))
        return params_of(model)

    assert equal_bits(run(strategy="data(2)", passes=PASSES, offload_folder=tmp_path), run(strategy="data(2)"))


def saved_under(strategy, passes, root, **options):
    """Train two epochs with a checkpoint after each; return the parameters."""
    plan = replace(plan_for(strategy, 4), passes=passes)
    return fit(plan, epochs=2, fit_options={"checkpoint_dir": root, "save_every": 4, "resume": "auto"}, **options)[0]


@pytest.mark.parametrize(
    ("first", "second"),
    [("zero(2, level=3)", "pipeline(2) * zero(2, level=1)"), ("pipeline(2)", "data(2)"), ("data(2)", "solo")],
)
@pytest.mark.parametrize("direction", ["out", "in"])
def test_a_run_goes_on_under_another_plan_from_memory_to_disk_and_back(first, second, direction, tmp_path):
    disk = {"offload_folder": tmp_path / "disk"}
    kinds = [((), {}), (PASSES[1:], disk)]
    (passes, options), (next_passes, next_options) = kinds if direction == "in" else kinds[::-1]
    expected = saved_under("solo", (), tmp_path / "expected")
    fit(
        replace(plan_for(first, 4), passes=passes),
        fit_options={"checkpoint_dir": tmp_path / "run", "save_every": 4},
        **options,
    )
    found = saved_under(second, next_passes, tmp_path / "run", **next_options)
    assert max_difference(found, expected) <= 1e-12


@pytest.mark.parametrize("strategy", ["solo", "zero(2, level=2)"])
@pytest.mark.parametrize("when", ["between steps", "after"])
def test_the_optimizer_tells_its_whole_state(strategy, when, tmp_path):
    def states(**options):
        model = mlp()
        optimizer = ADAMW(model.parameters())
        with cp.parallelize(model, optimizer, nn.MSELoss(), strategy=strategy, **options) as step:
            for _ in range(3):
                step(torch.ones(4, 6, dtype=torch.float64), torch.ones(4, 3, dtype=torch.float64))
            inside = optimizer.state_dict()["state"]
        return inside if when == "between steps" else optimizer.state_dict()["state"]

    plain, moved = states(), states(passes=PASSES, offload_folder=tmp_path)
    assert [{*state} for state in moved.values()] == [{"step", "exp_avg", "exp_avg_sq"}] * 6
    for number, state in plain.items():
        assert max_difference(moved[number], state) <= 1e-12


def test_state_that_is_loaded_between_steps_is_used(tmp_path):
    def run(**options):
        model = mlp()
        optimizer = ADAMW(model.parameters())
        with cp.parallelize(model, optimizer, nn.MSELoss(), strategy="zero(2, level=1)", **options) as step:
            inputs, targets = torch.ones(4, 6, dtype=torch.float64), torch.ones(4, 3, dtype=torch.float64)
            step(inputs, targets)
            saved = optimizer.state_dict()
            step(inputs, targets)
            optimizer.load_state_dict(saved)
            step(inputs, targets)
        return params_of(model)

    assert equal_bits(run(passes=PASSES, offload_folder=tmp_path), run())


@pytest.mark.parametrize("text", ["pipedream(2)", "pipedream_2bw(2)"])
def test_pipelines_that_never_flush_end_with_the_same_bits(text, tmp_path):
    plan = cp.Plan.parse(text, num_microbatches=1 if text == "pipedream(2)" else 4)
    plain, moved = (
        fit(replace(plan, passes=passes), data=dataset(24), **options)
        for passes, options in (((), {}), (PASSES[1:], {"offload_folder": tmp_path}))
    )
    assert equal_bits(moved[0], plain[0])


def test_an_option_that_is_no_number_is_an_error_before_any_chunk_is_changed(tmp_path):
    model = mlp()
    first, *others = model.parameters()
    optimizer = optim.AdamW([{"params": [first]}, {"params": others}], lr=0.1)
    inputs, targets = torch.ones(4, 6, dtype=torch.float64), torch.ones(4, 3, dtype=torch.float64)
    options = {"strategy": "data(2)", "passes": PASSES, "offload_folder": tmp_path}
    with cp.parallelize(model, optimizer, nn.MSELoss(), **options) as step:
        step(inputs, targets)
        before = params_of(model)
        optimizer.param_groups[1]["lr"] = torch.nan
        with pytest.raises(cp.PlanError, match="option lr is nan"):
            step(inputs, targets)
        assert equal_bits(params_of(model), before)
        optimizer.param_groups[1]["lr"] = 0.1
        assert torch.isfinite(torch.tensor(float(step(inputs, targets))))


@pytest.mark.parametrize(
    ("optimizer", "options", "message"),
    [
        (partial(optim.Adafactor, lr=0.1), {}, "Adafactor is not known to update each element on its own; use SGD"),
        (partial(AdamW8bit, lr=0.1), {}, "AdamW8bit is not known to update each element on its own"),
        (ADAMW, {"offload_folder": None}, r"offload:state=disk needs a folder for the state; give offload_folder"),
        (ADAMW, {"offload_folder": 3}, r"^offload_folder=3 is a int; give the path of a folder, or None"),
    ],
)
def test_what_cannot_be_offloaded_is_refused_with_a_remedy(optimizer, options, message, tmp_path):
    with pytest.raises(cp.PlanError, match=message):
        fit(replace(plan_for("solo", 4), passes=PASSES), optimizer=optimizer, **{"offload_folder": tmp_path, **options})
