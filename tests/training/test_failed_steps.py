"""A step that fails in a custom loop, is caught, and is skipped, as if it had not been there."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import counterpoint as cp
from tests.covering import each_value_once
from tests.training.trainers import ADAMW, dataset, list_rank_threads, max_difference, mlp, params_of

PLANS = [
    "solo", "data(2)", "data(2, staleness=1)", "data(2, update=sharded)", "data(2, compress=topk:0.2)",
    "zero(2, level=3)", "pipeline(2)", "zero_bubble(2)", "pipeline(2, recompute=always) * data(2)", "tensor(2)",
    "server(2)",
]  # fmt: skip


def batches(spoilt=None, at=2, count=5):
    """Batches of 12 samples; one of them makes a loss that is nan, or one that raises."""
    inputs, targets = (values.clone() for values in dataset(12 * count).tensors)
    if spoilt == "nan":
        inputs[12 * at + 11] = torch.nan
    if spoilt == "raises":
        targets[12 * at + 11] = -7
    return list(zip(inputs.split(12), targets.split(12), strict=True))


def strict_loss(outputs, targets):
    if (targets < 0).any():
        raise ValueError("no such class")
    return F.cross_entropy(outputs, targets)


def trained(strategy, result, at=None, fails=None):
    """Return the parameters after a loop that continues after an error."""
    model = mlp()
    with cp.parallelize(model, ADAMW, strict_loss, strategy=strategy, num_microbatches=2) as step:
        for number, batch in enumerate(result):
            if number == at:
                with pytest.raises(fails):
                    step(*batch)
            else:
                step(*batch)
    return params_of(model)


def off(strategy, spoilt, error, at):
    """How far a loop with a step that failed is from one without it."""
    fine = batches()
    expected = trained(strategy, fine[:at] + fine[at + 1 :])
    return max_difference(trained(strategy, batches(spoilt, at), at, error), expected)


@pytest.mark.long(quick=["pipeline(2)-failure12"])
@pytest.mark.parametrize(
    ("strategy", "failure"), each_value_once(PLANS, [("nan", cp.DataError, 2), ("raises", ValueError, 0)])
)
def test_a_failed_step_is_skipped(strategy, failure):
    assert off(strategy, *failure) <= 1e-12


@pytest.mark.long
def test_a_gradient_that_was_set_aside_is_applied_once_whatever_became_of_the_step_between():
    assert off("data(2, staleness=1)", "raises", ValueError, 2) <= 1e-12


@pytest.mark.parametrize("strategy", ["ssp(2, staleness=0)", "ssp(2)", "asp(2)", "easgd(2, alpha=0.5, tau=1)"])
def test_workers_begin_together_after_a_step_that_failed_on_one_of_them(strategy):
    """The other one has been served, and would be ahead for ever."""
    model = mlp()
    start = params_of(model)
    with cp.parallelize(model, ADAMW, strict_loss, strategy=strategy) as step:
        for number, batch in enumerate(batches("nan", 1)):
            if number == 1:
                with pytest.raises(cp.DataError):
                    step(*batch)
            else:
                step(*batch)
    assert max_difference(params_of(model), start) > 1e-3


STREAM = "pipedream(2)"


def test_an_async_pipeline_drops_what_is_under_way_when_a_step_fails_and_continues_as_after_a_flush():
    model, result = mlp(), batches("nan", 1)
    with cp.parallelize(model, ADAMW, strict_loss, strategy=STREAM) as step:
        step(*result[0])
        step(*result[1])
        with pytest.raises(cp.DataError, match="cannot be applied"):
            step(*result[2])
        assert step.flush() == []
        before = params_of(step.export_weights())
        assert all(torch.isfinite(value).all() for value in before.values())
        losses = [step(*batch) for batch in result[3:]]
        assert [loss == loss for loss in losses] == [False, True]
    assert max_difference(params_of(model), before) > 0


def looped(model, strategy):
    """Train until the fourth batch raises."""
    with cp.parallelize(model, ADAMW, strict_loss, strategy=strategy) as step:
        for batch in batches("raises", 3):
            step(*batch)


@pytest.mark.long(quick=["pipedream(2)"])
@pytest.mark.parametrize("strategy", ["pipeline(2)", STREAM])
def test_after_an_error_the_model_has_what_was_learned_before(strategy):
    model = mlp()
    with pytest.raises(ValueError, match="no such class"):
        looped(model, strategy)
    assert max_difference(params_of(model), params_of(mlp())) > 0
    assert list_rank_threads() == []


def test_a_step_is_closed_whatever_happens_while_it_is():
    step = cp.parallelize(mlp(), ADAMW, strict_loss, strategy=STREAM)
    for batch in batches("raises", 1)[:2]:
        step(*batch)
    with pytest.raises(ValueError, match="no such class"):
        step.close()
    assert step.is_closed
    assert list_rank_threads() == []


class Picky(nn.Module):
    """Raises the third time that it is called with samples in a training."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def forward(self, x):
        self.count += self.training
        if self.count > 6:
            raise ValueError("once too often")
        return x


@pytest.mark.parametrize("place", [0, 4])
def test_an_error_of_the_model_is_noted_with_its_batch_whatever_else_is_under_way(place):
    """The first stage is a batch ahead then."""
    model = nn.Sequential(*mlp()[:place], Picky(), *mlp()[place:])
    step = cp.parallelize(model, ADAMW, strict_loss, strategy="pipedream(2, split_points=3)")
    with pytest.raises(ValueError, match="once too often") as caught:
        [step(*batch) for batch in batches() * 4]
    step.close()
    first, second, *_ = caught.value.__notes__
    (number,) = re.findall(r"on microbatch 0 of step (\d+), which has 12 of the batch's 12 samples, ", first)
    assert second == f"in step {number} on rank {int(place > 0)}, microbatch 0"
