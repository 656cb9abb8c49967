"""A fused optimizer step gives the same results as torch's."""

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim

from counterpoint.errors import PlanError
from counterpoint.fabric.shm.native import native
from counterpoint.runtime.params.flat_grads import GradRange
from counterpoint.runtime.params.fused_optimizer import (
    are_contiguous,
    find_fused_groups,
    fused_update,
)

pytestmark = pytest.mark.skipif(native().library is None, reason=f"no native part: {native().reason}")
RULES: dict[str, Any] = {
    "sgd": partial(optim.SGD, lr=0.1),
    "decay": partial(optim.SGD, lr=0.1, weight_decay=0.01),
    "momentum": partial(optim.SGD, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.01),
    "nesterov": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "up": partial(optim.SGD, lr=0.1, momentum=0.5, maximize=True),
    "adam": partial(optim.Adam, lr=0.01, weight_decay=0.1),
    "adamw": partial(optim.AdamW, lr=0.01, weight_decay=0.1),
    "amsgrad": partial(optim.AdamW, lr=0.01, betas=(0.8, 0.9), amsgrad=True, maximize=True),
    "adagrad": partial(optim.Adagrad, lr=0.1, lr_decay=0.1, weight_decay=0.01, initial_accumulator_value=0.5),
}


def take_fused_step(optimizer, sources=None):
    """Step with gradients from sources, and else the tensors' own."""
    groups = find_fused_groups(optimizer)
    assert groups is not None
    fused_update(optimizer, groups, sources or {})


def run_both(rule, dtype, num_parts, num_steps=4):
    """Step with the sum of some gradients by torch and fused; return the weights and optimizers of run_both."""
    draw = torch.Generator().manual_seed(num_parts)
    start = torch.randn(5001, generator=draw, dtype=dtype)
    reference, fused = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    one, other = RULES[rule]([reference]), RULES[rule]([fused])
    for _ in range(num_steps):
        parts = [torch.randn(5001, generator=draw, dtype=dtype) for _ in range(num_parts)]
        reference.grad = sum(parts[1:], parts[0])
        one.step()
        with torch.no_grad():
            sources = {id(fused): lambda *, as_rows, parts=parts: [GradRange(0, fused.numel(), parts)]}
            take_fused_step(other, sources)
    return reference, fused, one, other


@pytest.mark.parametrize("num_parts", [1, 2, 3])
@pytest.mark.parametrize("rule", RULES)
def test_steps_give_the_weights_of_torch(rule, num_parts):
    reference, fused, _, _ = run_both(rule, torch.float64, num_parts)
    assert torch.allclose(fused, reference, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("rule", RULES)
def test_steps_in_float32_are_torchs_within_rounding(rule):
    reference, fused, _, _ = run_both(rule, torch.float32, 2)
    assert torch.allclose(fused, reference, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("rule", RULES)
def test_the_state_is_that_of_torch(rule):
    reference, fused, one, other = run_both(rule, torch.float64, 2)
    expected, result = one.state[reference], other.state[fused]
    assert {key for key, value in expected.items() if value is not None} == result.keys()
    assert all(torch.allclose(result[key], value, rtol=1e-13) for key, value in expected.items() if value is not None)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda weights: optim.RMSprop([weights]),
        lambda weights: optim.SGD([nn.Parameter(weights.detach().bfloat16())], lr=0.1),
        lambda weights: optim.Adam([weights], capturable=True),
        lambda weights: type("Own", (optim.SGD,), {})([weights], lr=0.1),
    ],
    ids=["another rule", "another dtype", "capturable", "a class of the user's"],
)
def test_optimizers_that_may_differ_are_left_to_torch(optimizer):
    assert find_fused_groups(optimizer(nn.Parameter(torch.zeros(3)))) is None


def weights_and_rule(rule="adamw"):
    weights = [nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2)]
    return weights, RULES[rule](weights)


def test_gradients_that_stay_on_their_rank_are_applied_as_torch_applies_them():
    (reference, fused), _ = weights_and_rule()
    one, other = RULES["adamw"]([reference]), RULES["adamw"]([fused])
    reference.grad, fused.grad = torch.arange(3.0).double(), torch.arange(3.0).double()
    one.step()
    take_fused_step(other)
    assert torch.allclose(fused, reference, rtol=1e-13)


def test_a_weight_without_a_gradient_stays_and_has_no_state():
    weights, rule = weights_and_rule()
    weights[0].grad = torch.ones_like(weights[0])
    take_fused_step(rule)
    assert weights[1].equal(torch.ones_like(weights[1]))
    assert weights[1] not in rule.state


@pytest.mark.parametrize("lr", [None, "0.1", [0.1], 1j, math.nan, math.inf, torch.tensor([0.1, 0.2])], ids=str)
@pytest.mark.parametrize("rule", ["momentum", "adamw", "adagrad"])
def test_a_wrong_learning_rate_is_refused_and_changes_nothing(rule, lr):
    weights = [nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2)]
    optimizer = RULES[rule]([{"params": weights[:1]}, {"params": weights[1:]}])
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    take_fused_step(optimizer)
    before = copy.deepcopy((weights, optimizer.state_dict()["state"]))
    optimizer.param_groups[1]["lr"] = lr
    with pytest.raises(PlanError, match="option lr is"):
        take_fused_step(optimizer)
    assert str((weights, optimizer.state_dict()["state"])) == str(before)


def test_autograd_notices_an_update_of_a_saved_weight():
    (weight, _), _ = weights_and_rule()
    x = torch.ones_like(weight).requires_grad_()
    output = (x * weight).sum()
    weight.grad = torch.ones_like(weight)
    take_fused_step(RULES["sgd"]([weight]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()


@pytest.mark.parametrize("rule", ["momentum", "amsgrad", "adagrad"])
def test_the_number_of_threads_changes_no_bit(rule):
    def train(num_threads):
        draw = torch.Generator().manual_seed(0)
        weights = [nn.Parameter(torch.randn(size, generator=draw)) for size in (300_001, 7, 0, 700_000, 2048)]
        optimizer = RULES[rule](weights)
        torch.set_num_threads(num_threads)
        for _ in range(3):
            for weight in weights:
                weight.grad = torch.randn(weight.shape, generator=draw)
            take_fused_step(optimizer)
        return weights

    num_threads = torch.get_num_threads()
    try:
        assert all(one.equal(other) for one, other in zip(train(1), train(3), strict=True))
    finally:
        torch.set_num_threads(num_threads)


def test_tensors_with_different_histories_are_stepped_as_torch_steps_them():
    """One tensor gets its first gradient later, and the group holds two dtypes."""
    draw = torch.Generator().manual_seed(0)
    start = [torch.randn(5, generator=draw, dtype=dtype) for dtype in (torch.float64, torch.float64, torch.float32)]
    for rule in ("momentum", "adamw"):
        references, weights = ([nn.Parameter(tensor.clone()) for tensor in start] for _ in range(2))
        one, other = RULES[rule](references), RULES[rule](weights)
        for step in range(3):
            for index, (reference, weight) in enumerate(zip(references, weights, strict=True)):
                if step or index != 1:
                    reference.grad = torch.randn(5, generator=draw, dtype=weight.dtype)
                    weight.grad = reference.grad.clone()
            one.step()
            take_fused_step(other)
        for reference, weight in zip(references, weights, strict=True):
            assert torch.allclose(weight, reference, rtol=1e-13 if weight.dtype == torch.float64 else 2e-6)


def test_a_weight_that_is_not_contiguous_is_left_to_torch():
    assert not are_contiguous([torch.ones(2), nn.Parameter(torch.ones(2, 3).t())])
    assert not are_contiguous([torch.ones(2).to_sparse()])
    assert are_contiguous([torch.ones(2), nn.Parameter(torch.ones(2, 3))])
