"""LARS and LAMB do what their papers say, step by step, and refuse what makes no sense."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from counterpoint.errors import DataError, PlanError
from counterpoint.optim.lamb import LAMB
from counterpoint.optim.lars import LARS
from tests.references.large_batches import FREE, lamb, lars

LARS_OPTIONS: dict[str, Any] = {"lr": 0.4, "momentum": 0.9, "weight_decay": 0.1, "trust_coefficient": 0.02, "eps": 1e-3}
LAMB_OPTIONS: dict[str, Any] = {"lr": 0.4, "eps": 1e-3, "weight_decay": 0.1}
SHAPES = ((3, 4), (5,), (2, 3, 2), ())


def values(dtype=torch.float64):
    draw = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in SHAPES]


def slopes(step):
    draw = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in SHAPES]


def trained(make, num_steps=6, dtype=torch.float64):
    params = [nn.Parameter(value) for value in values(dtype)]
    optimizer = make(params)
    for step in range(num_steps):
        for param, slope in zip(params, slopes(step), strict=True):
            param.grad = slope.to(dtype)
        optimizer.step()
    return params


def expected(rule, options, is_excluded, num_steps=6):
    weights = values()
    states: list[dict[str, Any]] = [{} for _ in SHAPES]
    for step in range(num_steps):
        weights = [
            rule(weight, slope, state, {**options, "excluded": is_excluded(weight)})
            for weight, slope, state in zip(weights, slopes(step), states, strict=True)
        ]
    return weights


def is_vector(weight):
    return weight.dim() <= 1


def off(params, weights):
    return max(
        float((mine.detach().double() - theirs.detach()).abs().max())
        for mine, theirs in zip(params, weights, strict=True)
    )


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lars_is_algorithm_1_of_its_paper(nesterov, decay):
    options = {**LARS_OPTIONS, "weight_decay": decay, "nesterov": nesterov}
    assert off(trained(partial(LARS, **options)), expected(lars, options, is_vector)) < 1e-13


@pytest.mark.parametrize("correction", [False, True])
@pytest.mark.parametrize("clamp", [None, (0.5, 1.5)])
def test_lamb_is_algorithm_2_of_its_paper(correction, clamp):
    bounds = FREE if clamp is None else {"least": clamp[0], "most": clamp[1]}
    options = {**LAMB_OPTIONS, **bounds, "beta1": 0.8, "beta2": 0.95, "bias_correction": correction}
    make = partial(LAMB, **LAMB_OPTIONS, betas=(0.8, 0.95), bias_correction=correction, clamp=clamp)
    assert off(trained(make), expected(lamb, options, is_vector)) < 1e-13


@pytest.mark.parametrize(("exclude", "rule"), [("nothing", lambda _: False), ("everything", lambda _: True)])
def test_what_is_excluded_is_a_rule_or_a_group(exclude, rule):
    options = {**LARS_OPTIONS, "nesterov": False}
    result = trained(partial(LARS, **options, exclude=exclude))
    assert off(result, expected(lars, options, rule)) < 1e-13
    grouped = trained(lambda params: LARS([{"params": params, "exclude": exclude}], **options))
    assert off(result, grouped) == 0


def test_excluded_lamb_without_decay_is_adam():
    theirs = trained(partial(torch.optim.Adam, lr=0.01))
    assert off(trained(partial(LAMB, lr=0.01, eps=1e-8, exclude="everything")), theirs) < 1e-13


@pytest.mark.parametrize("make", [partial(LARS, lr=0.1), partial(LAMB, lr=0.1)], ids=["LARS", "LAMB"])
def test_weights_of_zero_move_all_the_same(make):
    weight = nn.Parameter(torch.zeros(2, 2))
    weight.grad = torch.ones(2, 2)
    make([weight]).step()
    assert torch.allclose(weight, torch.full((2, 2), -0.1))


@pytest.mark.parametrize("make", [partial(LARS, lr=0.1), partial(LAMB, lr=0.1)], ids=["LARS", "LAMB"])
def test_a_parameter_without_a_gradient_stays_and_counts_no_step(make):
    used, unused = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    optimizer = make([used, unused])
    used.grad = torch.ones(2, 2)
    optimizer.step()
    assert torch.equal(unused, torch.ones(2, 2))
    assert list(optimizer.state) == [used]


@pytest.mark.parametrize("make", [partial(LARS, lr=1.0), partial(LAMB, lr=0.1)], ids=["LARS", "LAMB"])
def test_norms_of_half_precision_do_not_overflow(make):
    """Their squares are beyond float16: a norm of 0 or inf would leave the weights or destroy them."""
    weight = nn.Parameter(torch.full((64, 64), 300.0, dtype=torch.float16))
    weight.grad = torch.full((64, 64), 300.0, dtype=torch.float16)
    make([weight]).step()
    assert bool((weight < 300).all())
    assert bool(weight.isfinite().all())


def test_a_closure_is_called_with_gradients_on():
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = LARS([weight], lr=0.1)

    def closure():
        loss = weight.sum()
        loss.backward()
        return float(loss.detach())

    assert optimizer.step(closure) == 4.0
    assert not torch.equal(weight, torch.ones(2, 2))


def test_a_sparse_gradient_is_refused_because_norms_are_of_whole_parameters():
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(DataError, match=r"^the gradient of a parameter \(4, 2\) is sparse, but LARS needs the norm"):
        LARS(table.parameters(), lr=0.1).step()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (partial(LARS, lr=-1.0), r"^lr=-1.0 is out of range; give a finite number, 0 or more$"),
        (partial(LARS, lr=0.1, momentum=1.0), r"^momentum=1.0 is not a decay factor; give a number from 0 to below 1"),
        (partial(LARS, lr=0.1, trust_coefficient=float("nan")), r"^trust_coefficient=nan is out of range"),
        (lambda params: LARS([{"params": params, "exclude": "vector"}], lr=0.1), r"^exclude='vector' is not one of ve"),
        (partial(LAMB, lr=float("inf")), r"^lr=inf is out of range"),
        (partial(LAMB, lr=0.1, betas=(0.9, 1.0)), r"^beta2=1.0 is not a decay factor"),
        (partial(LAMB, lr=0.1, clamp=(2.0, 1.0)), r"^clamp=\(2\.0, 1\.0\) is not a range; give the minimum and"),
    ],
)  # fmt: skip
def test_an_option_that_makes_no_sense_is_refused(make, text):
    with pytest.raises(PlanError, match=text):
        make([nn.Parameter(torch.ones(2))])


def test_an_earlier_parameter_is_refused_with_its_present_name():
    former: Any = {"trust": 0.1}
    with pytest.raises(PlanError, match=r"^LARS has no parameter trust; trust is now called trust_coefficient$"):
        LARS([torch.zeros(1)], lr=0.1, **former)
