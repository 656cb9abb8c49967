"""Build an optimizer like the user's over other tensors: of its class, with the arguments that it was made with."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from inspect import signature
from typing import Any

from torch import optim

from counterpoint.errors import PlanError, first_line


def rebuild_optimizer(template: optim.Optimizer, param_groups: list[dict[str, Any]]) -> optim.Optimizer:
    """Return a new optimizer of the template's class, with constructor arguments read from the template.

    Args:
        template: the user's.
        param_groups: the option groups of the new one, with their tensors.

    Raises:
        PlanError: it cannot be built, or would be another one.
    """
    optimizer_class = type(template)
    name, known = optimizer_class.__name__, {**vars(template), **template.defaults}
    arguments = argument_names(optimizer_class, template.defaults)
    hidden = [argument for argument in arguments if argument not in known]
    remedy = f"pass a factory that takes any tensors or groups of them, such as partial({name}, lr=1e-3)"
    if hidden:
        raise PlanError(
            f"{name} keeps its {', '.join(hidden)} neither in its defaults nor as an attribute of that name, so it "
            f"cannot be rebuilt, but every rank builds its own; {remedy}"
        )
    require_no_inner_optimizer(template)
    try:
        built = optimizer_class(param_groups, **{argument: known[argument] for argument in arguments})
    except PlanError:  # of one of several optimizers
        raise
    except Exception as error:
        raise PlanError(
            f"{name} cannot be rebuilt, but every rank builds its own: {first_line(error)}; {remedy}"
        ) from error
    for key, value in vars(template).items():
        if isinstance(value, int | float | str) and not key.startswith("_") and vars(built).get(key) != value:
            raise PlanError(
                f"{name} has {key}={value!r}, but one rebuilt for a rank has {vars(built).get(key)!r}; {remedy}"
            )
    return built


def require_no_inner_optimizer(template: optim.Optimizer) -> None:
    """Raise if an optimizer steps with another one, which has the user's parameters and not those of a rank.

    Raises:
        PlanError: it does.
    """
    for key, value in vars(template).items():
        if isinstance(value, optim.Optimizer):
            name, inner = type(template).__name__, type(value).__name__
            raise PlanError(
                f"{name} has another optimizer in its attribute {key} ({inner}), which updates the parameters that it "
                "was made with, but every rank builds an optimizer for its own tensors; pass a factory that makes "
                f"both, such as lambda params: {name}({inner}(params, lr=1e-3))"
            )


def require_own_step(optimizers: Iterable[optim.Optimizer]) -> None:
    """Raise if a method ``step`` was put on an optimizer itself: ranks update as its class does.

    Raises:
        PlanError: one has such a method.
    """
    for optimizer in optimizers:
        own = vars(optimizer).get("step")
        if own is None:
            continue
        step = inspect.unwrap(getattr(own, "__func__", own))  # a scheduler of torch wraps that of the class
        if step is not inspect.unwrap(type(optimizer).step):
            name = type(optimizer).__name__
            raise PlanError(
                f"the method step of this {name} was replaced by {getattr(step, '__qualname__', step)}, but ranks "
                f"update with a {name} of their own, whose step is that of the class; write a subclass of {name} that "
                "has this step"
            )


def argument_names(optimizer_class: type[optim.Optimizer], defaults: Iterable[str]) -> list[str]:
    """Return an optimizer's constructor arguments after its parameters, following ``**kwargs`` into base classes."""
    names: dict[str, None] = {}
    for base in optimizer_class.__mro__:
        if base is optim.Optimizer:
            names |= dict.fromkeys(defaults)
            break
        if "__init__" not in vars(base):
            continue
        parameters = list(signature(base.__init__).parameters.values())[2:]  # type: ignore[misc]
        names |= {
            parameter.name: None
            for parameter in parameters
            if parameter.kind in {parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY}
        }
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return list(names)
