"""Base of the optimizers with a learning rate per layer: parameter groups, norms and trust ratios."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from counterpoint.errors import DataError
from counterpoint.optim.validation import require_one_of

ExcludeRule: TypeAlias = Literal["vectors", "nothing", "everything"]


@dataclass(frozen=True, slots=True)
class ParamBatch:
    """Parameters of one group with the same device, dtype and exclusion, updated by one foreach call.

    Args:
        is_excluded: whether they have neither trust ratio nor weight decay.
        weights: the parameters.
        gradients: their gradients.
    """

    is_excluded: bool
    weights: list[Tensor]
    gradients: list[Tensor]

    def state_tensors(self, key: str, state: dict[Tensor, Any]) -> list[Tensor]:
        """Return a state tensor of every parameter, initially zero."""
        for weight in self.weights:
            if key not in state[weight]:
                state[weight][key] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        return [state[weight][key] for weight in self.weights]


def require_exclude(groups: Iterable[dict[str, Any]]) -> None:
    """Check the exclusion rule of each group.

    Raises:
        PlanError: one is not ``vectors``, ``nothing`` or ``everything``.
    """
    for group in groups:
        require_one_of("exclude", group["exclude"], get_args(ExcludeRule))


def group_params(group: dict[str, Any], optimizer: str) -> list[ParamBatch]:
    """Return the parameters of a group that have a gradient, in as few batches as possible.

    Raises:
        DataError: a gradient is sparse.
    """
    parts: dict[tuple[torch.device, torch.dtype, bool], ParamBatch] = {}
    for weight in group["params"]:
        gradient = weight.grad
        if gradient is None:
            continue
        if gradient.is_sparse:
            raise DataError(
                f"the gradient of a parameter {tuple(weight.shape)} is sparse, but {optimizer} needs the norm of the "
                "whole parameter in every step; build the embedding with sparse=False, or use SGD or Adagrad"
            )
        excluded = group["exclude"] == "everything" or (group["exclude"] == "vectors" and weight.dim() <= 1)
        part = parts.setdefault((weight.device, weight.dtype, excluded), ParamBatch(excluded, [], []))
        part.weights.append(weight)
        part.gradients.append(gradient)
    return list(parts.values())


def norm_dtype(tensors: list[Tensor]) -> torch.dtype:
    """Return the dtype of norms and rates: float32 or wider."""
    return torch.promote_types(tensors[0].dtype, torch.float32)


def compute_norms(tensors: list[Tensor]) -> Tensor:
    """Return the Euclidean norm of each tensor."""
    return torch.stack(torch._foreach_norm(tensors, 2, norm_dtype(tensors)))


def safe_ratio(first: Tensor, second: Tensor, ratio: Tensor) -> Tensor:
    """Return the ratio where both norms are nonzero, and 1 elsewhere."""
    return torch.where((first > 0) & (second > 0), ratio, torch.ones_like(ratio))


class LayerwiseOptimizer(Optimizer, ABC):
    """An optimizer with a learning rate per parameter, except for those that its groups exclude."""

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        require_exclude(self.param_groups)

    @abstractmethod
    def update_batch(self, batch: ParamBatch, group: dict[str, Any]) -> None:
        """Take one step on a batch of parameters."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401 - the closure's result
        """Update every parameter that has a gradient; return the closure's result."""
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        for group in self.param_groups:
            for part in group_params(group, type(self).__name__):
                self.update_batch(part, group)
        return value
