"""Models whose output for a sample depends on the batch: refused also where microbatches have few samples."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp
from counterpoint.errors import DataError, PlanError
from counterpoint.runtime.sample_independence import require_sample_independence


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


class BranchOnTheSign(Layers):
    def forward(self, x):
        return self.last(self.first(x) * (1 if x.mean() > 0 else 2))


class CenteredInTraining(Layers):
    """Draws, too: constants take the place of its random numbers."""

    def forward(self, x):
        hidden = F.dropout(self.first(x), 0.5, self.training)
        return self.last(hidden - hidden.mean(0) if self.training else hidden)


class BranchInTraining(Layers):
    def forward(self, x):
        return self.last(self.first(x) * (2 if self.training and float(x.sum()) > 0 else 1))


class BranchInTrainingOnTheNumber(Layers):
    def forward(self, x):
        output = self.last(self.first(x))
        return 2 * output if self.training and len(x) > 4 else output


class BranchOnTheNumber(Layers):
    """On a microbatch it takes the same side as on half of it."""

    def forward(self, x):
        hidden = self.first(x)
        return self.last(hidden if len(x) > 4 else hidden.tanh())


class OtherFactorForMany(Layers):
    def forward(self, x):
        return self.last(self.first(x) * (2 if len(x) > 4 else 1))


class MeanOfTheLargestThree(Layers):
    """It does not run on half of a microbatch of three."""

    def forward(self, x):
        hidden = self.first(x)
        return self.last(hidden + hidden[:, 0].topk(3).values.mean())


class LoopsOverSamples(Layers):
    """It calls other functions for another number of samples, but for each the same."""

    def forward(self, x):
        return self.last(torch.stack([self.first(sample).tanh() for sample in x]))


class LessTheSampleBefore(Layers):
    """Of a batch, the first half never sees the second."""

    def forward(self, x):
        hidden = self.first(x)
        return self.last(hidden - torch.cat([hidden[:1], hidden[:-1]]))


class AlongTheBatch(nn.Module):
    """Without ``batch_first`` an LSTM takes samples for positions."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lstm, self.last = nn.LSTM(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.lstm(x[:, None])[0][:, 0])


class OtherInTraining(Layers):
    """Computes something else in training, but by sample, and reads a value that changes nothing."""

    def forward(self, x):
        self.largest = float(x.abs().max())
        hidden = F.dropout(self.first(x), 0.5, self.training) * (2 if self.training else 1)
        return self.last(hidden * (torch.rand(len(x), 1) < 0.7) if self.training else hidden)


class Independent(Layers):
    def forward(self, x):
        return self.last(self.first(x).relu())


class BackwardOf(torch.autograd.Function):
    """The identity, whose gradient is given by a function."""

    @staticmethod
    def forward(ctx, value, change):
        ctx.change = change
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.change(grad), None


def scale_by_the_largest(grad):
    return grad / grad.abs().max()


def clip_each(grad):
    """Clip the gradient of each sample by its own norm."""
    return grad / grad.norm(dim=1, keepdim=True).clamp(min=0.01)


class GradientsScaled(Layers):
    def forward(self, x):
        return self.last(BackwardOf.apply(self.first(x), scale_by_the_largest))


class GradientsScaledByAHook(Layers):
    def forward(self, x):
        hidden = self.first(x)
        if hidden.requires_grad:
            hidden.register_hook(scale_by_the_largest)
        return self.last(hidden)


class GradientsScaledByAModule(Layers):
    def __init__(self):
        super().__init__()
        self.last.register_full_backward_hook(lambda _, grads, __: tuple(map(scale_by_the_largest, grads)))

    def forward(self, x):
        return self.last(self.first(x))


class GradientsClippedEach(Layers):
    def forward(self, x):
        hidden = BackwardOf.apply(self.first(x), clip_each)
        if hidden.requires_grad:
            hidden.register_hook(clip_each)
        return self.last(hidden)


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


@pytest.mark.parametrize(
    "kind",
    [DividedByTheLargest, LessTheSmallest, BranchOnTheLargest, BranchOnTheSign, CenteredInTraining, BranchInTraining,
     LessTheSampleBefore, AlongTheBatch],
)  # fmt: skip
@pytest.mark.parametrize(("strategy", "num_microbatches"), [("solo", 2), ("solo", 6), ("data(2)", 1)])
def test_outputs_that_depend_on_other_samples_are_refused(kind, strategy, num_microbatches):
    """Those that decide may all be in the half that is compared, or none of them may be in the microbatch."""
    with pytest.raises(PlanError, match="depends on the other samples of its batch"):
        train(kind(), features(6, 4), strategy, num_microbatches)


@pytest.mark.parametrize(("kind", "strategy", "num_microbatches"), [
    (BranchOnTheNumber, "solo", 2), (BranchOnTheNumber, "solo", 6), (BranchOnTheNumber, "pipeline(2)", 2),
    (BranchInTrainingOnTheNumber, "solo", 2), (BranchInTrainingOnTheNumber, "zero(2, level=2)", 1),
    (OtherFactorForMany, "data(2)", 1), (OtherFactorForMany, "zero(2, level=3)", 1), (MeanOfTheLargestThree, "data(2)", 1),
])  # fmt: skip
def test_outputs_that_depend_on_the_number_of_samples_are_refused(kind, strategy, num_microbatches):
    """A microbatch and its halves take the same branch, or halves do not run."""
    with pytest.raises(PlanError, match="of its largest value with the same samples repeated to 6;"):
        train(kind(), features(6, 4), strategy, num_microbatches)


class BranchOnALargeSum(Layers):
    """Of batches with small values, 16 times as large ones take the same side."""

    def forward(self, x):
        return self.last(self.first(x) * (2 if x.abs().sum() > 10 else 1))


@pytest.mark.parametrize(("strategy", "num_microbatches"), [("solo", 2), ("data(2)", 1), ("server(2)", 1)])
def test_a_branch_that_no_side_of_the_first_batch_has_shown_is_refused_later(strategy, num_microbatches):
    """Only the first batch was looked at."""
    model, x, targets = BranchOnALargeSum(), features(6, 4), torch.ones(6, 2)
    assert x[:3].abs().sum() < 10 < x.abs().sum()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with cp.parallelize(model, optimizer, F.mse_loss, strategy=strategy, num_microbatches=num_microbatches) as step:
        step(x / 1000, targets)
        with pytest.raises(PlanError, match="depends on the other samples of its batch"):
            step(x, targets)


class AddsToAll(Layers):
    """Adds the mean of the samples with a large first value, of which small batches have none."""

    def __init__(self, select):
        super().__init__()
        self.select = select

    def forward(self, x):
        hidden = self.first(x)
        large = self.select(hidden, x[:, 0] > 2000)
        return self.last(hidden + large.mean(0) if len(large) else hidden)


SELECTIONS = {
    "mask": lambda rows, mask: rows[mask],
    "masked_select": lambda rows, mask: rows.masked_select(mask[:, None]).view(-1, 4),
    "nonzero": lambda rows, mask: rows[mask.nonzero()[:, 0]],
    "where": lambda rows, mask: rows[torch.where(mask)[0]],
    "repeat_interleave": lambda rows, mask: rows.repeat_interleave(mask.long(), 0),
}


@pytest.mark.parametrize("select", SELECTIONS.values(), ids=SELECTIONS)
def test_samples_that_later_batches_select_are_seen_as_a_branch(select):
    """Only conditions and some functions counted as values that a forward reads, not a mask as an index."""
    model, x, targets = AddsToAll(select), features(6, 4), torch.ones(6, 2)
    large = x.clone()
    large[4, 0] = 3000  # in the last microbatch
    with cp.parallelize(model, optim.SGD(model.parameters(), lr=0.1), F.mse_loss, num_microbatches=2) as step:
        step(x, targets)
        with pytest.raises(PlanError, match="depends on the other samples of its batch"):
            step(large, targets)


class NearTie(Layers):
    """Chooses a layer by a score that rounds otherwise for another number of samples."""

    def __init__(self):
        super().__init__()
        self.other, self.bound = nn.Linear(4, 2), 1e9
        self.double()

    def forward(self, x):
        score = x.sum(1, keepdim=True) + x.abs().sum() * 0
        is_large = score * (1 + len(x) * torch.finfo(x.dtype).eps) > self.bound
        return torch.where(is_large, self.last(self.first(x)), 10 * self.other(x))


def test_a_near_tie_that_rounding_turns_does_not_end_a_run():
    """The later check had ended it: a half of the microbatch took another layer than the microbatch."""
    model, x = NearTie(), features(6, 4).double().abs()
    model.bound = float(x[0].sum()) * (1 + 2.0**-51)
    halves, whole = model(x[:1]), model(x[:3])
    assert (halves[0] - whole[0]).abs().max() > 0.1
    for step_inputs in (x, x * 1.7):
        assert require_sample_independence(model, (step_inputs[:3],), "solo", 2) is False


@pytest.mark.parametrize("kind", [DividedByTheLargest, BranchOnTheSign])
def test_a_difference_that_rounding_does_not_explain_is_refused_near_a_tie_too(kind):
    """One that is not a near tie changes by far less if weights and inputs are rounded otherwise."""
    model, x = kind().double(), features(6, 4).double()
    with pytest.raises(PlanError, match="depends on the other samples of its batch"):
        require_sample_independence(model, (x,), "solo", 2)


class NearTieAndMean(nn.Module):
    """Has a near tie in the first sample, and adds a share of the mean of all samples to each."""

    def __init__(self):
        super().__init__()
        self.first, self.other, self.bound = nn.Linear(4, 4), nn.Linear(4, 4), 0.0

    def forward(self, x):
        result = torch.where(x.sum(1, keepdim=True) > self.bound, self.first(x), self.other(x))
        return result - 0.5 * result.mean(0)


def test_a_near_tie_in_one_sample_does_not_hide_that_all_depend_on_others():
    torch.manual_seed(0)
    model, x = NearTieAndMean().double(), features(6, 4).double()
    x[5] = x[0]
    model.bound = float(x[0].sum())
    with pytest.raises(PlanError, match="depends on the other samples of its batch"):
        require_sample_independence(model, (x,), "solo", 2)


def test_a_warning_says_once_that_no_process_has_the_weights_to_check_later_batches():
    model, x, targets = OtherInTraining(), features(6, 4), torch.ones(6, 2)
    with cp.parallelize(model, optim.SGD(model.parameters(), lr=0.1), F.mse_loss, num_microbatches=2) as step:
        step(x, targets)
        step.local_ranks.released_params.versions["first.weight"] = 0  # as in pipelines in several processes
        with pytest.warns(UserWarning, match="reads values of tensors, and may branch .* no process has all weights"):
            step(x, targets)
        step.local_ranks.released_params.versions.clear()
        assert not step.local_ranks.reads_values


def test_values_that_change_no_side_are_read_in_every_step():
    model, x, targets = OtherInTraining(), features(6, 4), torch.ones(6, 2)
    with cp.parallelize(model, optim.SGD(model.parameters(), lr=0.1), F.mse_loss, num_microbatches=2) as step:
        losses = [step(x * factor, targets) for factor in (1, 2, 16, -1, 0)]
    assert len(losses) == 5


class OtherFactorForManyWithAHook(OtherFactorForMany):
    def __init__(self):
        super().__init__()
        self.last.register_forward_hook(lambda *_: None)


class AHookWithAnotherFactorForMany(Independent):
    def __init__(self):
        super().__init__()
        self.last.register_forward_hook(lambda _module, _inputs, output: output * 2 if len(output) > 4 else None)


class OtherFactorForManyWithAValue(OtherFactorForMany):
    """Reads a value, of which there are none on the meta device."""

    def forward(self, x):
        self.largest = x.abs().max().item()
        return super().forward(x)


@pytest.mark.parametrize(
    "kind", [OtherFactorForManyWithAHook, AHookWithAnotherFactorForMany, OtherFactorForManyWithAValue]
)
@pytest.mark.parametrize(("strategy", "num_microbatches"), [("solo", 2), ("solo", 6), ("data(2)", 1)])
def test_the_number_of_samples_is_checked_with_hooks_and_values_too(kind, strategy, num_microbatches):
    """Any hook, and any value that the forward reads, have omitted the check."""
    with pytest.raises(PlanError, match="of its largest value with the same samples repeated to 6;"):
        train(kind(), features(6, 4), strategy, num_microbatches)


@pytest.mark.parametrize("num_microbatches", [2, 3, 6])
@pytest.mark.parametrize("kind", [Independent, OtherInTraining, GradientsClippedEach, LoopsOverSamples])
def test_independent_samples_are_not_refused(kind, num_microbatches):
    expected = train(kind(), features(6, 4), "solo", 1)
    assert train(kind(), features(6, 4), "solo", num_microbatches) == pytest.approx(expected, rel=1e-5)


@pytest.mark.filterwarnings("ignore:.* gathers weights block by block")
@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (GradientsScaled, "the autograd function BackwardOf"),
        (GradientsScaledByAHook, "a hook on a gradient"),
        (GradientsScaledByAModule, "the autograd function BackwardHookFunction"),
    ],
)
@pytest.mark.parametrize(("strategy", "num_microbatches"), [("solo", 2), ("data(2)", 1), ("zero(2, level=3)", 1)])
def test_a_gradient_that_is_not_the_sum_of_those_of_samples_is_refused(kind, what, strategy, num_microbatches):
    with pytest.raises(
        PlanError, match=f"is not the sum of those of its samples: .* perhaps by a value of all samples in {what};"
    ):
        train(kind(), features(6, 4), strategy, num_microbatches)
    assert train(kind(), features(6, 4), "solo", 1) == pytest.approx(
        train(kind(), features(6, 4), strategy, num_microbatches, cross_sample="accept"), rel=1e-5
    )


@pytest.mark.filterwarnings("ignore:.* gathers weights block by block")
@pytest.mark.parametrize("strategy", ["data(2)", "zero(2, level=3)"])
def test_gradients_that_are_changed_for_each_sample_are_those_of_a_loop(strategy):
    models, inputs = [GradientsClippedEach().double() for _ in range(2)], features(6, 4).double()
    F.mse_loss(models[0](inputs), targets := torch.ones(6, 2).double()).backward()
    optim.SGD(models[0].parameters(), lr=0.1).step()
    train(models[1], inputs, strategy, 1, targets=targets)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


class GradientsClamped(Layers):
    def forward(self, x):
        hidden = self.first(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: grad.clamp(-0.03, 0.03))
        return self.last(hidden)


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (lambda y, t: cp.WeightedMean((y - t).square().sum(), t.sum()), {}),
        (lambda y, t: {"a": cp.WeightedMean((y - t).square().sum(), t.sum())}, {}),
        (lambda y, t: (y - t).square().sum(), {"loss_reduction": "sum"}),
    ],
    ids=["weighted", "a dict", "sum"],
)
@pytest.mark.parametrize(("strategy", "num_microbatches"), [("solo", 2), ("data(2)", 1)])
def test_clamped_gradients_of_a_loss_with_a_later_factor_are_refused(loss, options, strategy, num_microbatches):
    """They would be clamped as parts of another sum than that of a loop."""
    with pytest.raises(DataError, match="not proportional to those of its outputs, because of a hook on a gradient"):
        train(GradientsClamped(), features(6, 4), strategy, num_microbatches, loss=loss, **options)
    train(GradientsClamped(), features(6, 4), "solo", 1, loss=loss, **options)


def test_clamped_gradients_of_means_are_those_of_a_loop():
    models, inputs = [GradientsClamped().double() for _ in range(2)], features(6, 4).double()
    F.mse_loss(models[0](inputs), targets := torch.ones(6, 2).double()).backward()
    optim.SGD(models[0].parameters(), lr=0.1).step()
    train(models[1], inputs, "data(2)", 3, targets=targets)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


class OwnLoss(Layers):
    """Returns the mean of a loss, whose gradient is changed by a function."""

    def __init__(self, change, *, is_of_each=False):
        super().__init__()
        self.change, self.is_of_each = [change], is_of_each

    def forward(self, x, targets):
        losses = (self.last(self.first(x)) - targets).square().mean(1)
        if self.is_of_each:
            return BackwardOf.apply(losses, *self.change).mean()
        return BackwardOf.apply(losses.mean(), *self.change)


class WithMeanOutOfTheGraph(Layers):
    """Adds a zero whose gradient is that of the mean over the batch."""

    def forward(self, x):
        hidden = self.first(x)
        mean = hidden.mean(0, keepdim=True)
        return self.last(hidden + (mean - mean.detach()))


class WithCentreOutOfTheGraph(Layers):
    def forward(self, x):
        hidden = self.first(x)
        with torch.no_grad():
            mean = hidden.mean(0, keepdim=True)
        return self.last(hidden + (hidden.mean(0, keepdim=True) - mean))


@pytest.mark.filterwarnings("ignore:.* gathers weights block by block")
@pytest.mark.parametrize("kind", [WithMeanOutOfTheGraph, WithCentreOutOfTheGraph])
@pytest.mark.parametrize(("strategy", "num_microbatches"), [("solo", 2), ("data(2)", 1), ("zero(2, level=3)", 1)])
def test_gradients_by_a_value_of_all_samples_that_is_out_of_the_graph_are_refused(kind, strategy, num_microbatches):
    with pytest.raises(PlanError, match=r"is not the sum of those of its samples: .* leaves out of the graph"):
        train(kind(), features(6, 4), strategy, num_microbatches)
    train(kind(), features(6, 4), "solo", 1)


def scaled_by_its_value(output, targets):
    loss = F.mse_loss(output, targets)
    return loss / loss.detach()


def balanced_by_values(output, targets):
    first, second = F.mse_loss(output, targets), output.abs().mean()
    return first + second * (first.detach() / second.detach())


def scaled_by_a_number(output, targets):
    loss = F.mse_loss(output, targets)
    return loss / loss.item()


@pytest.mark.parametrize("loss", [scaled_by_its_value, balanced_by_values, scaled_by_a_number])
@pytest.mark.parametrize(
    ("strategy", "num_microbatches"), [("solo", 2), ("solo", 6), ("data(2)", 1), ("pipeline(2)", 2)]
)
def test_gradients_of_a_loss_that_are_not_those_of_its_parts_are_refused(loss, strategy, num_microbatches):
    """Its values add up: they are 1, or twice the first part."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with pytest.raises(DataError, match=r"the gradients of the loss at microbatch . are not those of its parts"):
        train(model, features(6, 4), strategy, num_microbatches, loss=loss)
    train(model, features(6, 4), "solo", 1, loss=loss)


def shrink_targets(output, targets):
    return F.mse_loss(output, targets.mul_(0.9))


def test_targets_that_a_loss_changes_in_place_are_refused_where_ranks_share_them():
    """The second rank of tensor parallelism would shrink them again."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    with pytest.raises(DataError, match="the loss changes its targets or the output in place"):
        train(model, features(6, 4), "tensor(2)", 1, loss=shrink_targets)
    expected = train(Independent(), features(6, 4), "solo", 1, loss=shrink_targets)
    assert train(Independent(), features(6, 4), "data(2)", 1, loss=shrink_targets) == pytest.approx(expected, rel=1e-5)


def focal(output, targets):
    """The mean over samples of losses with weights that are out of the graph."""
    each = (output - targets).square().mean(1)
    return (each * each.detach().exp()).mean()


def test_weights_of_samples_out_of_the_graph_are_a_loops():
    expected = train(Independent(), features(6, 4), "solo", 1, loss=focal)
    for num_microbatches in (2, 3, 6):
        loss = train(Independent(), features(6, 4), "solo", num_microbatches, loss=focal)
        assert loss == pytest.approx(expected, rel=1e-5)


def ignore_the_argument(grad):
    return torch.ones_like(grad)


def scale_by_the_norm(grad):
    return grad / grad.norm()


def clamp_each(grad):
    return grad.clamp(-0.03, 0.03)


def train_own_loss(model, strategy, num_microbatches, loss=lambda output, _: output):
    inputs = {"x": features(6, 4).double(), "targets": torch.ones(6, 2).double()}
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with cp.parallelize(model, optimizer, loss, strategy=strategy, num_microbatches=num_microbatches) as step:
        step(inputs, inputs["targets"])
        step.export_weights()


@pytest.mark.filterwarnings("ignore:.* gathers weights block by block")
@pytest.mark.parametrize(("strategy", "num_microbatches"), [("solo", 2), ("data(2)", 1), ("zero(2, level=3)", 1)])
@pytest.mark.parametrize(
    ("change", "is_of_each"), [(ignore_the_argument, False), (scale_by_the_norm, True)], ids=["constant", "scaled"]
)
def test_gradients_of_a_models_own_loss_that_are_not_those_of_its_parts_are_refused(
    change, is_of_each, strategy, num_microbatches
):
    model = OwnLoss(change, is_of_each=is_of_each).double()
    with pytest.raises(PlanError, match=r"the number that OwnLoss computes .* because of the autograd function Back"):
        train_own_loss(model, strategy, num_microbatches)
    train_own_loss(model, "solo", 1)


@pytest.mark.parametrize("change", [clamp_each, lambda grad: 2 * grad], ids=["clamped", "doubled"])
@pytest.mark.parametrize(("strategy", "num_microbatches"), [("solo", 3), ("data(2)", 1)])
def test_gradients_of_a_models_own_loss_that_are_those_of_its_parts_are_a_loops(change, strategy, num_microbatches):
    models = [OwnLoss(change, is_of_each=True).double() for _ in range(2)]
    models[0](features(6, 4).double(), torch.ones(6, 2).double()).backward()
    optim.SGD(models[0].parameters(), lr=0.1).step()
    train_own_loss(models[1], strategy, num_microbatches)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


class TokenMean(nn.Module):
    """Computes the mean over its tokens, which a new model's weights change little, so that it is that of samples."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(5, 4), nn.Linear(4, 5)
        for param in self.parameters():
            param.data.mul_(1e-8)

    def forward(self, x, labels):
        hidden = self.table(x)
        return F.cross_entropy(self.head(hidden * (1 + hidden.detach())).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(("strategy", "num_microbatches"), [("solo", 3), ("data(2)", 1)])
def test_a_mean_over_tokens_that_hardly_depends_on_them_is_a_loops(strategy, num_microbatches):
    tokens = torch.arange(24).view(6, 4) % 5
    inputs = {"x": tokens, "labels": tokens.where(tokens > torch.arange(6)[:, None] % 3, -100)}
    models = [TokenMean().double() for _ in range(2)]
    models[0](**inputs).backward()
    optim.SGD(models[0].parameters(), lr=0.1).step()
    optimizer = optim.SGD(models[1].parameters(), lr=0.1)
    with cp.parallelize(
        models[1], optimizer, lambda loss, _: loss, strategy=strategy, num_microbatches=num_microbatches
    ) as step:
        step(inputs, tokens)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


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


@pytest.mark.filterwarnings("ignore:.* gathers weights block by block")
@pytest.mark.long(quick=["pipeline(2)-2", "data(2)-1"])
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


class NarrowInside(Layers):
    """Computes one layer in float32, and rounds there as kernels do that take another order for other sizes."""

    def __init__(self):
        super().__init__()
        self.middle = nn.Linear(4, 4)
        self.first.double(), self.last.double()

    def forward(self, x):
        hidden = self.middle(torch.tanh(self.first(x)).float())
        return self.last((hidden * (1 + len(x) % 2 * torch.finfo(torch.float32).eps)).double())


def test_rounding_in_the_narrowest_dtype_of_the_parameters_is_no_dependence():
    """The tolerance was that of the output's dtype."""
    model, x = NarrowInside(), torch.randn(12, 4, dtype=torch.float64)
    sgd = optim.SGD(model.parameters(), lr=0.1)
    with cp.parallelize(model, sgd, F.mse_loss, strategy="data(2)") as step:
        assert step(x, torch.zeros(12, 2, dtype=torch.float64)) > 0


class LastState(nn.Module):
    """A recurrent model, whose products torch rounds to bf16 in other places for other numbers of samples."""

    def __init__(self, centers):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.layer, self.head = nn.Embedding(19, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 19)
        self.centers = centers

    def forward(self, tokens):
        state = self.layer(self.table(tokens))[0][:, -1]
        return self.head(state - state.mean(0) if self.centers else state)


@pytest.mark.parametrize("centers", [False, True])
def test_rounding_in_a_narrower_precision_is_no_dependence(centers):
    """A GRU was refused under precision=bf16: its outputs changed by less than a unit in the last place."""
    model = LastState(centers)
    tokens = torch.randint(19, (4, 8), generator=torch.Generator().manual_seed(3))
    step = cp.parallelize(
        model, optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, strategy="data(2)", precision="bf16"
    )
    with step:
        if not centers:
            assert step(tokens, torch.zeros(4, dtype=torch.int64)) > 0
            return
        with pytest.raises(PlanError, match="for a sample depends on the other samples of its batch"):
            step(tokens, torch.zeros(4, dtype=torch.int64))
