"""Function mode under which code that asks for float32 gets another dtype.

Models convert values to float32 where lower precision would not do: in norms, in a softmax, in the losses of
transformers. In a comparison in float64 such a conversion rounds, differently for every order of summation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class ReplaceFloat32(TorchFunctionMode):
    """Function mode under which float32 is another dtype, wherever it is asked for.

    Args:
        dtype: the other one.

    Example:
        >>> with ReplaceFloat32(torch.float64):
        ...     torch.ones(1).float().dtype, torch.zeros(1, dtype=torch.float32).dtype
        (torch.float64, torch.float64)
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the function returns
        """Call the function with the other dtype."""
        if func is Tensor.float:
            return Tensor.to(args[0], self.dtype)
        args = [self.dtype if argument is torch.float32 else argument for argument in args]
        named = {
            name: self.dtype if argument is torch.float32 else argument for name, argument in (kwargs or {}).items()
        }
        return func(*args, **named)
