"""Models whose output for a sample depends on the batch: refused also where microbatches have few samples."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp
from counterpoint.errors import DataError, PlanError


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)


class DividedByTheLargest(Layers):
    def forward(self, x):
        hidden = self.first(x)
        return self.last(hidden / hidden.abs().max())


class LessTheSmallest(Layers):
    def forward(self, x):
        hidden = self.first(x)
        return self.last(hidden - hidden.min())


class BranchOnTheLargest(Layers):
    def forward(self, x):
        return self.last(self.first(x) * (1 if x.max() > 3 else 2))


class CenteredInTraining(Layers):
    def forward(self, x):
        hidden = self.first(x)
        return self.last(hidden - hidden.mean(0) if self.training else hidden)


class BranchOnTheMean(Layers):
    def forward(self, x):
        return self.last(self.first(x) * (1 if x.mean() > 0 else 2))


class LessTheFirst(Layers):
    def forward(self, x):
        return self.last(self.first(x - x[0]))


class DividedAfterDropout(Layers):
    """Draws in evaluation mode, too."""

    def forward(self, x):
        hidden = F.dropout(self.first(x), 0.5, training=True)
        return self.last(hidden / hidden.abs().max())


class DividedAfterNorm(Layers):
    """Its batch norm has no running statistics."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4, track_running_stats=False)

    def forward(self, x):
        hidden = self.norm(self.first(x))
        return self.last(hidden / hidden.abs().max())


class FirstComeFirstServed(Layers):
    """Gives half of the samples, the first of those that want it, to a layer of limited capacity."""

    def forward(self, x):
        hidden = self.first(x)
        chosen = (x.sum(1) > 0).nonzero()[:, 0][: len(x) // 2]
        return self.last(hidden.index_fill(0, chosen, 0.0))


class ChosenBySample(Layers):
    """What an error about a branch tells to write."""

    def forward(self, x):
        hidden = self.first(x)
        return self.last(torch.where(x.mean(1, keepdim=True) > 0, hidden, 2 * hidden))


class Independent(Layers):
    def forward(self, x):
        return self.last(self.first(x).relu())


class Masked(Layers):
    """Takes a mask of positions by positions, which has no samples."""

    def forward(self, x, mask):
        return self.last(self.first(torch.softmax(x @ x.transpose(1, 2) + mask, -1) @ x)).mean(1)


class KeysMasked(Layers):
    """Takes a mask of positions, which has no samples."""

    def forward(self, x, mask):
        return self.last(self.first(x * mask[:, None])).mean(1)


def train(model, inputs, strategy, num_microbatches, *, loss=F.mse_loss, targets=None, **options):
    torch.manual_seed(1)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with cp.parallelize(
        model, optimizer, loss, strategy=strategy, num_microbatches=num_microbatches, **options
    ) as step:
        return step(inputs, torch.ones(6, 2) if targets is None else targets)


def features(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("kind", [DividedByTheLargest, LessTheSmallest, BranchOnTheLargest])
@pytest.mark.parametrize(("strategy", "num_microbatches"), [("solo", 2), ("solo", 6), ("data(2)", 1)])
def test_extremes_of_the_batch_are_refused(kind, strategy, num_microbatches):
    """The samples with the largest value may all be in the half that was compared."""
    with pytest.raises(PlanError, match="depends on the other samples of its batch"):
        train(kind(), features(6, 4), strategy, num_microbatches)


@pytest.mark.parametrize(
    "kind",
    [
        CenteredInTraining,
        BranchOnTheMean,
        LessTheFirst,
        DividedAfterDropout,
        DividedAfterNorm,
        FirstComeFirstServed,
    ],
)
@pytest.mark.parametrize(("strategy", "num_microbatches"), [("solo", 2), ("data(2)", 1), ("zero3(2)", 1)])
def test_a_dependence_that_evaluation_mode_or_the_values_of_the_batch_do_not_show_is_refused(
    kind, strategy, num_microbatches
):
    """All values of the batch are positive, so that no part of it takes the other branch."""
    with pytest.raises(PlanError, match=f"the output of {kind.__name__} for a sample depends on the other samples"):
        train(kind(), features(6, 4).abs(), strategy, num_microbatches)


def test_the_remedies_against_a_branch_on_the_batch_train_as_a_plain_loop():
    inputs, targets = features(6, 4).abs(), torch.ones(6, 2)
    expected = F.mse_loss(BranchOnTheMean()(inputs), targets).item()
    with pytest.raises(PlanError, match=r"with torch\.where, train without replicas .*, with num_microbatches=1"):
        train(BranchOnTheMean(), inputs, "data(2)", 1)
    with pytest.raises(PlanError, match=r"with torch\.where, give num_microbatches=1"):
        train(BranchOnTheMean(), inputs, "solo", 2)
    by_sample = F.mse_loss(ChosenBySample()(inputs), targets).item()
    assert train(ChosenBySample(), inputs, "data(2)", 1) == pytest.approx(by_sample, rel=1e-5)
    assert train(BranchOnTheMean(), inputs, "solo", 1) == pytest.approx(expected, rel=1e-5)
    assert train(BranchOnTheMean(), inputs, "data(2)", 1, cross_sample="accept") == pytest.approx(expected, rel=1e-5)


class DropPath(nn.Module):
    """Drops a whole sample, as torchvision's and timm's layers do."""

    def forward(self, x):
        return x * torch.empty(len(x), 1).bernoulli_(0.5) if self.training else x


class Shuffled(Layers):
    """Keeps some of a sample's features, chosen by random numbers that are sorted."""

    def forward(self, x):
        hidden = self.first(x)
        kept = torch.rand(len(x), 4).argsort(1)[:, :2]
        return self.last(hidden * torch.zeros_like(hidden).scatter(1, kept, 1.0))


class Routed(Layers):
    """A mixture of experts without limits."""

    def forward(self, x):
        outputs, choice = torch.zeros(len(x), 4), self.first(x).argmax(1)
        for expert in range(4):
            chosen = (choice == expert).nonzero()[:, 0]
            outputs = outputs.index_add(0, chosen, self.first(x[chosen]) * (expert + 1))
        return self.last(outputs)


class Recurrent(Layers):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(4, 4, 2, dropout=0.5, batch_first=True)

    def forward(self, x):
        return self.last(self.rnn(self.first(x)[:, None])[0][:, 0])


def layers(*modules):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), *modules, nn.Linear(4, 2))


@pytest.mark.parametrize(
    "build",
    [
        lambda: layers(nn.BatchNorm1d(4)),
        lambda: layers(nn.SyncBatchNorm(4)),
        lambda: layers(nn.BatchNorm1d(4, track_running_stats=False), nn.Dropout()),
        lambda: layers(nn.BatchNorm1d(4, affine=False, track_running_stats=False)),
        lambda: layers(nn.AlphaDropout(), nn.RReLU(), DropPath()),
        Shuffled,
        Routed,
        Recurrent,
    ],
)
def test_norms_and_random_numbers_are_not_taken_for_a_dependence(build):
    model = build()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with cp.parallelize(model, optim.SGD(model.parameters(), lr=0.0), F.mse_loss, strategy="data(2)") as step:
        step(features(8, 4), torch.ones(8, 2))
    assert all(torch.equal(value, state[name]) for name, value in model.named_parameters())
    assert model.training


@pytest.mark.parametrize("num_microbatches", [2, 3, 6])
def test_independent_samples_are_not_refused(num_microbatches):
    expected = train(Independent(), features(6, 4), "solo", 1)
    assert train(Independent(), features(6, 4), "solo", num_microbatches) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("kind", "shape"), [(Masked, (6, 6)), (KeysMasked, (6,))])
def test_a_mask_as_long_as_the_batch_is_refused_unless_it_is_named(kind, shape):
    """A microbatch of one sample had one row of it, which is broadcast."""
    inputs = features(6, 6, 4), features(*shape)
    expected = train(kind(), inputs, "solo", 1)
    with pytest.raises(PlanError, match=r"depends on the other samples.*shared=\(NAME,\)"):
        train(kind(), inputs, "solo", 6)
    with pytest.raises(DataError, match=r"computes on the batch of 6 samples, but not on a microbatch"):
        train(kind(), inputs, "solo", 3)
    assert train(kind(), inputs, "solo", 6, shared=("mask",)) == pytest.approx(expected, rel=1e-5)


class WithPenalty(Layers):
    """Returns also the gradient of its output with respect to its input."""

    def forward(self, x):
        x = x.detach().requires_grad_()
        output = self.last(self.first(x).tanh())
        (grad,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return output, grad


class Plain(Layers):
    def forward(self, x):
        return self.last(self.first(x).tanh())


@pytest.mark.parametrize(
    ("strategy", "num_microbatches"), [("solo", 2), ("data(2)", 1), ("zero3(2)", 1), ("pipeline(2)", 2)]
)
def test_a_gradient_with_respect_to_inputs_is_refused_in_the_loss_and_right_in_the_forward(strategy, num_microbatches):
    x = features(6, 4).requires_grad_()
    targets = (x, torch.ones(6, 2))

    def of_input(output, targets):
        (grad,) = torch.autograd.grad(output.sum(), targets[0], create_graph=True)
        return F.mse_loss(output, targets[1]) + grad.square().mean()

    def of_output(output, targets):
        return F.mse_loss(output[0], targets) + output[1].square().mean()

    expected = train(Plain(), x, "solo", 1, loss=of_input, targets=targets)
    with pytest.raises(DataError, match=r"differentiates with respect to a tensor.*in the model's forward"):
        train(Plain(), x, strategy, num_microbatches, loss=of_input, targets=targets)
    if strategy != "pipeline(2)":  # a trace does not take detach()
        found = train(WithPenalty(), x.detach(), strategy, num_microbatches, loss=of_output)
        assert found == pytest.approx(expected, rel=1e-5)
