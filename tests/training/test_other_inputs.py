"""Inputs and outputs that are not tensors have the value of this step, under every plan, or are refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import counterpoint as cp
from counterpoint.errors import DataError
from tests.training.trainers import max_difference, params_of

WHOLE = [
    ("solo", 1), ("solo", 3), ("data(2)", 2), ("data(2, update=sharded)", None), ("zero2(2)", None),
    ("tree(2)", None), ("server(2, consistency=bsp)", None),
]  # fmt: skip
SPLIT = ["pipeline(2)", "zero3(2)"]


class Annealed(nn.Module):
    """Reads a temperature, a flag and a name, and returns what it was given."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x, temperature=1.0, options=None):
        hidden = torch.tanh(self.first(x))
        if options is not None and options["square"]:
            hidden = hidden * hidden
        return {"logits": self.second(hidden) / temperature, "temperature": temperature}


def loss(output, targets):
    return F.cross_entropy(output["logits"], targets) * output["temperature"]


def build():
    torch.manual_seed(0)
    return Annealed().double()


def batches(form):
    generator = torch.Generator().manual_seed(1)
    for number in range(4):
        x = torch.randn(12, 4, generator=generator, dtype=torch.float64)
        targets = torch.randint(3, (12,), generator=generator)
        options = {"square": number % 2 == 0, "name": f"step {number}"}
        yield form(x, 1.0 + number, options), targets


FORMS = {
    "tuple": lambda x, temperature, options: (x, temperature, options),
    "dict": lambda x, temperature, options: {"x": x, "temperature": temperature, "options": options},
    "late": lambda x, temperature, options: (x, temperature) if temperature > 2 else (x,),
}


def train_plain(form):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in batches(form):
        optimizer.zero_grad()
        output = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
        loss(output, targets).backward()
        optimizer.step()
    return params_of(model)


@pytest.mark.long(
    quick=["data(2)-2-tuple", "data(2, update=sharded)-None-late", "zero2(2)-None-late", "tree(2)-None-dict"]
)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("plan", "num_microbatches"), WHOLE, ids=str)
def test_a_plan_that_keeps_the_model_whole_passes_the_values_of_this_step(plan, num_microbatches, form):
    model = build()
    with cp.parallelize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss, strategy=plan, num_microbatches=num_microbatches
    ) as step:
        for inputs, targets in batches(FORMS[form]):
            step(inputs, targets)
    assert max_difference(params_of(model), train_plain(FORMS[form])) < 1e-12


@pytest.mark.long(quick=["pipeline(2)-tuple"])
@pytest.mark.parametrize("form", ["tuple", "dict"])
@pytest.mark.parametrize("plan", SPLIT)
def test_a_plan_that_splits_the_model_refuses_another_value(plan, form):
    model = build()
    name = {"tuple": r"\[0\]\[1\]", "dict": r"\[1\]\['temperature'\]"}[form]
    first, second = list(batches(FORMS[form]))[:2]
    message = rf"the input{name} of the model was 1.0 when .*, and is 2.0 now; .*torch.full"
    with cp.parallelize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss, strategy=plan, num_microbatches=2
    ) as step:
        step(*first)
        with pytest.raises(DataError, match=message):
            step(*second)


@pytest.mark.parametrize("plan", SPLIT)
def test_the_remedy_trains_as_a_plain_loop(plan):
    model, plain = build(), build()

    def form(x, temperature, _):
        return (x, torch.full((len(x), 1), temperature, dtype=x.dtype))

    def remedy_loss(output, targets):
        return F.cross_entropy(output["logits"], targets)

    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for inputs, targets in batches(form):
        optimizer.zero_grad()
        remedy_loss(plain(*inputs), targets).backward()
        optimizer.step()
    with cp.parallelize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), remedy_loss, strategy=plan, num_microbatches=2
    ) as step:
        for inputs, targets in batches(form):
            step(inputs, targets)
    assert max_difference(params_of(model), params_of(plain)) < 1e-12


def test_a_whole_model_gets_as_many_tensors_as_are_given():
    model = nn.Linear(4, 1)

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = model

        def forward(self, *parts):
            return self.layer(sum(parts))

    whole = Sum()
    x, y = torch.ones(4, 4), torch.zeros(4, 1)
    step = cp.parallelize(whole, torch.optim.SGD(whole.parameters(), lr=0.1), F.mse_loss, strategy="data(2)")
    with step:
        step((x,), y)
        expected = float(F.mse_loss(whole(x, x, 2 * x), y).detach())
        assert step((x, x, 2 * x), y) == pytest.approx(expected, rel=1e-6)
