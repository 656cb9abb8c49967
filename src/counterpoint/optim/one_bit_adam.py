"""1-bit Adam: Adam whose mean of squares is frozen after a warm-up, so that ranks can exchange its momentum in 1 bit.

::

    steps 1 to freeze_step    m = beta1 m + (1 - beta1) g    v = beta2 v + (1 - beta2) g^2    gradients are summed
    afterwards                m = beta1 m + (1 - beta1) g    v stays                          momenta, in 1 bit

The exchange is that of ``data(n, compress=onebit, compress_from=freeze_step)``, see
:mod:`counterpoint.runtime.comm.compressed_collectives`. It hands the optimizer a gradient with which its momentum
becomes the one that ranks agreed on, so that the optimizer is the same on one rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from counterpoint.optim.dense_optimizer import DenseOptimizer
from counterpoint.optim.validation import require_at_least, require_counts, require_decay


class OneBitAdam(DenseOptimizer):
    """Adam without bias correction, whose mean of squared gradients is frozen after a number of steps.

    A step is ``w = w - lr (m / (sqrt(v) + eps) + weight_decay w)``.

    Args:
        params: parameters, or groups of them.
        lr: the learning rate.
        freeze_step: number of steps that update the mean of squares ``v``; a fifth of all steps or fewer.
        betas: decay factors of the momentum and of the mean of squares.
        eps: added to the root of the mean of squares.
        weight_decay: added to the update, separate from the gradient.

    Raises:
        PlanError: an option is out of range.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
        >>> optimizer = OneBitAdam([weight], lr=0.1, freeze_step=1)
        >>> for gradient in (2.0, 20.0):
        ...     weight.grad = torch.tensor([gradient])
        ...     optimizer.step()
        >>> [round(float(optimizer.state[weight][key]), 4) for key in ("exp_avg", "exp_avg_sq")]  # 0.18 + 2, 0.001 * 4
        [2.18, 0.004]

    Cost:
        Two state values per parameter, as Adam.

    Source:
        Tang et al., 1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed, ICML 2021,
        algorithm 1. Weight decay is that of DeepSpeed's OneBitAdam.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        freeze_step: int,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        require_at_least(0, lr=lr, weight_decay=weight_decay, eps=eps)
        require_decay(beta1=betas[0], beta2=betas[1])
        require_counts(freeze_step=freeze_step)
        options = {"lr": lr, "freeze_step": freeze_step, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, options)

    def update_param(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        """Update a parameter and its state."""
        state, (beta1, beta2) = self.state[param], group["betas"]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
        if float(state["step"]) < group["freeze_step"]:
            state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        state["step"] += 1
        update = state["exp_avg"] / state["exp_avg_sq"].sqrt().add_(group["eps"])
        if group["weight_decay"]:
            update.add_(param, alpha=group["weight_decay"])
        param.sub_(update, alpha=group["lr"])
