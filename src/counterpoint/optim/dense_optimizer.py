"""The step of optimizers that update each parameter by its own dense gradient."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from counterpoint.errors import DataError


class DenseOptimizer(Optimizer, ABC):
    """An optimizer whose update of a parameter needs its gradient, its state and its group's options alone."""

    @abstractmethod
    def update_param(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        """Update a parameter and its state.

        Args:
            param: the parameter.
            grad: its gradient, which is dense.
            group: its options.
        """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401 - the closure's result
        """Update every parameter that has a gradient; return the closure's result.

        Raises:
            DataError: a gradient is sparse.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._require_dense(param)
                    self.update_param(param, param.grad, group)
        return result

    def _require_dense(self, param: Tensor) -> None:
        if param.grad is not None and param.grad.is_sparse:
            raise DataError(
                f"the gradient of a parameter {tuple(param.shape)} is sparse, but {type(self).__name__} updates whole "
                "parameters; build the embedding with sparse=False, or use SGD or Adagrad"
            )
