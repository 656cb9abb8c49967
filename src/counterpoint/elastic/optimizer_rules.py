"""Optimizers of torch as rules that servers apply: number by number the same, or refused with what to write instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from torch import nn, optim

from counterpoint.errors import PlanError
from counterpoint.ps.update_rules import Adagrad, Adam, Sgd, UpdateRule

OptimizerFactory: TypeAlias = Callable[[Iterable[nn.Parameter]], optim.Optimizer]

SUPPORTED_OPTIMIZERS = "torch.optim.SGD, Adagrad and Adam, and SparseAdam for tables"


def rules_from_optimizer(
    optimizer: optim.Optimizer | OptimizerFactory, model: nn.Module, tables: Iterable[str]
) -> dict[str, UpdateRule]:
    """Return the rule of every parameter that the optimizer has, by its name.

    Args:
        optimizer: of torch, on the model's parameters, or a factory such as ``partial(SGD, lr=0.1)``.
        model: whose parameters.
        tables: names of those that are kept as rows.

    Raises:
        PlanError: no rule is the same as this optimizer, it has begun already, or has a parameter of something else.

    Example:
        >>> import torch
        >>> rules_of(optim.SGD([weight := nn.Parameter(torch.zeros(2))], lr=0.1), nn.ParameterList([weight]), ())
        {'0': Sgd(lr=0.1, momentum=0.0, dampening=0.0, weight_decay=0.0, is_nesterov=False)}
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    optimizer = make_optimizer(optimizer, model)
    _validate_unused(optimizer)
    rows = set(tables)
    found: dict[str, UpdateRule] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise PlanError(
                    f"the {type(optimizer).__name__} has a parameter of {tuple(parameter.shape)} that the model has "
                    "not; make the optimizer from model.parameters()"
                )
            name = names[parameter]
            found[name] = rule_from_group(optimizer, group, name, is_table=name in rows)
    return found


def make_optimizer(optimizer: optim.Optimizer | OptimizerFactory, model: nn.Module) -> optim.Optimizer:
    """Return the optimizer, on the parameters of the model that are trained if it is to be made.

    Raises:
        PlanError: it is none, and none can be made of it.
    """
    if isinstance(optimizer, optim.Optimizer):
        return optimizer
    if not callable(optimizer):
        raise PlanError(
            f"optimizer={optimizer!r} is neither an optimizer nor a way to make one; pass a torch optimizer on the "
            "model's parameters, or a factory such as partial(torch.optim.SGD, lr=0.1)"
        )
    return optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])


def rule_from_group(optimizer: optim.Optimizer, group: Mapping[str, Any], name: str, *, is_table: bool) -> UpdateRule:
    """Return the rule that does to a parameter what an optimizer would.

    Args:
        optimizer: of torch.
        group: the options of the parameter's group.
        name: of the parameter, for errors.
        is_table: whether only rows that are pushed are to be updated.

    Raises:
        PlanError: there is none.
    """
    kind = type(optimizer)
    _validate_supported(kind, group)
    if is_table:
        _validate_sparse_safe(kind, group, name)
    lr = float(group["lr"])
    if kind is optim.SGD:
        return Sgd(
            lr,
            float(group["momentum"]),
            float(group["dampening"]),
            float(group["weight_decay"]),
            nesterov=bool(group["nesterov"]),
        )
    if kind is optim.Adagrad:
        first_sum = float(group["initial_accumulator_value"])
        return Adagrad(lr, float(group["lr_decay"]), float(group["weight_decay"]), first_sum, float(group["eps"]))
    beta1, beta2 = group["betas"]
    if kind is optim.SparseAdam:
        if not is_table:
            raise PlanError(
                f"SparseAdam has {name}, which is no table; give it to torch.optim.Adam, or name it a table"
            )
        return Adam(lr, float(beta1), float(beta2), float(group["eps"]))
    return Adam(lr, float(beta1), float(beta2), float(group["eps"]), float(group["weight_decay"]))


def _validate_supported(kind: type[optim.Optimizer], group: Mapping[str, Any]) -> None:
    if kind not in {optim.SGD, optim.Adagrad, optim.Adam, optim.SparseAdam}:
        remedy = "Adam with weight_decay=0" if issubclass(kind, optim.Adam) else "one of these"
        raise PlanError(f"servers do not know {kind.__name__}, but {SUPPORTED_OPTIMIZERS}; give {remedy}")
    for option in ("maximize", "amsgrad", "decoupled_weight_decay"):
        if group.get(option):
            raise PlanError(f"servers do not know {kind.__name__} with {option}=True; leave it out")


def _validate_sparse_safe(kind: type[optim.Optimizer], group: Mapping[str, Any], name: str) -> None:
    """What happens to rows that are not pushed must be nothing."""
    moves = kind is optim.Adam or group.get("momentum") or group.get("weight_decay")
    if moves:
        options = ", ".join(f"{key}={group[key]}" for key in ("momentum", "weight_decay", "betas") if group.get(key))
        raise PlanError(
            f"{name} is a table, of which servers update the rows that are pushed, but {kind.__name__} with {options} "
            "moves every row in every step; give SparseAdam, Adagrad or SGD without momentum and weight decay, or say "
            "Table(rule=...) for a rule of its own"
        )


def _validate_unused(optimizer: optim.Optimizer) -> None:
    begun = any(float(state.get("step", 0)) > 0 or state.get("momentum_buffer") is not None
                for state in optimizer.state.values())  # fmt: skip
    if begun:
        raise PlanError(
            f"this {type(optimizer).__name__} has made steps already, but the servers' begins anew; make a new one, or "
            "go on from the job's checkpoint"
        )


def check_lr_schedulable(rules: Mapping[str, UpdateRule]) -> None:
    """Check that a learning rate may change by what gradients are multiplied with.

    Raises:
        PlanError: a rule would do something else.
    """
    for name, rule in rules.items():
        if not (isinstance(rule, Sgd) and not rule.momentum and not rule.weight_decay):
            raise PlanError(
                f"a schedule changes what is pushed, which is the learning rate of plain SGD alone, but {name} has "
                f"{rule}, whose rate on the servers stays; leave the schedule out, give SGD without momentum and "
                "weight decay, or Adagrad with lr_decay"
            )
