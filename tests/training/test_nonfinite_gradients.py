"""A gradient that is not finite, planted in one microbatch: found in that step with its place, and never applied."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp
from counterpoint.testing.parity_models import plan_for
from tests.covering import each_value_once
from tests.training.trainers import build_seeded, equal_bits, list_rank_threads, state_of

MARK = 777.0  # an input that makes a gradient not finite
PLANS = [  # tensor parallelism traces models, which refuses the poison: see test_input_errors.py
    "solo", "data(2)", "zero(2, level=1)", "zero(2, level=2)", "zero(2, level=3)", "pipeline(2)",
    "pipeline(2, schedule=one_f_one_b)", "pipeline(2, schedule=zero_bubble)", "pipeline(2)*data(2)", "server(2)",
    "easgd(2)",
]  # fmt: skip


class WeightGradPoison(torch.autograd.Function):
    """Returns a weight; one element of its gradient is ``value`` if the batch has a marked sample."""

    @staticmethod
    def forward(ctx, weight, x, value):
        ctx.value = value
        ctx.save_for_backward((x == MARK).any())
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad):
        (has_mark,) = ctx.saved_tensors
        grad = grad.clone()
        grad[0, -1] = torch.where(has_mark, ctx.value, grad[0, -1])
        return grad, None, None


class ActivationGradPoison(torch.autograd.Function):
    """Returns its input; one element of the gradient is ``value`` if the batch has a marked sample."""

    @staticmethod
    def forward(ctx, x, source, value):
        ctx.value = value if (source == MARK).any() else None
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        if ctx.value is not None:
            grad[0, 0] = ctx.value
        return grad, None, None


class PoisonedLinear(nn.Linear):
    """A layer whose weight has a gradient that is not finite, in microbatches with a marked sample."""

    def __init__(self, inputs, outputs, value):
        super().__init__(inputs, outputs, bias=False)
        self.value = value

    def forward(self, x):
        is_marked = (x == MARK).any(1, keepdim=True)
        output = F.linear(torch.where(x == MARK, 1.0, x), WeightGradPoison.apply(self.weight, x, self.value))
        return torch.cat([output[:, :-1], torch.where(is_marked, MARK, output[:, -1:])], 1)


class Unmark(nn.Module):
    """Replaces marks, so that the loss is finite."""

    def forward(self, x):
        return torch.where(x == MARK, 0.5, x)


def planted(value=float("nan")):
    """Both layers pass the mark on; each has a poisoned weight, the second on the last stage of a pipeline."""
    return build_seeded(
        lambda: nn.Sequential(PoisonedLinear(6, 8, value), PoisonedLinear(8, 8, value), Unmark(), nn.Linear(8, 3))
    )


def marked_data(step, sample, batch_size=12, num_batches=3):
    """Return batches; one sample of one step's batch is marked."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(batch_size * num_batches, 6, generator=generator, dtype=torch.float64)
    inputs[step * batch_size + sample, -1] = MARK
    targets = torch.randint(0, 3, (len(inputs),), generator=generator)
    return list(zip(inputs.split(batch_size), targets.split(batch_size), strict=True))


def train(model, strategy, batches, loss=F.cross_entropy, **options):
    """Take a step on each batch, of four microbatches in all; the model has the trained weights afterwards."""
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    plan = plan_for(strategy, 4)
    with cp.parallelize(model, optimizer, loss, strategy=plan, **options) as step:
        losses = [step(*batch) for batch in batches]
    return losses, state_of(model)


@pytest.mark.long(quick=["pipeline(2, schedule=one_f_one_b)-nan"])
@pytest.mark.parametrize(("strategy", "value"), each_value_once(PLANS, [float("nan"), float("inf")]), ids=str)
def test_the_gradient_is_named_in_its_step_and_nothing_is_applied(strategy, value):
    model, data = planted(value), marked_data(step=1, sample=7)
    _, expected = train(planted(value), strategy, data[:1])
    with pytest.raises(cp.DataError) as caught:
        train(model, strategy, data)
    assert re.search(
        r"step 1 cannot be applied: the gradient of [01].weight in microbatch [0-3] on rank \d is not finite",
        str(caught.value),
    )
    assert equal_bits(state_of(model), expected)
    assert list_rank_threads() == []


@pytest.mark.parametrize(
    ("strategy", "sample", "text"),
    [
        ("solo", 7, "in microbatch 2 on rank 0"),
        ("data(2)", 0, "in microbatch 0 on rank 0"),
        ("data(2)", 7, "in microbatch 2 on rank 1"),
        ("zero(2, level=3)", 11, "in microbatch 3 on rank 1"),
        ("pipeline(2)", 4, r"of [01].weight in microbatch 1 on rank [01]"),
        ("gpipe(2)", 4, r"of [01].weight in microbatch 1 on rank [01]"),
        ("pipeline(2, schedule=zero_bubble)", 4, r"of [01].weight in microbatch 1 on rank [01]"),
        ("pipeline(2)*data(2)", 10, r"of [01].weight in microbatch 3 on rank \d"),
    ],
)
def test_rank_and_microbatch_are_those_of_the_sample(strategy, sample, text):
    with pytest.raises(cp.DataError, match=text):
        train(planted(), strategy, marked_data(step=0, sample=sample))


@pytest.mark.parametrize("strategy", ["server(2, consistency=asp)", "pipeline(2, schedule=pipedream)"])
def test_an_asynchronous_plan_names_the_gradient_or_applies_none_of_it(strategy):
    """Each worker, and each stage, skips what is its own."""
    data = marked_data(step=1, sample=7)
    with pytest.raises(cp.DataError, match=r"the gradient of [01].weight in microbatch \d (of batch 1 )?on rank \d is"):
        train(planted(), strategy, data)
    _, state = train(planted(), strategy, data, nonfinite="skip")
    assert all(bool(value.isfinite().all()) for value in state.values())


@pytest.mark.long(quick=["data(2)", "zero(2, level=1)", "pipeline(2, schedule=zero_bubble)", "easgd(2)"])
@pytest.mark.parametrize("strategy", PLANS)
def test_a_skipped_step_leaves_every_bit(strategy):
    data = marked_data(step=1, sample=2)
    losses, skipped = train(planted(), strategy, data[:2], nonfinite="skip")
    _, expected = train(planted(), strategy, data[:1])
    assert all(map(math.isfinite, losses))
    assert equal_bits(skipped, expected)


class LargePoisoned(nn.Module):
    """A large layer, whose gradient is a product that is written in place, below a poisoned activation."""

    def __init__(self, value):
        super().__init__()
        self.large, self.head, self.value = nn.Linear(256, 256), nn.Linear(256, 3), value

    def forward(self, x):
        return self.head(ActivationGradPoison.apply(self.large(x), x, self.value))


@pytest.mark.parametrize("strategy", ["solo", "data(2)", "zero(2, level=2)"])
@pytest.mark.parametrize(("value", "dtype"), [(float("nan"), torch.float64), (1e38, torch.float32)])
def test_a_product_is_checked_by_its_factors(strategy, value, dtype):
    """A product of finite factors may itself be infinite."""
    model = build_seeded(lambda: LargePoisoned(value)).to(dtype)
    inputs = torch.full((12, 256), 100.0, dtype=dtype)
    inputs[3, 0] = MARK
    data = [(inputs, torch.zeros(12, dtype=torch.int64))]
    with pytest.raises(cp.DataError, match=r"the gradient of large.(weight|bias) in microbatch 1 on rank 0 is not"):
        train(model, strategy, data)


@pytest.mark.parametrize("strategy", ["solo", "data(2)", "zero(2, level=2)", "server(2)"])
def test_a_sum_of_finite_gradients_that_is_infinite_is_found(strategy):
    """Each microbatch has a gradient of 0.4 times the largest number."""

    model = build_seeded(lambda: nn.Sequential(nn.Linear(6, 3, bias=False))).float()
    data = [(torch.ones(12, 6), torch.zeros(12, dtype=torch.int64))]
    one_grad = strategy == "solo"  # to which autograd adds all microbatches
    text = (
        "the gradient of 0.weight in microbatch 2 on rank 0 is not" if one_grad else "the sum of gradients over micro"
    )
    with pytest.raises(cp.DataError, match=text):
        train(model, strategy, data, loss=lambda output, _: Huge.apply(output))


class Huge(torch.autograd.Function):
    """A loss of 1, whose gradient is so large that four of them have an infinite sum."""

    @staticmethod
    def forward(ctx, output):
        ctx.shape = output.shape
        return output.new_ones(())

    @staticmethod
    def backward(ctx, grad):
        num_samples = ctx.shape[0]
        return grad.new_full(ctx.shape, 0.4 * torch.finfo(torch.float32).max / num_samples) * grad * 4


def test_losses_alone_are_checked_if_asked():
    _, state = train(planted(), "data(2)", marked_data(step=0, sample=1)[:1], check_finite="loss")
    assert any(bool(value.isnan().any()) for value in state.values())


class MaskedSquareRoot(nn.Module):
    """Its output is finite for samples of zeros, too, but the gradient of its input is not."""

    def forward(self, x):
        is_marked = (x[:, :1] == 0).expand_as(x)
        return torch.where(is_marked, 0.0, x.clamp_min(0).sqrt())


@pytest.mark.parametrize("strategy", ["solo", "data(2)", "zero(2, level=2)", "pipeline(2)", "gpipe(2)"])
@pytest.mark.parametrize("sample", [1, 7, 10])
def test_the_microbatch_that_makes_a_large_product_bad_is_named(strategy, sample):
    """Its gradient is read whole only after the last microbatch."""
    model = build_seeded(
        lambda: nn.Sequential(nn.Linear(160, 160, bias=False), MaskedSquareRoot(), nn.Linear(160, 3), nn.Linear(3, 3))
    )
    inputs, targets = torch.randn(12, 160, dtype=torch.float64), torch.arange(12) % 3
    inputs[sample] = 0.0
    with pytest.raises(cp.DataError, match=rf"the gradient of 0.weight in microbatch {sample // 3} on rank"):
        train(model, strategy, [(inputs, targets)])
