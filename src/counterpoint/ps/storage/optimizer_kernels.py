"""What a push does to the numbers of a key: the arithmetic of ``torch.optim``, operation by operation, without objects.

A range has one step for all its numbers. Rows have the step of their key, as in torch's sparse forms, but only those
that are pushed are touched.
"""

from __future__ import annotations

from math import sqrt
from typing import assert_never

import torch
from torch import Tensor

from counterpoint.ps.update_rules import Adagrad, Adam, Assign, Sgd, UpdateRule

CHUNK_NUMEL = 1 << 17
"""Numbers that are updated before the next, so that each operation finds them in the cache."""


def num_state_slots(rule: UpdateRule) -> int:
    """Return how many numbers the rule keeps beside each number of the key."""
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
    """Return what the rule keeps before the first step, in the shape of the numbers."""
    fill = rule.initial_accumulator_value if isinstance(rule, Adagrad) else 0.0
    return tuple(torch.full_like(like, fill) for _ in range(num_state_slots(rule)))


def sgd_factor(rule: UpdateRule) -> float | None:
    """Return what a gradient is multiplied with before it is added, where that is all that the rule does to rows.

    Example:
        >>> added_factor(Sgd(0.1)), added_factor(Sgd(0.1, momentum=0.9))
        (-0.1, None)
    """
    return -rule.lr if isinstance(rule, Sgd) and not rule.momentum and not rule.weight_decay else None


def update_range(rule: UpdateRule, step: int, value: Tensor, state: tuple[Tensor, ...], gradient: Tensor) -> None:
    """The numbers and what the rule keeps beside them are as after one step more.

    Args:
        rule: which.
        step: of this update, from 1.
        value: the numbers; changed in place, as are the parts.
        parts: what the rule keeps.
        gradient: of the shape of the numbers; not changed.
    """
    for low in range(0, len(value), CHUNK_NUMEL):
        part = slice(low, low + CHUNK_NUMEL)
        _update_chunk(rule, step, value[part], tuple(one[part] for one in state), gradient[part])


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
    """Rows that were pushed, and what the rule keeps beside them, are as after the key's next step.

    Args:
        rule: which.
        step: of the key, from 1.
        value: ``(rows, width)``; changed in place, as are the parts.
        parts: what the rule keeps of these rows.
        gradient: ``(rows, width)``; not changed.
        is_first: ``(rows, 1)``, or ``(1, 1)`` for all of them: whether a row had never been pushed.
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
        later = momentum.mul(rule.momentum).add_(gradient, alpha=1 - rule.dampening)
        momentum.copy_(torch.where(is_first, gradient, later))
        gradient = gradient.add(momentum, alpha=rule.momentum) if rule.nesterov else momentum
    value.add_(gradient, alpha=-rule.lr)


def _add_weight_decay(gradient: Tensor, value: Tensor, weight_decay: float) -> Tensor:
    return gradient.add(value, alpha=weight_decay) if weight_decay else gradient
