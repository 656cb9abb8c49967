"""Update rules as functions on tensors, bitwise equal to ``torch.optim``.

A dense key has one step count for all elements. Rows share the step count of their key, as in torch's sparse
optimizers, but only rows that are pushed are updated.
"""

from __future__ import annotations

from math import sqrt
from typing import assert_never

import torch
from torch import Tensor

from counterpoint.ps.update_rules import Adagrad, Adam, Assign, Sgd, UpdateRule

CHUNK_NUMEL = 1 << 17
"""Elements updated at a time, so that every operation finds them in the cache."""


def num_state_slots(rule: UpdateRule) -> int:
    """Return the number of optimizer-state tensors per value tensor."""
    match rule:
        case Assign():
            return 0
        case Sgd():
            return int(rule.momentum > 0)
        case Adagrad():
            return 1
        case Adam():
            return 2
        case _:
            assert_never(rule)


def initial_state(rule: UpdateRule, like: Tensor) -> tuple[Tensor, ...]:
    """Return the optimizer state before the first step, in the shape of the values."""
    fill = rule.initial_accumulator_value if isinstance(rule, Adagrad) else 0.0
    return tuple(torch.full_like(like, fill) for _ in range(num_state_slots(rule)))


def sgd_factor(rule: UpdateRule) -> float | None:
    """Return the factor to add a gradient with, if that is all that the rule does to rows; else None.

    Example:
        >>> sgd_factor(Sgd(0.1)), sgd_factor(Sgd(0.1, momentum=0.9))
        (-0.1, None)
    """
    return -rule.lr if isinstance(rule, Sgd) and not rule.momentum and not rule.weight_decay else None


def update_range(rule: UpdateRule, step: int, value: Tensor, state: tuple[Tensor, ...], gradient: Tensor) -> None:
    """Update a dense key and its optimizer state in place.

    Args:
        rule: update rule.
        step: of this update, from 1.
        value: flat values, updated in place, as is the state.
        state: optimizer state.
        gradient: in the shape of the values; not changed.
    """
    for low in range(0, len(value), CHUNK_NUMEL):
        part = slice(low, low + CHUNK_NUMEL)
        _update_chunk(rule, step, value[part], tuple(slot[part] for slot in state), gradient[part])


def _update_chunk(rule: UpdateRule, step: int, value: Tensor, state: tuple[Tensor, ...], gradient: Tensor) -> None:
    match rule:
        case Assign():
            value.copy_(gradient)
        case Sgd():
            gradient = _add_weight_decay(gradient, value, rule.weight_decay)
            if state:
                momentum = state[0]
                if step == 1:
                    momentum.copy_(gradient)
                else:
                    momentum.mul_(rule.momentum).add_(gradient, alpha=1 - rule.dampening)
                gradient = gradient.add(momentum, alpha=rule.momentum) if rule.nesterov else momentum
            value.add_(gradient, alpha=-rule.lr)
        case Adagrad():
            gradient = _add_weight_decay(gradient, value, rule.weight_decay)
            state[0].addcmul_(gradient, gradient, value=1)
            lr = rule.lr / (1 + (step - 1) * rule.lr_decay)
            value.addcdiv_(gradient, state[0].sqrt().add_(rule.eps), value=-lr)
        case Adam():
            gradient = _add_weight_decay(gradient, value, rule.weight_decay)
            mean, square = state
            mean.lerp_(gradient, 1 - rule.beta1)
            square.mul_(rule.beta2).addcmul_(gradient, gradient, value=1 - rule.beta2)
            size = rule.lr / (1 - rule.beta1**step)
            denominator = (square.sqrt() / (1 - rule.beta2**step) ** 0.5).add_(rule.eps)
            value.addcdiv_(mean, denominator, value=-size)
        case _:
            assert_never(rule)


def update_rows(
    rule: UpdateRule, step: int, value: Tensor, state: tuple[Tensor, ...], gradient: Tensor, *, is_first: Tensor
) -> None:
    """Update pushed rows and their optimizer state in place.

    Args:
        rule: update rule.
        step: of the key, from 1.
        value: ``(rows, width)``, updated in place, as is the state.
        state: optimizer state of these rows.
        gradient: ``(rows, width)``; not changed.
        is_first: ``(rows, 1)``, or ``(1, 1)`` for all of them: whether a row was never pushed before.
    """
    match rule:
        case Assign():
            value.copy_(gradient)
        case Sgd():
            _sgd_rows(rule, value, state, gradient, is_first)
        case Adagrad():
            gradient = _add_weight_decay(gradient, value, rule.weight_decay)
            state[0].add_(gradient.pow(2))
            lr = rule.lr / (1 + (step - 1) * rule.lr_decay)
            value.add_(gradient / state[0].sqrt().add_(rule.eps), alpha=-lr)
        case Adam():
            gradient = _add_weight_decay(gradient, value, rule.weight_decay)
            mean, square = state
            mean.add_(gradient.sub(mean).mul_(1 - rule.beta1))
            square.add_(gradient.pow(2).sub_(square).mul_(1 - rule.beta2))
            size = rule.lr * sqrt(1 - rule.beta2**step) / (1 - rule.beta1**step)
            value.add_(-size * mean.div(square.sqrt().add_(rule.eps)))
        case _:
            assert_never(rule)


def _sgd_rows(rule: Sgd, value: Tensor, state: tuple[Tensor, ...], gradient: Tensor, is_first: Tensor) -> None:
    gradient = _add_weight_decay(gradient, value, rule.weight_decay)
    if state:
        momentum = state[0]
        updated = momentum.mul(rule.momentum).add_(gradient, alpha=1 - rule.dampening)
        momentum.copy_(torch.where(is_first, gradient, updated))
        gradient = gradient.add(momentum, alpha=rule.momentum) if rule.nesterov else momentum
    value.add_(gradient, alpha=-rule.lr)


def _add_weight_decay(gradient: Tensor, value: Tensor, weight_decay: float) -> Tensor:
    return gradient.add(value, alpha=weight_decay) if weight_decay else gradient
