"""Loss scaling: the same bits with and without a scale under every plan; the scale of torch and of DeepSpeed."""

import math
import random
import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import counterpoint as cp
from counterpoint.optim.low_bit_adam import AdamW8bit
from counterpoint.profiler.gradient_profile import profile_gradients
from counterpoint.runtime.loss.loss_scale import MAX_SCALE, LossScaler
from counterpoint.testing.device_survey import MODEL_PLANS, OTHER_NAMES, PLANS, batches, make_step
from counterpoint.testing.parity_models import plan_for
from tests.training.test_nonfinite_gradients import marked_data, planted, train as train_planted
from tests.training.trainers import dataset, equal_bits, make_trainer, mlp, state_of


def train(model, plan, num_steps=4, **options):
    """Return losses and norms, and the weights, of a few steps in float32."""
    step, trained = make_step(model, plan, "cpu", **options)
    with step:
        losses = [float(step(*batch)) for _, batch in zip(range(num_steps), batches(model), strict=False)]
    return losses, {name: value.clone() for name, value in trained.state_dict().items()}


def find_differences(actual, expected):
    """Return the numbers of steps, and the names of tensors, that differ in any bit."""
    pairs = zip(actual[0], expected[0], strict=True)
    steps = [number for number, (loss, other) in enumerate(pairs) if loss.hex() != other.hex()]
    return steps + [name for name, value in expected[1].items() if not torch.equal(actual[1][name], value)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.long(quick=["0.05-data(2, staleness=1)", "None-data(2, compress=twobit)"])
@pytest.mark.parametrize("plan", [*PLANS, *OTHER_NAMES])
@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_a_scale_that_is_a_power_of_two_changes_no_bit(plan, clip_norm):
    options = {} if clip_norm is None else {"clip_norm": clip_norm, "clip_value": 0.01}
    try:
        expected = train("mlp", plan, **options)
    except cp.PlanError:  # a pipeline without a flush
        options = {**options, "clip_by": "stage"}
        expected = train("mlp", plan, **options)
    assert find_differences(train("mlp", plan, loss_scale=2.0**16, **options), expected) == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.long(quick=["gpt-data(2)"])
@pytest.mark.parametrize("plan", MODEL_PLANS)
@pytest.mark.parametrize("model", ["gpt", "cnn", "sync_batch_norm", "embedding", "experts"])
def test_it_changes_no_bit_of_any_kind_of_model(model, plan):
    losses, values = train(model, plan, loss_scale="dynamic")
    expected_losses, expected = train(model, plan)
    if model == "embedding":  # the rows of its table are added up before they are scaled, in another order than without
        torch.testing.assert_close((losses, values), (expected_losses, expected), rtol=1e-14, atol=1e-15)
    else:
        assert find_differences((losses, values), (expected_losses, expected)) == []


def run_scaler(config, outcomes):
    """Return the scale of each step."""
    scaler, scales = LossScaler(config), []
    for is_finite in outcomes:
        scales.append(scaler.scale)
        scaler.update(is_finite=is_finite)
    return scales


def random_outcomes(seed, share, num_steps=10_000):
    draw = random.Random(seed)
    return [draw.random() >= share for _ in range(num_steps)]


@pytest.mark.long(quick=["0.03-20-10000"])
@pytest.mark.parametrize(
    ("share", "interval", "num_steps"),
    [(0.4, 1, 26_000), (0.03, 20, 10_000), (0.0005, 2000, 10_000), (0.0, 40, 10_000)],
)
def test_the_scale_is_that_of_torch_in_every_step(share, interval, num_steps):
    """The first case has more than 10,000 overflows; the last one comes to the largest scale."""
    scaler = torch.amp.GradScaler("cpu", growth_interval=interval)
    param, expected, outcomes = nn.Parameter(torch.zeros(1)), [], random_outcomes(7, share, num_steps)
    optimizer = optim.SGD([param], lr=0.0)
    scaler.scale(torch.ones(1))  # makes its state
    for is_finite in outcomes:
        expected.append(scaler.get_scale())
        param.grad = torch.ones(1) if is_finite else torch.full((1,), math.inf)
        scaler.step(optimizer)
        scaler.update()
    assert share != 0.4 or outcomes.count(False) > 10_000
    assert share != 0.0 or max(expected) == MAX_SCALE
    assert run_scaler(cp.DynamicLossScale(growth_interval=interval, min_scale=2.0**-126), outcomes) == expected


class DeepSpeedScaler:
    """The rule of ``DynamicLossScaler.update_scale`` in deepspeed/runtime/fp16/loss_scaler.py, in its order."""

    def __init__(self, scale, window, hysteresis, consecutive, smallest):
        self.scale, self.window, self.smallest = scale, window, smallest
        self.hysteresis = self.left = hysteresis
        self.consecutive = consecutive
        self.step, self.last_overflow = 0, -1

    def update(self, *, is_finite):
        if not is_finite:
            if self.hysteresis == 1 or self.left == 1:
                self.scale = max(self.scale / 2, self.smallest)
            else:
                self.left -= 1
            self.last_overflow = self.step
        else:
            if self.consecutive:
                self.left = self.hysteresis
            if (self.step - self.last_overflow) % self.window == 0:
                self.left = self.hysteresis
                self.scale *= 2
        self.step += 1


@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize(("hysteresis", "share", "window"), [(1, 0.1, 7), (2, 0.4, 4), (2, 0.5, 3), (4, 0.7, 2)])
def test_the_scale_is_that_of_deepspeed_with_hysteresis(hysteresis, share, window, consecutive):
    outcomes = random_outcomes(hysteresis, share)
    rule = cp.DynamicLossScale(
        growth_interval=window, hysteresis=hysteresis, consecutive_hysteresis=consecutive, init_scale=2.0**20
    )
    peer, expected = DeepSpeedScaler(2.0**20, window, hysteresis, consecutive, 1.0), []
    for is_finite in outcomes:
        expected.append(peer.scale)
        peer.update(is_finite=is_finite)
    assert run_scaler(rule, outcomes) == expected
    assert len(set(expected)) > 5


PLACES = [
    ("solo", 7), ("data(2)", 0), ("data(2)", 11), ("zero(2, level=2)", 5), ("zero(2, level=3)", 11), ("pipeline(2)", 4),
    ("pipeline(2, schedule=zero_bubble)", 9), ("pipeline(2)*data(2)", 10), ("server(2)", 3),
    ("data(2, compress=fp16)", 3), ("data(2, reduce=adasum)", 8),
]  # fmt: skip


@pytest.mark.long(quick=["data(2)-0", "zero(2, level=3)-11", "pipeline(2)-4", "server(2)-3"])
@pytest.mark.parametrize(("plan", "sample"), PLACES)
def test_an_overflow_anywhere_skips_the_step_everywhere_and_halves_every_scale(plan, sample):
    """The gradient of one microbatch, on one rank, stage or shard, is not finite."""
    data = marked_data(step=1, sample=sample)
    model, optimizer = planted(math.inf), optim.SGD
    with cp.parallelize(
        model, optimizer(model.parameters(), lr=0.1), F.cross_entropy, strategy=plan_for(plan, 4), loss_scale="dynamic"
    ) as step:
        losses = [step(*batch) for batch in data]
        scalers = [rank.interpreter.state.loss_scaler.state() for rank in step.local_ranks.ranks.values()]
    assert math.isfinite(sum(losses))
    assert set(scalers) == {(2.0**15, 1, 1)}
    expected = planted(math.inf)
    train_planted(expected, plan, [data[0], data[2]])
    assert equal_bits(state_of(model), state_of(expected))


@pytest.mark.parametrize("plan", ["server(2, consistency=asp)", "easgd(2)"])
def test_a_worker_that_updates_on_its_own_skips_its_own_step_alone(plan):
    data = marked_data(step=1, sample=0)
    model = planted(math.inf)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with cp.parallelize(model, optimizer, F.cross_entropy, strategy=plan, loss_scale="dynamic") as step:
        for batch in data:
            step(*batch)
        scales = sorted(rank.interpreter.state.loss_scaler.scale for rank in step.local_ranks.ranks.values())
    assert scales == [2.0**15, 2.0**16, 2.0**16]  # of two workers and the server


def test_nothing_of_a_skipped_step_moves():
    """Adam's step count, residuals of error feedback and the learning rate are those of the steps that were applied."""

    def fit(data):
        schedule = partial(optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
        trainer = make_trainer("data(2, compress=topk)", planted(math.inf), loss_scale="dynamic", lr_scheduler=schedule)
        samples = TensorDataset(*(torch.cat(parts) for parts in zip(*data, strict=True)))
        with trainer:
            history = trainer.fit(DataLoader(samples, batch_size=12), epochs=1)
            return history.steps, state_of(trainer.model)

    data = marked_data(step=1, sample=2, num_batches=4)
    steps, weights = fit(data)
    expected_steps, expected = fit([data[0], *data[2:]])
    assert [step.loss_scale for step in steps] == [2.0**16, 2.0**16, 2.0**15, 2.0**15]
    assert steps[1].skip_reason
    del steps[1]
    assert [step.options["lr"] for step in steps] == [step.options["lr"] for step in expected_steps]
    assert equal_bits(weights, expected)


def test_a_run_that_continues_with_a_shorter_interval_lets_the_scale_grow():
    """It waited for a number of good steps that had passed already, and never grew."""
    scaler = LossScaler(cp.DynamicLossScale(growth_interval=5, init_scale=8.0))
    scaler.restore((8.0, 7, 1))
    scales = []
    for _ in range(7):
        scaler.update(is_finite=True)
        scales.append(scaler.scale)
    assert scales == [16.0] * 5 + [32.0] * 2


def scaled_loss(scaler):
    return lambda output, targets: scaler.scale(F.cross_entropy(output, targets))


class ScaledModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scaler = nn.Linear(4, 2), torch.amp.GradScaler("cpu")

    def forward(self, x):
        return self.scaler.scale(self.layer(x))


@pytest.mark.parametrize("plan", ["solo", "data(2)"])
def test_a_grad_scaler_in_a_model_or_a_loss_is_refused(plan):
    """Gradients were those of the scaled loss, and nothing divided them."""
    model = nn.Linear(4, 2)
    for trained, loss in ((model, scaled_loss(torch.amp.GradScaler("cpu"))), (ScaledModel(), F.cross_entropy)):
        with pytest.raises(cp.PlanError, match="the model or the loss has a GradScaler in an attribute"):
            cp.parallelize(trained, partial(optim.SGD, lr=0.1), loss, strategy=plan)
    disabled = scaled_loss(torch.amp.GradScaler("cpu", enabled=False))
    with cp.parallelize(model, partial(optim.SGD, lr=0.1), disabled, strategy=plan) as step:
        assert step(torch.zeros(4, 4), torch.tensor([0, 1, 0, 1])) > 0


def test_the_loss_of_a_step_on_the_host_is_a_float():
    step, _ = make_step("mlp", "data(2)", "cpu")
    with step:
        assert type(step(*next(batches("mlp")))) is float  # torch.testing and YAML take no subclass


def test_the_smallest_scale_is_an_error_that_names_the_step():
    data = marked_data(step=0, sample=2)[0]
    model = planted(math.inf)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    rule = cp.DynamicLossScale(init_scale=8.0, min_scale=2.0)
    with cp.parallelize(model, optimizer, F.cross_entropy, strategy="data(2)", loss_scale=rule) as step:
        step(*data)
        step(*data)
        with pytest.raises(
            cp.DataError, match=r"^step 2 cannot be applied: .*, at the smallest loss scale, 2; the parameters"
        ):
            step(*data)


class TinyGradients(nn.Module):
    """Its gradients are below what fp16 can hold; the loss is large enough to be learned from."""

    def forward(self, output, targets):
        return F.mse_loss(output.float(), targets) * 2.0**-30


def fp16_loss_after(loss_scale):
    torch.manual_seed(0)
    inputs = torch.randn(32, 6)
    targets = inputs @ torch.randn(6, 1)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = optim.SGD(model.parameters(), lr=0.1 * 2**30)
    step = cp.parallelize(model, optimizer, TinyGradients(), strategy="data(2)", loss_scale=loss_scale)
    with step, torch.autocast("cpu", torch.float16):
        losses = [float(step(inputs, targets)) for _ in range(60)]
    return losses[-1] / losses[0]


def test_a_model_whose_gradients_underflow_in_fp16_trains_with_scaling_and_fails_without():
    assert fp16_loss_after(None) > 0.9
    assert fp16_loss_after("dynamic") < 0.1


class Channels(nn.Module):
    """A weight for each of 100 channels."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(100))

    def forward(self, x):
        return x * self.weights


IMPORTANCE = torch.cat([torch.full((31,), 2.0**-24), torch.full((69,), 2.0**-6)])
"""Of each channel in the loss: fp16 has no gradients of 31 of them."""


def channel_loss(output, targets):
    return ((output - targets).square() * IMPORTANCE).sum(1).mean()


@pytest.mark.parametrize("strategy", ["solo", "data(2)", "zero3(2)"])
def test_a_model_of_whose_gradients_fp16_loses_31_percent_trains_with_scaling_and_fails_without(strategy):
    inputs = torch.rand(32, 100, generator=torch.Generator().manual_seed(0)) + 0.5
    lost = profile_gradients(Channels(), inputs, inputs, loss=channel_loss, num_samples=32).total("activations")
    assert lost.share(lost.num_lost()) == pytest.approx(0.31)
    errors = {}
    for scale in (1.0, "dynamic"):
        model = Channels()
        optimizer = optim.Adam(model.parameters(), lr=0.1)
        own_scale: Any = {"loss_scale": scale}
        with cp.parallelize(model, optimizer, channel_loss, strategy=strategy, precision="fp16", **own_scale) as step:
            for _ in range(60):
                step(inputs, inputs)
        errors[scale] = (model.weights.detach() - 1).abs()
    assert errors[1.0][:31].min() == 1.0  # nothing was learned
    assert max(errors[1.0][31:].max(), errors["dynamic"].max()) < 0.1


@pytest.mark.parametrize(
    "strategy", ["solo", "data(2)", "zero(2, level=2)", "pipeline(2, schedule=gpipe)", "server(2)"]
)
def test_a_scale_changes_no_bit_of_accumulated_batches(strategy):
    weights = []
    for scale in (None, 2.0**16):
        trained = mlp().float()
        options: Any = {"strategy": strategy, "loss_scale": scale, "clip_norm": 0.05}
        with cp.parallelize(trained, partial(optim.SGD, lr=0.1, momentum=0.9), F.cross_entropy, **options) as step:
            for _ in range(3):
                for start, stop in ((0, 8), (8, 20), (20, 24)):
                    inputs, targets = dataset(24)[start:stop]
                    step.accumulate(inputs.float(), targets)
                step.update()
        weights.append(state_of(trained))
    assert equal_bits(*weights)


@pytest.mark.long(quick=["data(2)-zero3(3)", "server(2, consistency=asp)-data(2)"])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("data(2)", "zero3(3)"),
        ("pipeline(2)", "solo"),
        ("server(2, consistency=asp)", "data(2)"),  # whose server has no scale of its own
        ("easgd(2)", "solo"),
        ("solo", "server(2, consistency=asp)"),
    ],
)
def test_a_run_continues_with_the_scale_of_its_checkpoint_on_another_number_of_ranks(first, second, tmp_path):
    rule = cp.DynamicLossScale(init_scale=1024.0, growth_interval=3)

    def fit(strategy, steps, resume=None):
        trainer = make_trainer(strategy, loss_scale=rule)
        with trainer:
            return trainer.fit(
                dataset(24), batch_size=4, max_steps=steps, epochs=2, checkpoint_dir=tmp_path, resume=resume
            )

    assert [step.loss_scale for step in fit(first, 5).steps] == [1024.0] * 3 + [2048.0] * 2
    assert [step.loss_scale for step in fit(second, 9, tmp_path).steps] == [2048.0, 4096.0, 4096.0, 4096.0]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (
            0,
            "loss_scale=0 is not a positive number that float32 can hold in full precision (2^-126 to 2^127); give a "
            "power of two, as 65536",
        ),
        (math.nan, "loss_scale=nan is not a positive number"),
        (math.inf, "loss_scale=inf is not a positive number"),
        (1e-50, "loss_scale=1e-50 is not a positive number that float32 can hold in full precision (2^-126 to 2^127)"),
        (1e-40, "loss_scale=1e-40 is not a positive number that float32 can hold in full precision (2^-126 to 2^127)"),
        (torch.amp.GradScaler("cpu"), "loss_scale is a GradScaler, which scales in calls of backward and of the"),
        (-2.0, "loss_scale=-2.0 is not a positive number"),
        (True, "loss_scale=True is not a positive number"),
        ("auto", "loss_scale='auto' is unknown; give a number, or 'dynamic'"),
    ],
)
def test_a_scale_that_is_none_is_refused(value, text):
    with pytest.raises(cp.PlanError, match=re.escape(text)):
        make_trainer("solo", loss_scale=value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"init_scale": 0.0}, "init_scale=0.0 is not a positive number"),
        ({"growth_interval": 0}, "growth_interval=0 is not a number of steps; give a whole number from 1 on"),
        ({"hysteresis": 1.5}, "hysteresis=1.5 is not a number of steps"),
        ({"growth_factor": 0.5}, "growth_factor=0.5 would let the scale shrink"),
        ({"backoff_factor": 1.0}, "backoff_factor=1.0 would not let the scale shrink"),
        ({"min_scale": 2.0**17}, "min_scale=131072.0 is more than init_scale=65536.0"),
        ({"consecutive_hysteresis": 1}, "consecutive_hysteresis=1 is not True or False"),
    ],
)
def test_a_rule_that_cannot_be_is_refused(options, text):
    with pytest.raises(cp.PlanError, match=re.escape(text)):
        cp.DynamicLossScale(**options)


def test_an_eps_of_zero_is_refused_for_weights_in_fp16_and_low_bit_states_need_none():
    model = nn.Linear(4, 2).half()
    with pytest.raises(
        cp.PlanError, match=r"^eps=0 of AdamW is 0 in float16, .* pass precision='fp16', or give eps=6e"
    ):
        cp.parallelize(model, partial(optim.AdamW, eps=0.0), F.cross_entropy, strategy="solo")
    with cp.parallelize(model, partial(AdamW8bit, lr=1e-3), F.cross_entropy, strategy="data(2)") as step:
        step(torch.zeros(4, 4).half(), torch.tensor([0, 1, 0, 1]))  # which is updated in float32
    assert all(value.isfinite().all() for value in model.parameters())


@pytest.mark.parametrize("make", [optim.Adam, optim.AdamW, optim.RMSprop, optim.Adagrad])
def test_an_eps_that_is_zero_in_fp16_is_refused_and_its_remedy_trains(make):
    """All weights were nan after the first step."""
    model = nn.Linear(4, 2).half()
    with pytest.raises(cp.PlanError, match=r"^eps=1e-\d+ of \w+ is 0 in float16, .*, or give eps=6e-05 or more$"):
        cp.parallelize(model, make(model.parameters()), F.cross_entropy, strategy="solo")
    optimizer = make(model.parameters(), eps=6e-5)
    with cp.parallelize(model, optimizer, F.cross_entropy, strategy="data(2)") as step:
        step(torch.zeros(4, 4).half(), torch.tensor([0, 1, 0, 1]))
    assert all(value.isfinite().all() for value in model.parameters())


def test_a_pipeline_without_a_flush_refuses_a_dynamic_scale_and_names_what_can():
    trainer = make_trainer("pipeline(2, schedule=pipedream)", loss_scale="dynamic")
    with trainer, pytest.raises(cp.PlanError, match=r"give a number, as loss_scale=1024, or use schedule=one_f_one_b"):
        trainer.fit(dataset(24), batch_size=4)


@pytest.mark.parametrize("options", [{"loss_scale": "dynamic"}, {"precision": "fp16"}])
def test_a_dynamic_scale_needs_checked_gradients(options):
    """Without them nothing would see an overflow."""
    trainer = make_trainer("data(2)", check_finite="loss", **options)
    with trainer, pytest.raises(cp.PlanError, match="drop check_finite, or give a number as loss_scale"):
        trainer.fit(dataset(24), batch_size=4)
