"""LARS: SGD with momentum and layer-wise learning rates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from counterpoint.optim.layerwise import (
    ExcludeRule,
    LayerwiseOptimizer,
    ParamBatch,
    compute_norms,
    norm_dtype,
    safe_ratio,
)
from counterpoint.optim.validation import renamed_parameters, require_at_least, require_decay


@renamed_parameters({"trust": "trust_coefficient"})
class LARS(LayerwiseOptimizer):
    """SGD with momentum in which the learning rate of each parameter is proportional to its norm.

    For weights ``w``, gradient ``g``, momentum ``m`` and weight decay ``b`` of one parameter, with norms of the whole
    parameter::

        rate = lr * trust_coefficient * |w| / (|g| + b * |w| + eps)
        v    = m * v + rate * (g + b * w)
        w    = w - v

    If ``|w|`` or ``|g|`` is 0, the rate is ``lr``. Excluded parameters have the rate ``lr`` and no weight decay. As in
    the paper the learning rate is part of ``v``, so that a change of the rate does not rescale earlier updates.

    Args:
        params: parameters, or groups of them.
        lr: the global learning rate.
        momentum: fraction of the last update that is kept.
        weight_decay: L2 penalty, part of the gradient and of its norm.
        trust_coefficient: norm of an update relative to that of the weights.
        eps: added to the denominator of the rate.
        nesterov: whether to use Nesterov momentum.
        exclude: ``vectors`` for all parameters of at most one dim, such as biases and norm weights; ``nothing``; or
            ``everything`` for a whole group.

    Raises:
        PlanError: an option is out of range.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([[3.0, 4.0]]))
        >>> optimizer = LARS([weight], lr=1.0, trust_coefficient=0.1, eps=0.0, weight_decay=0.0)
        >>> weight.grad = torch.tensor([[0.0, 100.0]])
        >>> optimizer.step()
        >>> weight.tolist()  # moved by a tenth of its norm, however large the gradient
        [[3.0, 3.5]]

    Cost:
        One state value per parameter, as SGD with momentum; two more norms per step.

    Source:
        You, Gitman and Ginsburg, Large batch training of convolutional networks, arXiv:1708.03888, 2017, algorithm 1.
    """

    def __init__(  # noqa: PLR0913 - the paper's options
        self,
        params: ParamsT,
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
        trust_coefficient: float = 1e-3,
        eps: float = 1e-8,
        nesterov: bool = False,
        exclude: ExcludeRule = "vectors",
    ) -> None:
        require_at_least(0, lr=lr, weight_decay=weight_decay, trust_coefficient=trust_coefficient, eps=eps)
        require_decay(momentum=momentum)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "nesterov": nesterov,
            "exclude": exclude,
        }
        super().__init__(params, defaults)

    def update_batch(self, batch: ParamBatch, group: dict[str, Any]) -> None:
        """Take one step on a batch of parameters."""
        weights, gradients = batch.weights, batch.gradients
        momentum = batch.state_tensors("momentum_buffer", self.state)
        decay = 0.0 if batch.is_excluded else group["weight_decay"]
        rates = list(self._rates(batch, group).unbind())
        torch._foreach_mul_(momentum, group["momentum"])
        torch._foreach_addcmul_(momentum, gradients, rates)
        if decay:
            torch._foreach_addcmul_(momentum, weights, rates, value=decay)
        if not group["nesterov"]:
            torch._foreach_sub_(weights, momentum)
            return
        if decay:
            torch._foreach_mul_(weights, [1 - decay * rate for rate in rates])
        torch._foreach_addcmul_(weights, gradients, rates, value=-1)
        torch._foreach_add_(weights, momentum, alpha=-group["momentum"])

    def _rates(self, batch: ParamBatch, group: dict[str, Any]) -> Tensor:
        """Return the learning rate of each parameter."""
        if batch.is_excluded:
            return torch.full(
                (len(batch.weights),), group["lr"], dtype=norm_dtype(batch.weights), device=batch.weights[0].device
            )
        weight, gradient = compute_norms(batch.weights), compute_norms(batch.gradients)
        ratio = group["trust_coefficient"] * weight / (gradient + group["weight_decay"] * weight + group["eps"])
        return safe_ratio(weight, gradient, ratio).mul(group["lr"])
