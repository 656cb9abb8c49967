"""Losses that are means over tokens or weights: every plan trains on the mean over the whole batch, as a plain loop does."""

import itertools
import math
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp
from counterpoint.errors import DataError
from tests.covering import each_value_once
from tests.training.trainers import max_difference, params_of

CLASSES, LENGTH, SAMPLES = 7, 5, 12
PLANS = [
    ("solo", 1), ("solo", 4), ("data(2)", None), ("data(4)", None), ("data(2)", 2), ("data(2, update=sharded)", 2),
    ("zero1(2)", 2), ("zero2(2)", None), ("zero3(2)", 2), ("tree(2)", None), ("pipeline(2)", 4),
    ("gpipe(2)", 3), ("pipeline(2) * data(2)", 2), ("pipeline(2) * zero3(2)", 2), ("server(2, consistency=bsp)", None),
]  # fmt: skip


class Tagger(nn.Module):
    """A class for every token."""

    def __init__(self, width=8):
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(CLASSES, width), nn.Linear(width, width), nn.Tanh())
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens):
        return self.head(self.layers(tokens)).transpose(1, 2)


def batches(count=3):
    """Sample i has i tokens that count, from 0 on, so that no two microbatches have as many."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        tokens, targets = torch.randint(CLASSES, (2, SAMPLES, LENGTH), generator=generator)
        for sample in range(SAMPLES):
            targets[sample, sample % (LENGTH + 1) :] = -100
        yield tokens, targets


def build():
    torch.manual_seed(0)
    return Tagger().double()


WEIGHTS = torch.linspace(0.5, 2.0, CLASSES, dtype=torch.float64)


def masked_mean(output, targets):
    mask = targets != -100
    losses = F.cross_entropy(output, targets.clamp(min=0), reduction="none")
    return cp.WeightedMean((losses * mask).sum(), mask.sum())


LOSSES = {
    "cross_entropy": F.cross_entropy,
    "module": nn.CrossEntropyLoss(),
    "class_weights": nn.CrossEntropyLoss(weight=WEIGHTS),
    "smoothing": nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1, ignore_index=3),
    "nll": lambda output, targets: F.nll_loss(F.log_softmax(output, 1), targets),
    "weighted_mean": masked_mean,
}


def plain_value(loss):
    return loss.total / loss.weight if isinstance(loss, cp.WeightedMean) else loss


def train_plain(loss, clip=None):
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for tokens, targets in batches():
        optimizer.zero_grad()
        value = plain_value(loss(model(tokens), prepared(loss, targets)))
        value.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(value.item())
    return losses, params_of(model)


def prepared(loss, targets):
    """Without -100 where 3 is what is ignored."""
    return targets.where(targets >= 0, 3) if loss is LOSSES["smoothing"] else targets


def train(loss, plan, num_microbatches, **options):
    model = build()
    with cp.parallelize(
        model, torch.optim.AdamW(model.parameters(), lr=0.01), loss, strategy=plan, num_microbatches=num_microbatches,
        **options,
    ) as step:  # fmt: skip
        losses = [step(tokens, prepared(loss, targets)) for tokens, targets in batches()]
    return losses, params_of(model)


@pytest.mark.long(quick=["module-('zero2(2)', None)"])
@pytest.mark.parametrize(("name", "row"), each_value_once([*LOSSES], PLANS), ids=str)
def test_every_plan_trains_on_the_mean_over_all_tokens_of_the_batch(name, row):
    plan, num_microbatches = row
    expected_losses, expected = train_plain(LOSSES[name])
    losses, params = train(LOSSES[name], plan, num_microbatches)
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    assert max_difference(params, expected) < 1e-12


@pytest.mark.long(quick=["zero3(2)", "solo"])
@pytest.mark.parametrize("plan", ["solo", "data(2)", "zero3(2)", "pipeline(2)"])
def test_the_norm_that_is_clipped_is_that_of_the_mean_over_tokens(plan):
    expected_losses, expected = train_plain(F.cross_entropy, clip=0.05)
    losses, params = train(F.cross_entropy, plan, 2, clip_norm=0.05)
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    assert max_difference(params, expected) < 1e-12


@pytest.mark.parametrize("plan", ["solo", "data(2)", "pipeline(2)"])
def test_a_batch_without_any_token_is_refused_or_skipped(plan):
    tokens, targets = next(batches())
    model = build()
    before = params_of(model)
    with (
        cp.parallelize(
            model, torch.optim.SGD(model.parameters(), lr=1.0), F.cross_entropy, strategy=plan, num_microbatches=2
        ) as step,
        pytest.raises(DataError, match="no target of the batch counts in its loss"),
    ):
        step(tokens, torch.full_like(targets, -100))
    assert max_difference(params_of(model), before) == 0
    with cp.parallelize(
        model, torch.optim.SGD(model.parameters(), lr=1.0), F.cross_entropy, strategy=plan, num_microbatches=2,
        nonfinite="skip",
    ) as step:  # fmt: skip
        assert math.isnan(step(tokens, torch.full_like(targets, -100)))
    assert max_difference(params_of(model), before) == 0


def test_a_loss_that_is_computed_from_a_mean_over_tokens_is_refused_with_several_microbatches():
    with pytest.raises(DataError, match=r"return that mean\s+itself, or cp.WeightedMean\(total, weight\)"):
        train(lambda output, targets: 0.5 * F.cross_entropy(output, targets), "solo", 2)
    losses, _ = train(lambda output, targets: 0.5 * F.cross_entropy(output, targets), "solo", 1)
    expected, _ = train_plain(lambda output, targets: 0.5 * F.cross_entropy(output, targets))
    assert losses == pytest.approx(expected, rel=1e-12)


def test_what_a_mean_is_computed_from_may_weigh_equally():
    def loss(output, targets):
        return 0.5 * F.cross_entropy(output, targets.clamp(min=0))

    expected_losses, expected = train_plain(loss)
    losses, params = train(loss, "data(2)", 2)
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    assert max_difference(params, expected) < 1e-12


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda output, targets: cp.WeightedMean(output.sum(), -1), "the weight of the WeightedMean .* is -1.0"),
        (lambda output, targets: cp.WeightedMean(output.sum(), math.nan), "the weight of the WeightedMean .* is nan"),
        (
            lambda output, targets: cp.WeightedMean(output.sum(), 0),
            r"has the total .* and the weight 0, so it is not a mean",
        ),
        (lambda output, targets: cp.WeightedMean(output, 1), r"the total of the WeightedMean .* has the shape \(6, 7"),
        (
            lambda output, targets: cp.WeightedMean(output.sum(), cast("Any", "2")),
            "the weight of the WeightedMean .* is '2'",
        ),
        (lambda output, targets: cp.WeightedMean(cast("Any", 3.0), 2), "the total of the WeightedMean .* is 3.0"),
    ],
)
def test_a_weighted_mean_of_what_is_no_number_is_refused(loss, message):
    with pytest.raises(DataError, match=message):
        train(loss, "solo", 2)


def test_means_over_samples_and_weighted_means_have_no_common_mean():
    def loss(output, targets):
        mean = F.cross_entropy(output, targets.clamp(min=0))
        return cp.WeightedMean(mean, 1) if (targets[0] == -100).all() else mean.clone()

    with pytest.raises(DataError, match="some microbatches are means over samples, those of others weighted means"):
        train(loss, "solo", 4)


class WithLoss(nn.Module):
    """A model that computes its loss itself, as those of transformers do."""

    def __init__(self):
        super().__init__()
        self.tagger = Tagger()

    def forward(self, tokens, labels):
        output = self.tagger(tokens)
        return {"loss": F.cross_entropy(output, labels), "output": output}


@pytest.mark.parametrize("plan", [("solo", 4), ("data(2)", 2), ("zero2(2)", 2), ("server(2, consistency=bsp)", None)])
def test_a_loss_that_the_model_computes_is_the_mean_over_all_tokens_too(plan):
    expected_losses, expected = train_plain(F.cross_entropy)
    torch.manual_seed(0)
    model = WithLoss().double()
    with cp.parallelize(
        model, torch.optim.AdamW(model.parameters(), lr=0.01), lambda output, _: output["loss"], strategy=plan[0],
        num_microbatches=plan[1],
    ) as step:  # fmt: skip
        losses = [step((tokens, targets), targets) for tokens, targets in batches()]
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    params = {name.removeprefix("tagger."): value for name, value in params_of(model).items()}
    assert max_difference(params, expected) < 1e-12


def summed(output, targets):
    return F.cross_entropy(output, targets, reduction="sum")


@pytest.mark.long(quick=["data(4)-None", "zero1(2)-2", "tree(2)-None", "gpipe(2)-3"])
@pytest.mark.parametrize(("plan", "num_microbatches"), [*PLANS, ("tensor(2)", 2), ("tensor(2) * data(2)", 1)], ids=str)
def test_a_declared_sum_is_the_sum_over_the_batch_under_every_plan(plan, num_microbatches):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    expected_losses = []
    for tokens, targets in batches():
        optimizer.zero_grad()
        value = summed(model(tokens), targets)
        value.backward()
        optimizer.step()
        expected_losses.append(value.item())
    other = build()
    with cp.parallelize(
        other, torch.optim.SGD(other.parameters(), lr=0.001), summed, strategy=plan, num_microbatches=num_microbatches,
        loss_reduction="sum",
    ) as step:  # fmt: skip
        losses = [step(tokens, targets) for tokens, targets in batches()]
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    assert max_difference(params_of(other), params_of(model)) < 1e-12


def masked_scalar(output, targets):
    loss = masked_mean(output, targets)
    return loss.total / loss.weight


def contrastive(output, targets):
    embedding = output.mean(2)
    return F.cross_entropy(embedding @ embedding.T, torch.arange(len(embedding)))


@pytest.mark.parametrize("plan", ["solo", "data(2)", "zero3(2)", "pipeline(2)", "server(2, consistency=bsp)"])
@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (summed, "it is a sum: pass loss_reduction='sum'"),
        (masked_scalar, r"if it is a mean over tokens, .* return cp.WeightedMean\(total, weight\)"),
        (contrastive, "if it compares samples with each other, pass loss_reduction=.batch."),
    ],
)
def test_a_loss_that_does_not_add_up_is_refused_in_the_first_step(loss, message, plan):
    with pytest.raises(DataError, match=message):
        train(loss, plan, 2)


@pytest.mark.parametrize("loss", [summed, masked_scalar, contrastive])
def test_losses_of_single_samples_are_compared_with_that_of_two(loss):
    with pytest.raises(DataError, match="of parts do not add up to that of the batch"):
        train(loss, "solo", SAMPLES)


@pytest.mark.long(quick=["pipeline(2)-2"])
@pytest.mark.parametrize(
    ("plan", "num_microbatches"), [("solo", 2), ("data(2)", 2), ("pipeline(2)", 2), ("solo", SAMPLES)], ids=str
)
def test_a_mean_over_tokens_is_refused_in_the_step_with_the_first_padding(plan, num_microbatches):
    """The loss was looked at after 1, 2, 4, 8, ... steps alone."""
    model, plain = build(), []
    with cp.parallelize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), masked_scalar, strategy=plan,
        num_microbatches=num_microbatches,
    ) as step:  # fmt: skip
        for number, (tokens, targets) in enumerate(batches(7)):
            if number == 6:
                with pytest.raises(DataError, match=r"if it is a mean over tokens, .* return cp.WeightedMean"):
                    step(tokens, targets)
            else:
                plain.append(step(tokens, targets.clamp(min=0)))
    assert len(plain) == 6


@pytest.mark.long(quick=["masked_mean"])
@pytest.mark.parametrize("loss", [F.cross_entropy, masked_mean])
def test_losses_of_single_samples_add_up(loss):
    expected_losses, expected = train_plain(loss)
    losses, params = train(loss, "pipeline(2)", SAMPLES)
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    assert max_difference(params, expected) < 1e-12


@pytest.mark.parametrize("loss", [summed, masked_scalar, contrastive])
def test_any_loss_of_one_microbatch_is_that_of_a_plain_loop(loss):
    expected_losses, expected = train_plain(loss)
    losses, params = train(loss, "solo", 1)
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    assert max_difference(params, expected) < 1e-12


def test_microbatches_may_be_batches_of_their_own():
    losses, _ = train(contrastive, "solo", 2, cross_sample="accept")
    assert len(losses) == 3


def test_a_loss_that_draws_or_counts_is_not_compared_with_its_halves():
    calls = itertools.count()  # which no check can restore

    def noisy(output, targets):
        next(calls)
        return F.cross_entropy(output + torch.randn_like(output), targets.clamp(min=0)).clone()

    losses, _ = train(noisy, "solo", 2)
    assert len(losses) == 3
    # again in steps 0, 1 and 2: twice to find a state, twice to see what it draws; and once to see its gradients
    assert next(calls) == 2 * 3 + 3 * 4 + 1


def test_one_training_step_late_takes_the_weights_of_its_own_step():
    """Gradients that are applied one step late are those of the mean over the tokens of the step they were computed in."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    delayed = None
    for tokens, targets in batches(4):
        optimizer.zero_grad()
        F.cross_entropy(model(tokens), targets).backward()
        now = [param.grad.clone() for param in model.parameters()]
        if delayed is not None:
            for param, grad in zip(model.parameters(), delayed, strict=True):
                param.grad = grad
            optimizer.step()
        delayed = now
    other = build()
    with cp.parallelize(
        other, torch.optim.SGD(other.parameters(), lr=0.1), F.cross_entropy, strategy="data(2, staleness=1)"
    ) as step:
        for tokens, targets in batches(4):
            step(tokens, targets)
    assert max_difference(params_of(other), params_of(model)) < 1e-12


def test_a_worker_that_pushes_scales_what_it_pushes():
    """Under asp each worker's part is a batch of its own: with one worker, a plain loop."""
    expected_losses, expected = train_plain(F.cross_entropy)
    losses, params = train(F.cross_entropy, "server(1, consistency=asp)", 3)
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    assert max_difference(params, expected) < 1e-12


@pytest.mark.parametrize("consistency", ["asp", "ssp", "bsp"])
def test_what_a_worker_pushes_is_clipped(consistency):
    expected_losses, expected = train_plain(F.cross_entropy, clip=0.05)
    losses, params = train(F.cross_entropy, f"server(1, consistency={consistency})", 3, clip_norm=0.05)
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    assert max_difference(params, expected) < 1e-12


def other_loss_of_many(output, targets):
    loss = masked_mean(output, targets)
    return cp.WeightedMean(loss.total.sqrt() if len(output) > SAMPLES // 2 else loss.total, loss.weight)


@pytest.mark.parametrize(
    ("plan", "num_microbatches"), [("solo", 2), ("solo", SAMPLES), ("data(2)", None), ("zero3(2)", 2)]
)
def test_a_branch_on_the_number_of_samples_is_refused_if_microbatches_and_the_batch_differ(plan, num_microbatches):
    """Halves of a microbatch took the same side as the microbatch."""
    with pytest.raises(
        DataError, match=r"^the loss depends on the number of samples, .* repeated to the 12 of the batch"
    ):
        train(other_loss_of_many, plan, num_microbatches)


def test_a_loss_of_a_fixed_number_of_samples_is_refused():
    """The check of halves ended with torch's own error."""

    def hardest(output, targets):
        losses = F.cross_entropy(output, targets, reduction="none").mean(1)
        return losses.topk(SAMPLES // 2).values.mean()

    with pytest.raises(
        DataError, match=r"the 6 samples of microbatch 0, but not on parts .* selected index k"
    ) as caught:
        train(hardest, "data(2)", None)
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize(("plan", "num_microbatches"), [("solo", 2), ("solo", SAMPLES), ("pipeline(2)", SAMPLES)])
def test_a_loss_that_differentiates_is_that_of_a_loop(plan, num_microbatches):
    """A microbatch of one sample was compared with an earlier one that had no graph."""

    def penalized(output, targets):
        (slope,) = torch.autograd.grad(output.square().sum(), output, create_graph=True)
        return output.square().mean() + slope.square().mean()

    expected_losses, expected = train(penalized, "solo", 1)
    losses, params = train(penalized, plan, num_microbatches)
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    assert max_difference(params, expected) < 1e-12


def weighted_by_frequency(output, targets):
    """Weigh each class by how many samples of the batch have it; with one sample of each, all weights are equal."""
    classes = (targets[:, 0] > 0).long()
    frequencies = torch.bincount(classes, minlength=CLASSES)
    return F.cross_entropy(output.mean(2), classes, weight=1 / (frequencies.to(output.dtype) + 1))


@pytest.mark.parametrize("num_microbatches", [3, 4, 6, 12])
def test_weights_by_frequency_in_the_batch_are_refused_however_few_samples_a_microbatch_has(num_microbatches):
    """Two samples of two classes have equal weights, and so has one, which was trained without a word."""
    with pytest.raises(DataError, match=r"the losses of parts do not add up|loss depends on the number"):
        train(weighted_by_frequency, "solo", num_microbatches)


def median(output, targets):
    return (output.softmax(1)[:, 0] - targets.clamp(min=0)).abs().mean(1).quantile(0.5)


@pytest.mark.parametrize("num_microbatches", [2, 3, SAMPLES])
def test_a_median_is_refused_however_few_samples_a_microbatch_has(num_microbatches):
    """A median of two samples is their mean, and of one sample its value."""
    with pytest.raises(DataError, match="of parts do not add up to that of the batch"):
        train(median, "solo", num_microbatches)


def test_a_loss_in_float32_of_outputs_in_float64_adds_up_as_float32_does():
    """The numbers of tokens differ, so that sums are rounded in another order."""

    def loss(output, targets):
        return F.cross_entropy(output.float(), targets.clamp(min=0), reduction="none").mean() * 3e3

    losses, _ = train(loss, "solo", 2)
    assert len(losses) == 3


class SquaredError(torch.autograd.Function):
    """Its gradient is multiplied by the one that backward is given, or not."""

    @staticmethod
    def forward(ctx, output, targets, is_scaled):
        ctx.save_for_backward(output - targets)
        ctx.is_scaled = is_scaled
        return (output - targets).square().mean()

    @staticmethod
    def backward(ctx, grad):
        (difference,) = ctx.saved_tensors
        return 2 * difference / difference.numel() * (grad if ctx.is_scaled else 1.0), None, None


def clamped_mse(output, targets):
    output = output.view_as(output)
    if output.requires_grad:
        output.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    return F.mse_loss(output, targets)


@pytest.mark.parametrize(("strategy", "num_microbatches"), [("solo", 2), ("data(2)", 1), ("pipeline(2)", 2)])
@pytest.mark.parametrize(
    ("loss", "code"),
    [
        (lambda output, targets: SquaredError.apply(output, targets, False), "the autograd function SquaredError"),
        (clamped_mse, "a hook on a gradient"),
    ],
    ids=["ignores its argument", "clamps"],
)
def test_a_loss_whose_gradient_does_not_follow_its_factor_is_refused(loss, code, strategy, num_microbatches):
    with pytest.raises(
        DataError, match=f"not twice as large if backward starts from 2 instead of 1, because of {code}"
    ):
        step_once(loss, strategy, num_microbatches)
    assert step_once(loss, "solo", 1) == step_once(loss, "solo", 1)


@pytest.mark.parametrize(("strategy", "num_microbatches"), [("solo", 2), ("data(2)", 1), ("pipeline(2)", 2)])
def test_a_loss_of_an_autograd_function_is_that_of_a_loop(strategy, num_microbatches):
    one, other = (
        step_once(loss, strategy, num_microbatches)
        for loss in (lambda output, targets: SquaredError.apply(output, targets, True), F.mse_loss)
    )
    assert one == pytest.approx(other, rel=1e-12, abs=1e-12)


def step_once(loss, strategy, num_microbatches):
    """Return the weights after a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    inputs, targets = torch.randn(8, 3).double(), torch.randn(8, 2).double()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with cp.parallelize(model, optimizer, loss, strategy=strategy, num_microbatches=num_microbatches) as step:
        step(inputs, targets)
    return [value for param in model.parameters() for value in param.flatten().tolist()]
