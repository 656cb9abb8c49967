"""Arguments of ``set_optimizer`` as a torch optimizer factory, and as the equivalent update rule of the servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn, optim

from counterpoint.errors import PlanError
from counterpoint.ps.update_rules import Adagrad, Adam, Assign, Sgd, UpdateRule

Factory: TypeAlias = Callable[[list[nn.Parameter]], optim.Optimizer]
REMEDY = "give a factory such as partial(torch.optim.SGD, lr=0.1)"
SUPPORTED_RULES = "SGD, Adagrad, Adam and SparseAdam"


def make_factory(optimizer: object) -> Factory:
    """Return a factory of optimizers equal to the argument.

    Args:
        optimizer: a factory such as ``partial(SGD, lr=0.1)``, an update rule of the servers, or a torch optimizer,
            whose class and options of its single group are used.

    Raises:
        PlanError: it is something else.
    """
    if isinstance(optimizer, Sgd | Adagrad | Adam):
        return _factory_from_rule(optimizer)
    if isinstance(optimizer, optim.Optimizer):
        return _factory_from_optimizer(optimizer)
    if isinstance(optimizer, str) or not callable(optimizer):
        raise PlanError(f"set_optimizer({optimizer!r}): {REMEDY}")
    return optimizer


def _factory_from_optimizer(optimizer: optim.Optimizer) -> Factory:
    optimizer_class, groups = type(optimizer), optimizer.param_groups
    if len(groups) != 1:
        raise PlanError(
            f"set_optimizer: {optimizer_class.__name__} has {len(groups)} groups, but all keys have one rule; {REMEDY}"
        )
    options = {name: groups[0][name] for name in optimizer.defaults if name in groups[0]}
    return lambda params: optimizer_class(params, **options)


def _factory_from_rule(rule: Sgd | Adagrad | Adam) -> Factory:
    """Return a factory of torch optimizers with the arithmetic of the rule."""
    options: dict[str, Any]
    match rule:
        case Sgd(lr, momentum, dampening, weight_decay, is_nesterov):
            options = {"momentum": momentum, "dampening": dampening, "nesterov": is_nesterov}
            return lambda params: optim.SGD(params, lr=lr, weight_decay=weight_decay, **options)
        case Adagrad(lr, lr_decay, weight_decay, first_sum, eps):
            options = {"initial_accumulator_value": first_sum, "eps": eps}
            return lambda params: optim.Adagrad(params, lr=lr, lr_decay=lr_decay, weight_decay=weight_decay, **options)
        case Adam(lr, beta1, beta2, eps, weight_decay):
            return lambda params: optim.Adam(params, lr, (beta1, beta2), eps, weight_decay)


def build_optimizer(factory: Factory, param: nn.Parameter) -> optim.Optimizer:
    """Return the optimizer that a factory makes for a parameter.

    Raises:
        PlanError: it makes something else, or fails.
    """
    try:
        optimizer: object = factory([param])
    except (TypeError, ValueError) as error:
        raise PlanError(f"set_optimizer: the factory fails on a list of one parameter, {error}; {REMEDY}") from error
    if not isinstance(optimizer, optim.Optimizer):
        raise PlanError(f"set_optimizer: the factory makes a {type(optimizer).__name__}; {REMEDY}")
    return optimizer


def to_server_rule(optimizer: object) -> UpdateRule:
    """Return the update rule of servers that is equivalent to an optimizer.

    Args:
        optimizer: see :func:`make_factory`.

    Raises:
        PlanError: there is none.

    Example:
        >>> from functools import partial
        >>> to_server_rule(partial(torch.optim.SGD, lr=0.1, momentum=0.9))
        Sgd(lr=0.1, momentum=0.9, dampening=0.0, weight_decay=0.0, nesterov=False)
    """
    if isinstance(optimizer, Assign):
        raise PlanError(
            f"set_optimizer({optimizer!r}): the sum replaces the value where no optimizer is set; leave it out"
        )
    if isinstance(optimizer, Sgd | Adagrad | Adam):
        return optimizer
    torch_optimizer = build_optimizer(make_factory(optimizer), nn.Parameter(torch.zeros(1)))
    options = torch_optimizer.param_groups[0]
    optimizer_class = type(torch_optimizer)
    for name in ("amsgrad", "maximize", "decoupled_weight_decay"):
        if optimizer_class in RULES and options.get(name):
            raise PlanError(
                f"set_optimizer: {optimizer_class.__name__} with {name}={options[name]} has no rule on the servers, "
                "which have "
                f"{SUPPORTED_RULES} without it; leave it out, or update on the workers what pull gives without "
                "set_optimizer"
            )
    if optimizer_class not in RULES:
        raise PlanError(
            f"set_optimizer: {optimizer_class.__name__} has no rule on the servers, which have {SUPPORTED_RULES}; take "
            "one of these, or "
            "update on the workers what pull of a dist_sync store gives without set_optimizer"
        )
    return RULES[optimizer_class](options)


def _sgd(options: Mapping[str, Any]) -> UpdateRule:
    lr, momentum, dampening, weight_decay = (
        float(options[name]) for name in ("lr", "momentum", "dampening", "weight_decay")
    )
    return Sgd(lr, momentum, dampening, weight_decay, bool(options["nesterov"]))


def _adagrad(options: Mapping[str, Any]) -> UpdateRule:
    names = ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps")
    return Adagrad(*(float(options[name]) for name in names))


def _adam(options: Mapping[str, Any]) -> UpdateRule:
    beta1, beta2 = (float(beta) for beta in options["betas"])
    return Adam(float(options["lr"]), beta1, beta2, float(options["eps"]), float(options.get("weight_decay", 0.0)))


RULES: dict[type[optim.Optimizer], Callable[[Mapping[str, Any]], UpdateRule]] = {
    optim.SGD: _sgd,
    optim.Adagrad: _adagrad,
    optim.Adam: _adam,
    optim.SparseAdam: _adam,
}
