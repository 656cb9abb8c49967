"""Functions that a user registers as hooks on gradients: whether they are linear."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from counterpoint.partitioning.hook_state import preserve_stores
from counterpoint.runtime.gradient_code import gradient_errors
from counterpoint.runtime.loss.loss_state import LossState

MAGNITUDES = (1e-10, 1e-5, 1.0, 1e5, 1e10)
"""Of the gradients that a hook is called with: a clamp changes those above its bound only."""


def is_linear_hook(hook: Callable[[Tensor], Tensor | None], param: Tensor) -> bool:
    """Tell whether a gradient hook gives for a sum of gradients the sum of what it gives for each.

    It is called with random numbers of several magnitudes; what it keeps, and the generators, are as before.

    Args:
        hook: the user's.
        param: that it is registered on.

    Example:
        >>> param = torch.zeros(3)
        >>> is_linear_hook(lambda grad: grad * 2, param), is_linear_hook(lambda grad: grad.clamp(-1, 1), param)
        (True, False)
    """
    generator, state = torch.Generator().manual_seed(0), LossState(hook)
    detached = param.detach()

    def draw(magnitude: float) -> Tensor:
        return (torch.randn(param.shape, generator=generator) * magnitude).to(detached)

    def call(grad: Tensor) -> Tensor:
        given = grad.clone()
        result = hook(given)
        return given if result is None else result

    every = [*range(len(state.slots))]
    with torch.no_grad(), state.preserve_generators({param.device}), state.restored(every), preserve_stores(hook):
        for magnitude in MAGNITUDES:
            first, second = draw(magnitude), draw(magnitude)
            both = first + second
            if not both.isfinite().all():  # as in float16
                continue
            try:
                one, two, together = call(first), call(second), call(both)
            except Exception:  # noqa: BLE001 - whatever it raises for a gradient, it may raise for parts only
                return False
            if not together.isfinite().all() or any(
                gradient_errors([together], [one + two], torch.finfo(param.dtype).eps)
            ):
                return False
    return True
