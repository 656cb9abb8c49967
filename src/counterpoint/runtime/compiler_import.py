"""Call functions that torch excludes from compilation without importing torch's compiler."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

DYNAMO = "torch._dynamo"
DISABLE_CACHE_ATTRIBUTE = "__dynamo_disable"
"""Attribute of a function in which its wrapper keeps what it calls instead."""


class _NoCompiler(ModuleType):
    """Stands for ``torch._dynamo`` while nothing is compiled: functions that are excluded are called as they are."""

    def __init__(self) -> None:
        super().__init__(DYNAMO)
        self.excluded: list[Any] = []

    def disable(self, function: Callable[..., Any] | None = None, *args: object, **options: object) -> Any:  # noqa: ANN401 - as torch's
        """Return a function that torch itself excludes; the compiler does the rest, for a user."""
        if function is None or options.get("wrapping", True):  # torch's wrappers give wrapping=False
            return self.__getattr__("disable")(function, *args, **options)
        self.excluded.append(function)
        return function

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any attribute of a module
        """Return an attribute of the compiler, which somebody uses after all.

        Raises:
            AttributeError: it is one that modules are only asked for, as by ``inspect``.
        """
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        if sys.modules.get(DYNAMO) is self:
            del sys.modules[DYNAMO]
        import torch._dynamo as dynamo

        return getattr(dynamo, name)


@contextmanager
def without_dynamo_import() -> Iterator[None]:
    """Allow functions that torch excludes from compilation to be called inside; restore torch afterwards.

    Methods of ``torch.optim.Optimizer``, and operations on the meta device, have wrappers that make the compiler ignore
    them. A wrapper imports the compiler on its first call: a second of processor time, and 70 MB in every rank. As long
    as nothing else has imported it, nothing is compiled, and there is nothing to be excluded from. Code inside that
    uses the compiler imports it.
    """
    if DYNAMO in sys.modules:
        yield
        return
    stand_in = sys.modules[DYNAMO] = _NoCompiler()
    try:
        yield
    finally:
        if sys.modules.get(DYNAMO) is stand_in:
            del sys.modules[DYNAMO]
        for function in stand_in.excluded:
            if vars(function).get(DISABLE_CACHE_ATTRIBUTE) is function:
                delattr(function, DISABLE_CACHE_ATTRIBUTE)
