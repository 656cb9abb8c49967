"""Functions of torch that do something else while blocks run: one look at each call, whatever is looked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from torch.overrides import TorchFunctionMode

TorchFunction: TypeAlias = Callable[..., Any]
FunctionReplacement: TypeAlias = Callable[[TorchFunction, Sequence[Any], Mapping[str, Any]], Any]
"""Called with the function and its arguments."""


class InterceptFunctions(TorchFunctionMode):
    """While this is active, some functions do what is put in their place.

    Args:
        instead: what, by function.

    Cost:
        a microsecond or two for each call of any function of torch, and each look at an attribute of a tensor.
    """

    def __init__(self, replacements: Mapping[TorchFunction, FunctionReplacement]) -> None:
        super().__init__()
        self.replacements = replacements

    def __torch_function__(
        self,
        func: TorchFunction,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the function returns
        """Call the function, or what is in its place."""
        instead = self.replacements.get(func)
        return func(*args, **(kwargs or {})) if instead is None else instead(func, args, kwargs or {})
