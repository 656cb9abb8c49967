"""Function mode that replaces calls of some torch functions while segments run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from torch.overrides import TorchFunctionMode

TorchFunction: TypeAlias = Callable[..., Any]
FunctionReplacement: TypeAlias = Callable[[TorchFunction, Sequence[Any], Mapping[str, Any]], Any]
"""Called with the replaced function and its arguments."""


class InterceptFunctions(TorchFunctionMode):
    """Function mode under which some functions of torch are replaced.

    Args:
        replacements: by function.

    Cost:
        one or two microseconds for each call of any torch function, and for each access to a tensor's attribute.
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
        """Call the function or its replacement."""
        replacement = self.replacements.get(func)
        return func(*args, **(kwargs or {})) if replacement is None else replacement(func, args, kwargs or {})
