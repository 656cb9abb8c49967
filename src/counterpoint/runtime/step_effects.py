"""What a step of a user's own optimizer does besides updating each parameter by its own gradient and state.

Optimizers of torch update parameters one by one, so ranks may each update some of them. One of a user's own may also
compare them (a norm over all, as Prodigy has), draw random numbers (Langevin dynamics), or count in its options (the
``k`` of schedule-free optimizers). This is found by steps on copies of a few parameters.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn, optim

from counterpoint.runtime.compiler_import import without_dynamo_import

BuildOptimizer: TypeAlias = Callable[[Sequence[tuple[int, Tensor]]], optim.Optimizer]
"""Builds an optimizer like the user's over tensors, each with the index of its option group."""

NUM_STEPS = 3
MAX_PARAMS = 8
MAX_ROUNDING = 1e-9
"""The largest difference of two updates in float64, relative to the update, that is rounding."""


@dataclass(frozen=True, slots=True)
class StepEffects:
    """What else a step does.

    Args:
        options: names of the options of its groups that it changes.
        tensor_options: those of them that are not single numbers, texts or None.
        other_state: keys of its state that are not parameters.
        attributes: names of its attributes that it changes.
        draws: whether it draws random numbers.
        couples: whether the update of a parameter depends on other parameters.
    """

    options: tuple[str, ...] = ()
    tensor_options: tuple[str, ...] = ()
    other_state: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    draws: bool = False
    couples: bool = False


@dataclass(frozen=True, slots=True)
class _Steps:
    """Some steps of an optimizer on copies of parameters."""

    updates: list[Tensor]
    effects: StepEffects


def find_step_effects(
    build: BuildOptimizer, params: Mapping[str, Tensor], group_index: Mapping[str, int]
) -> StepEffects:
    """Return what else a step of an optimizer does; nothing if it fails on copies of parameters.

    Args:
        build: builds an optimizer like it.
        params: the trained parameters by name.
        group_index: of each, the index of its option group.
    """
    chosen = [(group_index[name], params[name]) for name in choose_params(params, group_index)]
    python_state = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            together = _take_steps(build, chosen)
            if together.effects.draws:
                return together.effects
            separately = [_take_steps(build, [one], index).updates[0] for index, one in enumerate(chosen)]
    except Exception:  # noqa: BLE001 - such as of one that needs a closure: the first step shows it
        return StepEffects()
    finally:
        random.setstate(python_state)
    couples = not all(map(_is_same_update, together.updates, separately))
    return replace(together.effects, couples=couples)


def choose_params(params: Mapping[str, Tensor], group_index: Mapping[str, int]) -> list[str]:
    """Return the names of a few parameters: the smallest of all, of the matrices, and of each group.

    Example:
        >>> sizes = {"a": (9,), "b": (2, 2), "c": (1,), "d": (3, 3), "e": (1,), "f": (4, 4)}
        >>> params = {name: torch.zeros(size) for name, size in sizes.items()}
        >>> choose_params(params, {**dict.fromkeys("abcde", 0), "f": 1})
        ['c', 'e', 'b', 'd', 'f']
    """
    names = sorted((name for name in params if params[name].numel()), key=lambda name: params[name].numel())
    matrices = [name for name in names if params[name].dim() > 1]
    groups = {group_index[name]: name for name in reversed(names)}
    return list(dict.fromkeys([*names[:2], *matrices[:2], *groups.values()]))[:MAX_PARAMS]


def _take_steps(build: BuildOptimizer, chosen: Sequence[tuple[int, Tensor]], index: int = 0) -> _Steps:
    """Take steps on copies of some parameters, with gradients that depend on the index of each."""
    params = [nn.Parameter(_widen(param.detach()).clone()) for _, param in chosen]
    before = [param.detach().clone() for param in params]
    grads = [_make_grad(param, number) for number, param in enumerate(params, index)]
    optimizer = build([(group, param) for (group, _), param in zip(chosen, params, strict=True)])
    old_options = [copy.deepcopy(_options(group)) for group in optimizer.param_groups]
    attributes = [copy.deepcopy(_attributes(part)) for part in _parts(optimizer)]
    states = random.getstate(), torch.default_generator.get_state()
    with without_dynamo_import():
        for _ in range(NUM_STEPS):
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad.clone()
            optimizer.step()
    draws = random.getstate() != states[0] or not torch.equal(torch.default_generator.get_state(), states[1])
    changed = {
        key: value
        for old, group in zip(old_options, optimizer.param_groups, strict=True)
        for key, value in _options(group).items()
        if key not in old or not _is_same(old[key], value)
    }
    tensor_options = [
        key for key, value in changed.items() if not (value is None or isinstance(value, int | float | str))
    ]
    state_keys: list[object] = [*optimizer.state]
    other_keys = {str(key) for key in state_keys if not isinstance(key, Tensor)}
    moved_names = {
        key
        for old, part in zip(attributes, _parts(optimizer), strict=True)
        for key, value in _attributes(part).items()
        if key not in old or not _is_same(old[key], value)
    }
    options, tensors, others, moved = (
        tuple(sorted(found)) for found in (changed, tensor_options, other_keys, moved_names)
    )
    effects = StepEffects(options, tensors, others, moved, draws)
    return _Steps([param.detach() - old for param, old in zip(params, before, strict=True)], effects)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in {"params", "param_names"}}


def _parts(optimizer: optim.Optimizer) -> Sequence[optim.Optimizer]:
    return getattr(optimizer, "parts", (optimizer,))  # of several optimizers as one


def _attributes(optimizer: optim.Optimizer) -> dict[str, Any]:
    """Return the attributes of its own class that are numbers, texts, tensors or collections of them."""
    known = torch_attributes()
    return {key: value for key, value in vars(optimizer).items() if key not in known and _is_plain(value)}


@cache
def torch_attributes() -> frozenset[str]:
    """Return the names of the attributes that torch sets on every optimizer."""
    with without_dynamo_import():
        return frozenset({*vars(optim.SGD([torch.zeros(1)], lr=0.1)), "_opt_called", "_step_count"})


def _is_plain(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, int | float | complex | str | Tensor | None)


def _widen(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _make_grad(param: Tensor, index: int) -> Tensor:
    """Return a gradient that differs between parameters in size and direction, the same on all ranks."""
    numbers = torch.arange(1, param.numel() + 1, dtype=torch.float64, device=param.device)
    return ((index + 1) * torch.sin(numbers + index)).to(param.dtype).view(param.shape)


def _is_same(one: object, other: object) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and bool((one == other).all())
    return type(one) is type(other) and bool(one == other)


def _is_same_update(one: Tensor, other: Tensor) -> bool:
    size = max(float(one.abs().max()), float(other.abs().max()))
    return not float((one - other).abs().max()) > MAX_ROUNDING * size
