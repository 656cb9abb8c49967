"""Losses with parameters of their own, such as a learned temperature: trained, reduced and saved as the model's.

The parameters are named ``loss.`` and their name in the loss's module, and belong to the model's last block, which is
where the loss is evaluated. Ranks that train copies of the model evaluate the loss with their own copies.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim

from counterpoint.errors import PlanError
from counterpoint.model.spec import ModelSpec, Param
from counterpoint.partitioning.dry_run import replace_tensors

LOSS_PREFIX = "loss."
"""Of the names of a loss's parameters."""


def find_loss_module(loss: object) -> nn.Module | None:
    """Return the module that a loss function is, is a method of, or is partially applied to; None for a plain function.

    Example:
        >>> find_loss_module(nn.MSELoss()), find_loss_module(nn.functional.mse_loss)
        (MSELoss(), None)
    """
    candidates: list[object] = [loss]
    while isinstance(candidates[0], partial):
        applied = candidates[0]
        candidates = [applied.func, *applied.args, *applied.keywords.values(), *candidates[1:]]
    candidates += [getattr(candidate, "__self__", None) for candidate in candidates]
    return next((candidate for candidate in candidates if isinstance(candidate, nn.Module)), None)


def trainable_loss_params(model: nn.Module, loss: object) -> dict[str, nn.Parameter]:
    """Return the trainable parameters of a loss's module that are not the model's, by their names in that module."""
    module = find_loss_module(loss)
    own = {id(param) for param in model.parameters()}
    named = () if module is None else module.named_parameters()
    return {name: param for name, param in named if param.requires_grad and id(param) not in own}


def require_no_loss_params(model: nn.Module, loss: object, what: str) -> None:
    """Check that a loss has no parameters to be trained, where only the model's are.

    Args:
        model: the user's.
        loss: the user's.
        what: trains only the model's.

    Raises:
        PlanError: it has some.
    """
    names = list(trainable_loss_params(model, loss))
    if names:
        raise PlanError(
            f"the loss has trainable parameters of its own, {', '.join(names[:5])}, which {what} would not train; "
            "return the loss from a module that has the model and the loss in it, freeze them with "
            "requires_grad_(False), or use cp.Trainer or cp.parallelize"
        )


class TrainedModules(nn.Module):
    """The parameters and buffers of a model under their own names, and the parameters of its loss below ``loss.``.

    Args:
        model: the user's.
        loss_params: has the parameters.
    """

    def __init__(self, model: nn.Module, loss_params: nn.Module) -> None:
        super().__init__()
        state = vars(model)
        shared = {name: state[name] for name in ("_parameters", "_buffers", "_non_persistent_buffers_set")}
        self.__dict__.update(shared, _modules={**state["_modules"], LOSS_PREFIX[:-1]: loss_params}, _hidden=(model,))

    @property
    def model(self) -> nn.Module:
        """The user's model."""
        hidden: tuple[nn.Module] = self.__dict__["_hidden"]
        return hidden[0]


def find_trained_modules(model: nn.Module, loss: object, optimizer: optim.Optimizer | None) -> nn.Module:
    """Return the model, together with the parameters of the loss that are trained, if there are any.

    Args:
        model: the user's.
        loss: the user's.
        optimizer: trains the parameters that it holds; None for one that is made of all trainable ones.

    Raises:
        PlanError: the model has a part named ``loss``, too.
    """
    params = trainable_loss_params(model, loss)
    if optimizer is not None:
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        params = {name: param for name, param in params.items() if id(param) in held}
    module = find_loss_module(loss)
    if not params or module is None:
        return model
    if hasattr(model, LOSS_PREFIX[:-1]):
        raise PlanError(
            f"the loss has the trainable parameters {', '.join(params)}, whose names begin with 'loss.' in "
            f"checkpoints, but {type(model).__name__} has an attribute 'loss', too; rename it"
        )
    return TrainedModules(model, _select_params(module, {id(param) for param in params.values()}))


def _select_params(module: nn.Module, kept: Container[int]) -> nn.Module:
    """Return modules of the same names with only some parameters, and no buffers."""
    selected = nn.Module()
    for name, param in module.named_parameters(recurse=False):
        if id(param) in kept:
            selected.register_parameter(name, param)
    for name, child in module.named_children():
        if any(id(param) in kept for param in child.parameters()):
            selected.add_module(name, _select_params(child, kept))
    return selected


def model_of(trained: nn.Module) -> nn.Module:
    """Return the user's model."""
    return trained.model if isinstance(trained, TrainedModules) else trained


def add_loss_params(spec: ModelSpec, trained: nn.Module) -> ModelSpec:
    """Return the spec with the parameters of the loss in its last layer."""
    named = [pair for pair in trained.named_parameters() if pair[0].startswith(LOSS_PREFIX)]
    if not isinstance(trained, TrainedModules) or not named:
        return spec
    params = tuple(Param(name, tuple(param.shape), param.element_size()) for name, param in named)
    last = spec.blocks[-1]
    layer = replace(last.layers[-1], params=(*last.layers[-1].params, *(param.name for param in params)))
    block = replace(last, layers=(*last.layers[:-1], layer))
    return replace(spec, params=(*spec.params, *params), blocks=(*spec.blocks[:-1], block))


class LossParameters:
    """Evaluates a loss with a rank's own parameters in the place of the user's.

    Args:
        loss: the user's, with a module.
        names: of the parameters, as ranks have them.
    """

    def __init__(self, loss: object, names: Sequence[str]) -> None:
        module = find_loss_module(loss)
        assert module is not None, "a loss with parameters has a module"
        self.module = module
        self.names = names

    @staticmethod
    def of(loss: object, trained: nn.Module) -> LossParameters | None:
        """Return how a loss is evaluated with other parameters; None for one without."""
        if not isinstance(trained, TrainedModules):
            return None
        names = [name for name, _ in trained.named_parameters() if name.startswith(LOSS_PREFIX)]
        return LossParameters(loss, names)

    def call(self, weights: Mapping[str, Tensor], function: Callable[..., Any], *args: Any, share: float = 1.0) -> Any:  # noqa: ANN401 - of any function
        """Call a function that uses the loss.

        Args:
            weights: of the rank, by name.
            function: is called.
            *args: its arguments.
            share: what gradients of the parameters are multiplied with, where several ranks evaluate one loss.
        """
        params = dict(self.module.named_parameters())
        own = {id(params[name.removeprefix(LOSS_PREFIX)]): weights[name] for name in self.names}
        if share != 1.0:
            own = {key: _ScaledGrad.apply(value, share) for key, value in own.items()}  # type: ignore[no-untyped-call]
        with replace_tensors(self.module, own):
            return function(*args)


class _ScaledGrad(torch.autograd.Function):
    """Return a tensor as it is, and its gradient scaled."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, scale: float) -> Tensor:  # noqa: ANN401 - torch's own
        """Return the value."""
        ctx.scale = scale
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # noqa: ANN401 - torch's own
        """Return the scaled gradient."""
        return grad * ctx.scale, None
