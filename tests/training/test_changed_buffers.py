"""Buffers and modes that a loop changes between steps: as in a plain loop under every plan."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp
from tests.covering import each_value_once
from tests.training.trainers import build_seeded, make_generator, max_difference, state_of

PLANS = ["solo", "data(2)", "zero1(2)", "zero3(2)", "pipeline(2)", "server(2)"]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x):
        return self.second(self.norm(torch.tanh(self.first(x))) * self.scale)


def sequential():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def norm_of(model):
    return model.norm if isinstance(model, Net) else model[1]


def batches():
    """Each half of a batch is the other one, so that every replica has the batch's statistics."""
    random = make_generator()
    for _ in range(4):
        half = torch.randn(4, 4, generator=random, dtype=torch.float64), torch.randint(3, (4,), generator=random)
        yield tuple(torch.cat([part, part]) for part in half)


def fill(model):
    model.scale.fill_(2.0)


def replace(model):
    model.scale = torch.full((8,), 2.0, dtype=torch.float64)


def fill_through_data(model):
    model.scale.data.fill_(2.0)


def fill_through_numpy(model):
    model.scale.numpy()[...] = 2.0


def assign_data(model):
    model.scale.data = torch.full((8,), 2.0, dtype=torch.float64)


def fill_and_read(model):
    model.scale.fill_(2.0)
    assert bool(model.first.weight.isfinite().all())
    assert float(model.scale[0]) == 2.0


def freeze_norm(model):
    norm_of(model).eval()


def reset_norm(model):
    norm_of(model).reset_running_stats()


def evaluate(model):
    model.eval()
    model(next(batches())[0])
    model.train()


def evaluate_and_freeze(model):
    evaluate(model)
    freeze_norm(model)


CHANGES = [
    (Net, fill), (Net, fill_through_data), (Net, fill_through_numpy), (Net, assign_data), (Net, replace), (Net, fill_and_read), (Net, freeze_norm), (Net, reset_norm), (Net, evaluate_and_freeze),
    (sequential, freeze_norm), (sequential, reset_norm), (sequential, evaluate),
]  # fmt: skip


def train_plain(model, change):
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for number, (inputs, targets) in enumerate(batches()):
        if number == 2:
            change(model)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return state_of(model)


@pytest.mark.long(
    quick=[
        "case7-data(2)",
        "case0-solo",
        "case36-solo",
        "case57-zero3(2)",
        "case64-pipeline(2)",
        "case14-zero1(2)",
        "case71-server(2)",
    ]
)
@pytest.mark.filterwarnings("ignore:BatchNorm1d")
@pytest.mark.parametrize(("case", "plan"), each_value_once(CHANGES, PLANS))
def test_a_change_between_two_steps_is_that_of_a_plain_loop(case, plan):
    build, change = case
    expected, model = train_plain(build_seeded(build), change), build_seeded(build)
    num_microbatches = 1 if plan == "pipeline(2)" else None
    with cp.parallelize(
        model, optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, strategy=plan, num_microbatches=num_microbatches
    ) as step:
        for number, batch in enumerate(batches()):
            if number == 2:
                change(model)
            step(*batch)
    assert max_difference(state_of(model), expected) < 1e-12


def test_a_buffer_of_another_shape_is_refused():
    model = build_seeded(Net)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = cp.parallelize(model, optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, strategy="zero3(2)")
        batch = next(batches())
        with step:
            step(*batch)
            model.scale = torch.ones(1, dtype=torch.float64)
            with pytest.raises(cp.DataError, match=r"^the buffer scale, torch\.float64 \(8,\), was replaced by"):
                step(*batch)


def test_modes_are_fixed_where_ranks_have_more_state_than_weights():
    model = build_seeded(Net)
    sgd, plan = optim.SGD(model.parameters(), lr=0.1), "data(2, staleness=1)"
    with cp.parallelize(model, sgd, F.cross_entropy, strategy=plan, batch_norm="deferred") as step:
        batch = next(batches())
        step(*batch)
        model.norm.eval()
        with pytest.raises(cp.DataError, match=r"^norm was put into evaluation mode .* do it before the first step"):
            step(*batch)
        model.norm.train()
        step(*batch)
