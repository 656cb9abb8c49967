"""Forwards that change their inputs in place: as in a plain loop, or refused where ranks leave inputs as they are."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp
from counterpoint.errors import DataError

WHOLE = [("solo", 1), ("solo", 2), ("data(2)", 1), ("zero2(2)", 1)]
TRACED = [("zero3(2)", 1), ("pipeline(2)", 2), ("tensor(2)", 1)]


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        x.mul_(1.5)
        return self.last(self.second(self.first(x).relu()).relu())


def make_batches(is_target, is_reused):
    torch.manual_seed(1)
    inputs = torch.randn(8, 4)
    for _ in range(3):
        x = inputs if is_reused else torch.randn(8, 4)
        yield x, x if is_target else torch.ones(8, 4)


def train_plain(batches):
    model = InPlace()
    optimizer, losses = optim.SGD(model.parameters(), lr=0.1), []
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(batches, strategy, num_microbatches):
    model = InPlace()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with cp.parallelize(model, optimizer, F.mse_loss, strategy=strategy, num_microbatches=num_microbatches) as step:
        return [step(x, y) for x, y in batches]


@pytest.mark.long(quick=["zero2(2)-1-False-True", "solo-1-False-False", "data(2)-1-True-True"])
@pytest.mark.parametrize("is_target", [False, True])
@pytest.mark.parametrize("is_reused", [False, True])
@pytest.mark.parametrize(("strategy", "num_microbatches"), WHOLE)
def test_a_model_that_is_whole_changes_its_inputs_as_in_a_plain_loop(is_target, is_reused, strategy, num_microbatches):
    """Checks before the first step had run the forward on the user's own tensors, which were changed once more."""
    expected = train_plain(make_batches(is_target, is_reused))
    assert train(make_batches(is_target, is_reused), strategy, num_microbatches) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("strategy", "num_microbatches"), TRACED)
def test_changed_inputs_that_are_not_read_again_change_nothing_where_a_model_is_split(strategy, num_microbatches):
    expected = train_plain(make_batches(is_target=False, is_reused=False))
    losses = train(make_batches(is_target=False, is_reused=False), strategy, num_microbatches)
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("is_target", "is_reused", "message"), [(True, False, "is also a target"), (False, True, "one of an earlier step")]
)
@pytest.mark.parametrize(("strategy", "num_microbatches"), TRACED)
def test_changed_inputs_that_are_read_again_are_refused_where_a_model_is_split(
    is_target, is_reused, message, strategy, num_microbatches
):
    with pytest.raises(DataError, match=rf"forward of InPlace changes an input in place, which .*{message}.*x.clone"):
        train(make_batches(is_target, is_reused), strategy, num_microbatches)


def test_slices_of_one_tensor_may_follow_each_other():
    inputs = torch.randn(24, 4)
    batches = [(inputs[start : start + 8], torch.ones(8, 4)) for start in (0, 8, 16, 0)]
    assert len(train(batches[:3], "pipeline(2)", 2)) == 3
    with pytest.raises(DataError, match="one of an earlier step"):
        train(batches, "pipeline(2)", 2)


@pytest.mark.parametrize("strategy", ["solo", "data(2)"])
def test_a_loss_that_changes_its_targets_is_not_computed_again(strategy):
    def loss(output, targets):
        targets.mul_(1.5)
        return F.mse_loss(output, targets)

    def batches():
        torch.manual_seed(1)
        for _ in range(3):
            yield torch.randn(8, 4), torch.randn(8, 4)

    plain = [(x, y * 1.5) for x, y in batches()]
    model = InPlace()
    with cp.parallelize(
        model, optim.SGD(model.parameters(), lr=0.1), loss, strategy=strategy, num_microbatches=2
    ) as step:
        losses = [step(x, y) for x, y in batches()]
    assert losses == pytest.approx(train_plain(plain), rel=1e-5)


class OutOfPlace(InPlace):
    def forward(self, x):
        return super().forward(x.clone())


def shrink_targets(output, targets):
    return F.mse_loss(output, targets.mul_(0.9))


@pytest.mark.parametrize(
    ("model", "loss", "message"),
    [
        (InPlace, F.mse_loss, "one of an earlier step"),
        (OutOfPlace, shrink_targets, "loss changes its targets"),
    ],
)
@pytest.mark.parametrize("strategy", ["pipedream(2)", "pipeline(2, schedule=pipedream_2bw)"])
def test_batches_in_flight_that_are_changed_and_read_again_are_refused(model, loss, message, strategy):
    """They are copies, so that the caller's tensors are not changed, as they would be in a plain loop."""
    model = model()
    with (
        pytest.raises(DataError, match=message),
        cp.parallelize(model, optim.SGD(model.parameters(), lr=0.1), loss, strategy=strategy) as step,
    ):
        list(map(step, *zip(*make_batches(is_target=False, is_reused=True), strict=True)))


def accumulate_all(batches):
    model = InPlace()
    with cp.parallelize(model, optim.SGD(model.parameters(), lr=0.1), F.mse_loss, strategy="solo") as step:
        for x, y in batches:
            step.accumulate(x, y)
        return step.update()


def test_accumulated_batches_that_are_changed_and_read_again_are_refused():
    assert accumulate_all(make_batches(is_target=False, is_reused=False)) > 0
    with pytest.raises(DataError, match="copies of accumulated batches"):
        accumulate_all(make_batches(is_target=False, is_reused=True))
