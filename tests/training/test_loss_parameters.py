"""Losses with parameters of their own: they are trained, clipped, saved and resumed as the model's under every plan."""

from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import counterpoint as cp
from counterpoint.checkpoint.reader import Checkpoint
from counterpoint.errors import PlanError
from counterpoint.runtime.loss.loss_parameters import find_loss_module
from tests.training.trainers import max_difference, mlp, params_of

SAMPLES = 12
PLANS = [
    ("solo", 1), ("solo", 3), ("data(2)", None), ("data(2, update=sharded)", 2), ("zero2(2)", 2), ("zero3(2)", 2),
    ("tree(2)", None), ("tensor(2)", 2), ("pipeline(2)", 3), ("gpipe(2) * data(2)", 2), ("zero_bubble(2)", 3),
    ("server(2, consistency=bsp)", None),
]  # fmt: skip


class UncertaintyWeighting(nn.Module):
    """Two tasks, weighted by learned variances; one frozen parameter and a buffer besides."""

    def __init__(self):
        super().__init__()
        self.log_variance = nn.ParameterDict({"first": torch.zeros(()), "second": torch.zeros(())})
        self.frozen = nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.register_buffer("offset", torch.tensor(0.1))

    def forward(self, output, targets):
        first, second = self.log_variance["first"], self.log_variance["second"]
        regression = F.mse_loss(output[:, 0], targets[:, 0]) * torch.exp(-first) + first
        return regression + F.mse_loss(output[:, 1:], targets[:, 1:]) * self.frozen * torch.exp(-second) + second

    def method(self, output, targets, scale=1.0):
        return scale * self(output, targets)


def batches(count=3):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        inputs, targets = torch.randn(2, SAMPLES, 6, generator=generator, dtype=torch.float64)
        yield inputs, targets[:, :3]


def build():
    return mlp(), UncertaintyWeighting().double()


FORMS = {
    "module": lambda loss: loss,
    "method": lambda loss: loss.method,
    "partial": lambda loss: partial(loss.method, scale=1.0),
}


@cache
def train_plain(clip=None):
    model, loss = build()
    params = [*model.parameters(), *loss.log_variance.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    losses = []
    for inputs, targets in batches():
        optimizer.zero_grad()
        value = loss(model(inputs), targets)
        value.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(params, clip)
        optimizer.step()
        losses.append(value.item())
    return losses, params_of(model), params_of(loss)


def train(plan, num_microbatches, form="module", **options):
    model, loss = build()
    optimizer = torch.optim.SGD([*model.parameters(), *loss.log_variance.parameters()], lr=0.1, momentum=0.9)
    with cp.parallelize(
        model, optimizer, FORMS[form](loss), strategy=plan, num_microbatches=num_microbatches, **options
    ) as step:
        losses = [step(inputs, targets) for inputs, targets in batches()]
    return losses, params_of(model), params_of(loss)


def assert_same(actual, expected):
    assert actual[0] == pytest.approx(expected[0], rel=1e-12)
    assert max_difference(actual[1], expected[1]) < 1e-12
    assert max_difference(actual[2], expected[2]) < 1e-12


@pytest.mark.long(quick=["tree(2)-None", "tensor(2)-2", "zero_bubble(2)-3"])
@pytest.mark.parametrize(("plan", "num_microbatches"), PLANS, ids=str)
def test_the_parameters_of_a_loss_are_trained_under_every_plan(plan, num_microbatches):
    assert_same(train(plan, num_microbatches), train_plain())


@pytest.mark.long(quick=["pipeline(2)-partial", "solo-method", "solo-module", "data(2)-module", "solo-partial"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("plan", ["solo", "data(2)", "pipeline(2)"])
def test_the_module_of_a_loss_is_found(plan, form):
    assert_same(train(plan, 2, form), train_plain())


@pytest.mark.parametrize("plan", ["data(2)", "zero3(2)", "gpipe(2)", "gpipe(2) * data(2)"])
def test_the_norm_that_is_clipped_is_that_of_the_loss_and_the_model(plan):
    assert_same(train(plan, 2, clip_norm=0.05), train_plain(0.05))


@pytest.mark.long(quick=["plan0", "plan3", "plan1"])
@pytest.mark.parametrize(
    "plan", [("solo", 3), ("data(2)", 3), ("zero3(2)", 2), ("gpipe(2)", 3), ("gpipe(2) * data(2)", 2)]
)
def test_a_loss_of_the_whole_batch_may_have_parameters(plan):
    assert_same(train(*plan, loss_reduction="batch"), train_plain())


@pytest.mark.long(quick=["gpipe(2)"])
@pytest.mark.parametrize("plan", ["data(2)", "zero3(2)", "gpipe(2)"])
def test_a_checkpoint_has_the_parameters_of_the_loss_by_their_names(plan, tmp_path):
    data = torch.utils.data.TensorDataset(*(torch.cat(parts) for parts in zip(*batches(), strict=True)))
    results = []
    for max_steps, resume in ((4, None), (2, None), (4, tmp_path)):
        model, loss = build()
        make = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        with cp.Trainer(model, loss=loss, optimizer=make, strategy=plan, num_microbatches=2, progress="off") as trainer:
            trainer.fit(
                data, batch_size=SAMPLES, epochs=2, max_steps=max_steps, resume=resume,
                checkpoint_dir=None if max_steps == 4 else tmp_path, eval_dataset=data,
            )  # fmt: skip
        results.append({**params_of(model), **{f"loss.{name}": value for name, value in params_of(loss).items()}})
    assert max_difference(results[0], results[2]) < 1e-12
    saved = Checkpoint.open(tmp_path).read("model:loss.log_variance.first")
    assert max_difference({"": saved}, {"": results[1]["loss.log_variance.first"]}) < 1e-12
    assert abs(float(saved)) > 0.01


@pytest.mark.parametrize("plan", ["data(2)", "zero3(2)", "gpipe(2)"])
def test_an_evaluation_uses_the_trained_parameters_of_the_loss(plan):
    data = torch.utils.data.TensorDataset(*next(batches()))
    model, loss = build()
    make = partial(torch.optim.SGD, lr=0.1)
    with cp.Trainer(model, loss=loss, optimizer=make, strategy=plan, num_microbatches=2, progress="off") as trainer:
        history = trainer.fit(data, batch_size=SAMPLES, epochs=3, eval_dataset=data)
    with torch.no_grad():
        expected = loss(model(data.tensors[0]), data.tensors[1]).item()
    assert history.evaluations[-1].metrics["loss"] == pytest.approx(expected, rel=1e-12)


def test_parameters_of_the_loss_that_the_optimizer_does_not_hold_stay_as_in_plain_torch():
    model, loss = build()
    before = params_of(loss)
    with (
        pytest.warns(
            UserWarning, match="the optimizer does not hold log_variance.first, log_variance.second of the loss"
        ),
        cp.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, strategy="data(2)") as step,
    ):
        step(*next(batches()))
    assert max_difference(params_of(loss), before) == 0


def test_a_parameter_that_no_module_of_the_loss_has_is_refused_with_a_remedy():
    model, temperature = mlp(), nn.Parameter(torch.tensor(1.0).double())
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
    with pytest.raises(PlanError, match=r"give the\s+loss as an nn.Module that has them"):
        cp.parallelize(model, optimizer, lambda y, t: F.mse_loss(y * temperature, t), strategy="data(2)")


def test_a_model_with_a_part_of_the_same_name_is_refused():
    model, loss = build()
    model.add_module("loss", nn.Linear(3, 3).double())
    optimizer = torch.optim.SGD([*model.parameters(), *loss.log_variance.parameters()], lr=0.1)
    with pytest.raises(PlanError, match="has an attribute 'loss', too; rename it"):
        cp.parallelize(model, optimizer, loss, strategy="data(2)")


def test_a_method_of_the_model_itself_has_no_parameters_of_its_own():
    model, _ = build()
    model.register_parameter("extra", nn.Parameter(torch.zeros(())))
    assert find_loss_module(model.forward) is model
