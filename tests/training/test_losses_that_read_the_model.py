"""Losses that read the model: exact where the plan trains the model itself, else refused in the first step."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import counterpoint as cp
from counterpoint.errors import DataError, PlanError
from tests.training.trainers import max_difference, params_of


class Net(nn.Module):
    """Keeps a value that its loss may read."""

    def __init__(self, *, keeps=False):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.extra = 0.0
        self.seen = []
        self.keeps = keeps

    def forward(self, x):
        output = self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))
        if self.keeps == "attribute":
            self.extra = output.pow(2).mean()
        if self.keeps == "list":
            self.seen.append(output.pow(2).mean())
        return output


def build(**options):
    torch.manual_seed(0)
    return Net(**options).double()


def batches():
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        yield torch.randn(8, 4, generator=generator).double(), torch.randint(3, (8,), generator=generator)


def penalized(model):
    return lambda output, targets: (
        F.cross_entropy(output, targets) + 0.1 * sum(param.pow(2).sum() for param in model.parameters())
    )


def train(model, loss, plan, num_microbatches=None):
    with cp.parallelize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss, strategy=plan, num_microbatches=num_microbatches
    ) as step:
        return [step(*batch) for batch in batches()]


@pytest.mark.long(quick=["data(2)", "gpipe(2)", "tensor(2)", "server(2)"])
@pytest.mark.parametrize(
    "plan", ["data(2)", "zero1(2)", "zero3(2)", "pipeline(2)", "gpipe(2)", "tensor(2)", "server(2)"]
)
def test_a_penalty_on_weights_in_the_loss_is_refused_where_ranks_train_copies(plan):
    model = build()
    with pytest.raises(DataError, match=r"the loss reads \w+\.\w+ of the model, but under .* ranks train copies"):
        train(model, penalized(model), plan, 2)


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_a_penalty_on_weights_in_the_loss_is_that_of_a_plain_loop_alone(num_microbatches):
    model, plain = build(), build()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for x, targets in batches():
        optimizer.zero_grad()
        penalized(plain)(plain(x), targets).backward()
        optimizer.step()
    train(model, penalized(model), "solo", num_microbatches)
    assert max_difference(params_of(model), params_of(plain)) < 1e-12


def test_after_a_run_the_model_is_differentiated_as_ever():
    model = build()
    train(model, F.cross_entropy, "zero3(2)")
    x, targets = next(batches())
    penalized(model)(model(x), targets).backward()
    assert model.first.weight.grad is not None


def test_between_steps_the_model_is_differentiated_as_ever():
    model = build()
    x, targets = next(batches())
    with cp.parallelize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, strategy="zero3(2)"
    ) as step:
        step(x, targets)
        step.export_weights()
        F.cross_entropy(model(x), targets).backward()
        assert model.first.weight.grad is not None
        model.zero_grad()
        step(x, targets)


@pytest.mark.filterwarnings("ignore:.* gathers weights block by block")
@pytest.mark.parametrize("plan", ["zero3(2)", "pipeline(2)"])
@pytest.mark.parametrize(("keeps", "name"), [("attribute", "extra"), ("list", "seen")])
def test_a_differentiable_value_that_is_kept_on_the_module_is_refused_where_the_model_is_traced(plan, keeps, name):
    model = build(keeps=keeps)
    with pytest.raises(PlanError, match=rf"the forward of Net keeps a differentiable value in its attribute {name}, "):
        train(model, F.cross_entropy, plan, 2)
    assert (model.extra, model.seen) == (0.0, [])


@pytest.mark.parametrize("plan", ["data(2)", "zero2(2)"])
def test_it_is_refused_where_ranks_run_copies(plan):
    model = build(keeps="attribute")
    with pytest.raises(PlanError, match=r"attribute extra, but under .* ranks run copies of the model"):
        train(model, F.cross_entropy, plan)


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("plan", ["data(2)", "pipeline(2)"])
def test_the_older_weight_norm_is_refused_with_the_newer_one(plan):
    model = build()
    nn.utils.weight_norm(model.first)
    with pytest.raises(
        PlanError, match=r"first\.weight, .* by torch\.nn\.utils\.parametrizations\.weight_norm, which keeps none"
    ):
        train(model, F.cross_entropy, plan)


def test_a_value_that_is_kept_on_the_module_is_seen_by_the_loss_of_a_whole_model():
    model, plain = build(keeps="attribute"), build(keeps="attribute")
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for x, targets in batches():
        optimizer.zero_grad()
        (F.cross_entropy(plain(x), targets) + plain.extra).backward()
        optimizer.step()
    train(model, lambda output, targets: F.cross_entropy(output, targets) + model.extra, "solo", 2)
    assert max_difference(params_of(model), params_of(plain)) < 1e-12


class KeepsFunction(nn.Module):
    """Computes with a parameter that a function keeps, which copies of the model share."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        weight = self.layer.weight
        self.multiply = lambda x: x @ weight.t()

    def forward(self, x):
        return self.multiply(x) + self.layer.bias


def test_a_parameter_that_a_function_of_the_model_keeps_is_refused_with_how_to_read_it():
    """The error named only what to do about losses."""
    sgd = partial(torch.optim.SGD, lr=0.1)
    step = cp.parallelize(KeepsFunction(), sgd, F.mse_loss, strategy="data(2)")
    with pytest.raises(DataError, match=r"layer\.weight .* as an attribute of its module if a function keeps it"):
        step(torch.ones(4, 4), torch.zeros(4, 3))
    step.close()
