"""A model or a loss that needs the whole batch: refused where the batch is divided, as it is where it is wrong."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import TensorDataset

import counterpoint as cp

PLANS = [("solo", 2), ("data(2)", 1), ("zero3(2)", 1), ("pipeline(2)", 2), ("tensor(2)", 2)]
TENSORS = (torch.linspace(-1, 1, 32, dtype=torch.float64).view(8, 4), torch.zeros(8, 3, dtype=torch.float64))


class Net(nn.Module):
    """Two layers, with what a subclass does between them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.double()

    def between(self, x):
        return x

    def forward(self, x):
        return self.last(self.between(torch.tanh(self.first(x))))


class FixedShape(Net):
    def between(self, x):
        return x.view(8, x.shape[1])


class WrongShape(Net):
    def between(self, x):
        return x.view(7, x.shape[1])


class FixedIndex(Net):
    def forward(self, x):
        return super().forward(x) + 0 * x[7].sum()


class Asserting(Net):
    def forward(self, x):
        assert len(x) == 8, "8 samples are needed"
        return super().forward(x)


class Normalized(Net):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4, dtype=torch.float64)

    def forward(self, x):
        return super().forward(self.norm(x))


def loss_of_eight(outputs, targets):
    return F.mse_loss(outputs.view(8, 3), targets)


def loss_of_seven(outputs, targets):
    return F.mse_loss(outputs.view(7, 3), targets)


def train(model, loss, strategy, num_microbatches, batch=TENSORS):
    """Take one step; the model is as it was if it fails."""
    before = copy.deepcopy(model.state_dict())
    sgd = optim.SGD(model.parameters(), lr=0.1)
    try:
        with cp.parallelize(model, sgd, loss, strategy=strategy, num_microbatches=num_microbatches) as step:
            return step(*batch)
    except BaseException:
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        raise


@pytest.mark.parametrize(("strategy", "num_microbatches"), PLANS)
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (FixedShape, "RuntimeError: shape '[8, 6]' is invalid for input of size 24"),
        (FixedIndex, "IndexError: index 7 is out of bounds for dimension 0 with size 4"),
        (Asserting, "AssertionError: 8 samples are needed"),
    ],
)
def test_a_model_that_needs_the_whole_batch_is_refused_with_its_own_error(model, reason, strategy, num_microbatches):
    with pytest.raises(cp.DataError) as caught:
        train(model(), F.mse_loss, strategy, num_microbatches)
    name = r"microbatch 0 on rank \d|a microbatch"
    assert re.match(
        rf"{model.__name__} computes on the batch of 8 samples, but not on ({name}), which has 4 of them: "
        rf"{re.escape(reason)}; {strategy[:4]}[^;]* divides a batch into 2 microbatches, and a model and a loss must ",
        str(caught.value),
    )
    assert f"{type(caught.value.__cause__).__name__}: {caught.value.__cause__}".startswith(reason)


@pytest.mark.parametrize(("strategy", "num_microbatches"), PLANS)
def test_a_loss_that_needs_the_whole_batch_is_refused_with_its_own_error(strategy, num_microbatches):
    with pytest.raises(cp.DataError, match=r"^the loss computes on the batch of 8 samples, but not on microbatch 0 on"):
        train(Net(), loss_of_eight, strategy, num_microbatches)


def test_the_remedy_of_the_error_trains():
    with pytest.raises(cp.DataError, match=r"; or give num_microbatches=1$"):
        train(FixedShape(), F.mse_loss, "pipeline(2)", 2)
    with pytest.raises(cp.DataError, match=r"train without replicas \(solo, .* tensor\), with num_microbatches=1$"):
        train(FixedShape(), loss_of_eight, "data(2)", 1)
    losses = [train(FixedShape(), loss_of_eight, strategy, 1) for strategy in ("solo", "pipeline(2)")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-12)


@pytest.mark.long(
    quick=[
        "WrongShape-mse_loss-pipeline(2)-2",
        "Net-loss_of_seven-data(2)-1",
        "Net-loss_of_seven-zero3(2)-1",
        "Net-loss_of_seven-tensor(2)-2",
    ]
)
@pytest.mark.parametrize(("strategy", "num_microbatches"), PLANS)
@pytest.mark.parametrize(("model", "loss"), [(WrongShape, F.mse_loss), (Net, loss_of_seven)])
def test_what_is_wrong_on_the_whole_batch_too_keeps_its_own_error(model, loss, strategy, num_microbatches):
    with pytest.raises(RuntimeError, match=r"^shape '\[7, \d\]' is invalid for input of size (12|24)"):
        train(model(), loss, strategy, num_microbatches)


def test_batch_norm_on_a_single_sample_says_how_many_the_batch_has():
    with pytest.raises(
        cp.DataError, match=r"^batch norm .*: Normalized under solo, where a microbatch has 1 of the 8 "
    ):
        train(Normalized(), F.mse_loss, "solo", 8)


@pytest.mark.parametrize("collate_fn", [None, torch.utils.data.default_collate])
def test_a_trainer_refuses_it_in_the_first_batch_that_is_divided(collate_fn):
    trainer = cp.Trainer(Net(), loss=loss_of_eight, optimizer=optim.SGD, strategy="data(2)")
    with pytest.raises(cp.DataError, match="the loss computes on the batch of 8 samples, but not on microbatch 0"):
        trainer.fit(TensorDataset(*TENSORS), batch_size=8, collate_fn=collate_fn)
    trainer = cp.Trainer(FixedShape(), loss=F.mse_loss, optimizer=optim.SGD, strategy="zero3(2)")
    with pytest.raises(cp.DataError, match="FixedShape computes on the batch of 8 samples, but not on a microbatch"):
        trainer.fit(TensorDataset(*TENSORS), batch_size=8, collate_fn=collate_fn)


def test_an_accumulated_batch_that_is_divided_is_compared_with_its_own_whole():
    with cp.parallelize(Net(), optim.SGD, loss_of_eight, strategy="solo", num_microbatches=4) as step:
        for _ in range(2):
            step.accumulate(*TENSORS)
        with pytest.raises(cp.DataError, match=r"of 8 samples, but not on microbatch 0 .*, which has 4 of them"):
            step.update()
