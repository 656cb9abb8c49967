"""LAMB: Adam with layer-wise trust ratios."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from counterpoint.errors import PlanError
from counterpoint.optim.layerwise import (
    ExcludeRule,
    LayerwiseOptimizer,
    ParamBatch,
    compute_norms,
    safe_ratio,
)
from counterpoint.optim.validation import require_at_least, require_decay


class LAMB(LayerwiseOptimizer):
    """Adam whose update of each parameter has the norm of the parameter, times the learning rate.

    With Adam's bias-corrected moments ``m`` and ``v``, and ``phi`` the clamped norm::

        r = m / (sqrt(v) + eps) + weight_decay * w
        w = w - lr * phi(|w|) / |r| * r

    If ``|w|`` or ``|r|`` is 0, the ratio is 1. Excluded parameters have the ratio 1 and no weight decay.

    Args:
        params: parameters, or groups of them.
        lr: the learning rate.
        betas: decay factors of the running means of gradients and of their squares.
        eps: added to the root of the mean of squares.
        weight_decay: decoupled from the moments, included in the norm of the update.
        bias_correction: whether the moments are corrected for their initialization with 0.
        clamp: minimum and maximum of the weight norm; None for no limits.
        exclude: ``vectors`` for all parameters of at most one dim, such as biases and norm weights; ``nothing``; or
            ``everything`` for a whole group.

    Raises:
        PlanError: an option is out of range.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([[3.0, 4.0]]))
        >>> optimizer = LAMB([weight], lr=0.1, weight_decay=0.0)
        >>> weight.grad = torch.tensor([[0.0, 100.0]])
        >>> optimizer.step()
        >>> [round(value, 6) for value in weight[0].tolist()]  # moved by a tenth of its norm, whatever the gradient
        [3.0, 3.5]

    Cost:
        Two state values per parameter, as Adam, and two temporary ones; two more norms per step.

    Source:
        You et al., Large batch optimization for deep learning: training BERT in 76 minutes, ICLR 2020, algorithm 2.
    """

    def __init__(  # noqa: PLR0913 - the paper's options
        self,
        params: ParamsT,
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        bias_correction: bool = True,
        clamp: tuple[float, float] | None = None,
        exclude: ExcludeRule = "vectors",
    ) -> None:
        require_at_least(0, lr=lr, weight_decay=weight_decay, eps=eps)
        require_decay(beta1=betas[0], beta2=betas[1])
        if clamp is not None and not 0 <= clamp[0] <= clamp[1]:
            raise PlanError(
                f"clamp={clamp} is not a range; give the minimum and the maximum, such as (0.0, 10.0), or None"
            )
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "clamp": clamp,
            "exclude": exclude,
        }
        super().__init__(params, defaults)

    def update_batch(self, batch: ParamBatch, group: dict[str, Any]) -> None:
        """Take one step on a batch of parameters."""
        updates = self._adam_update(batch, group)
        if batch.is_excluded:
            torch._foreach_add_(batch.weights, updates, alpha=-group["lr"])
            return
        if group["weight_decay"]:
            torch._foreach_add_(updates, batch.weights, alpha=group["weight_decay"])
        weight, update = compute_norms(batch.weights), compute_norms(updates)
        phi = weight if group["clamp"] is None else weight.clamp(*group["clamp"])
        rates = group["lr"] * safe_ratio(weight, update, phi / update)
        torch._foreach_addcmul_(batch.weights, updates, list(rates.unbind()), value=-1)

    def _adam_update(self, batch: ParamBatch, group: dict[str, Any]) -> list[Tensor]:
        """Update the moments; return Adam's update without the learning rate, as new tensors."""
        beta1, beta2 = group["betas"]
        means = batch.state_tensors("exp_avg", self.state)
        squares = batch.state_tensors("exp_avg_sq", self.state)
        for weight in batch.weights:
            self.state[weight]["step"] = self.state[weight].get("step", 0) + 1
        torch._foreach_lerp_(means, batch.gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, batch.gradients, batch.gradients, value=1 - beta2)
        steps = [self.state[weight]["step"] for weight in batch.weights] if group["bias_correction"] else []
        roots = torch._foreach_sqrt(squares)
        if steps:  # m / c1 / (sqrt(v / c2) + eps) with one pass fewer
            torch._foreach_mul_(roots, [(1 - beta1**step) / math.sqrt(1 - beta2**step) for step in steps])
            torch._foreach_add_(roots, [(1 - beta1**step) * group["eps"] for step in steps])
        else:
            torch._foreach_add_(roots, group["eps"])
        torch._foreach_reciprocal_(roots)
        torch._foreach_mul_(roots, means)
        return list(roots)
