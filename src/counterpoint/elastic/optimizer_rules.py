"""Translation of torch optimizers into update rules that servers apply with the same result."""

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
    """Return the update rule of every parameter of the optimizer, by name.

    Args:
        optimizer: of torch, on the model's parameters, or a factory such as ``partial(SGD, lr=0.1)``.
        model: whose parameters.
        tables: names of parameters that are held as rows.

    Raises:
        PlanError: no rule equals this optimizer, it has made steps, or it has a parameter of another model.

    Example:
        >>> import torch
        >>> weight = nn.Parameter(torch.zeros(2))
        >>> rules_from_optimizer(optim.SGD([weight], lr=0.1), nn.ParameterList([weight]), ())
        {'0': Sgd(lr=0.1, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False)}
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    optimizer = make_optimizer(optimizer, model)
    _validate_unused(optimizer)
    table_names = set(tables)
    rules: dict[str, UpdateRule] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise PlanError(
                    f"the {type(optimizer).__name__} has a parameter of {tuple(parameter.shape)} that the model does "
                    "not have; make the optimizer from model.parameters()"
                )
            name = names[parameter]
            rules[name] = rule_from_group(optimizer, group, name, is_table=name in table_names)
    return rules


def make_optimizer(optimizer: optim.Optimizer | OptimizerFactory, model: nn.Module) -> optim.Optimizer:
    """Return the optimizer, made by the factory on the model's trained parameters if it is one.

    Raises:
        PlanError: it is neither an optimizer nor a factory.
    """
    if isinstance(optimizer, optim.Optimizer):
        return optimizer
    if not callable(optimizer):
        raise PlanError(
            f"optimizer={optimizer!r} is neither an optimizer nor a factory; pass a torch optimizer on the "
            "model's parameters, or a factory such as partial(torch.optim.SGD, lr=0.1)"
        )
    return optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])


def rule_from_group(optimizer: optim.Optimizer, group: Mapping[str, Any], name: str, *, is_table: bool) -> UpdateRule:
    """Return the update rule that equals an optimizer on one parameter.

    Args:
        optimizer: of torch.
        group: the parameter's group.
        name: of the parameter, for errors.
        is_table: whether only pushed rows are updated.

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
                f"SparseAdam has {name}, which is not a table; use torch.optim.Adam for it, or add it to tables="
            )
        return Adam(lr, float(beta1), float(beta2), float(group["eps"]))
    return Adam(lr, float(beta1), float(beta2), float(group["eps"]), float(group["weight_decay"]))


def _validate_supported(kind: type[optim.Optimizer], group: Mapping[str, Any]) -> None:
    if kind not in {optim.SGD, optim.Adagrad, optim.Adam, optim.SparseAdam}:
        remedy = "Adam with weight_decay=0" if issubclass(kind, optim.Adam) else "one of these"
        raise PlanError(f"servers do not support {kind.__name__}, only {SUPPORTED_OPTIMIZERS}; use {remedy}")
    for option in ("maximize", "amsgrad", "decoupled_weight_decay"):
        if group.get(option):
            raise PlanError(f"servers do not support {kind.__name__} with {option}=True; remove it")


def _validate_sparse_safe(kind: type[optim.Optimizer], group: Mapping[str, Any], name: str) -> None:
    """Raise PlanError if the optimizer would change rows that are not pushed."""
    changes_all_rows = kind is optim.Adam or group.get("momentum") or group.get("weight_decay")
    if changes_all_rows:
        options = ", ".join(f"{key}={group[key]}" for key in ("momentum", "weight_decay", "betas") if group.get(key))
        raise PlanError(
            f"{name} is a table, of which servers update only pushed rows, but {kind.__name__} with {options} "
            "changes every row in every step; use SparseAdam, Adagrad or SGD without momentum and weight decay, or "
            "give EmbeddingConfig(rule=...)"
        )


def _validate_unused(optimizer: optim.Optimizer) -> None:
    has_made_steps = any(float(state.get("step", 0)) > 0 or state.get("momentum_buffer") is not None
                for state in optimizer.state.values())  # fmt: skip
    if has_made_steps:
        raise PlanError(
            f"this {type(optimizer).__name__} has made steps already, but the servers start from scratch; make a new "
            "one, or restart from the job's checkpoint"
        )


def check_lr_schedulable(rules: Mapping[str, UpdateRule]) -> None:
    """Raise PlanError unless scaling gradients equals scaling the learning rate, for all rules."""
    for name, rule in rules.items():
        if not (isinstance(rule, Sgd) and not rule.momentum and not rule.weight_decay):
            raise PlanError(
                f"a learning-rate schedule scales gradients, which is equivalent for plain SGD only, but {name} has "
                f"{rule}; remove the schedule, use SGD without momentum and weight decay, or Adagrad with lr_decay"
            )
