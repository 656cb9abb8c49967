"""Call functions of torch without importing torch's compiler, or what it has for symbolic sizes with sympy."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, reduce
from inspect import CO_OPTIMIZED
from operator import and_, or_
from threading import Lock
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import Tensor

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


SYMBOLS, SYMBOLIC_SHAPES = "sympy", "torch.fx.experimental.symbolic_shapes"
LOCK = Lock()


def _return(value: Any) -> Any:  # noqa: ANN401 - a condition or a size
    return value


def _are_equal(first: Any, second: Any) -> bool:  # noqa: ANN401 - numbers, or sequences of these
    if isinstance(first, tuple | list) and isinstance(second, tuple | list):
        return len(first) == len(second) and all(map(_are_equal, first, second))
    return bool(first == second)


OF_NUMBERS: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(("expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious"), _return),
    **dict.fromkeys(("statically_known_true", "guarding_hint_or_throw"), _return),
    "sym_and": lambda *conditions: reduce(and_, conditions),
    "sym_or": lambda *conditions: reduce(or_, conditions),
    "sym_eq": _are_equal,
    "has_guarding_hint": lambda _: True,
    "is_nested_int": lambda _: False,
    "free_unbacked_symbols": lambda _: set(),
}
"""What functions of ``torch.fx.experimental.symbolic_shapes`` return if nothing is symbolic."""


def _is_of_numbers(value: object) -> bool:
    """Tell whether a condition or a size is a number, or all sizes of a tensor or a sequence are."""
    if isinstance(value, Tensor):
        sizes = (*value.shape, *value.stride(), value.storage_offset()) if value.layout == torch.strided else (None,)
        return _is_of_numbers(sizes)
    return all(map(_is_of_numbers, value)) if isinstance(value, tuple | list) else type(value) in {bool, int}


def _call(name: str, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - as torch's function of the name
    """Call a function of ``torch.fx.experimental.symbolic_shapes``, which is imported if something may be symbolic."""
    if not options and all(map(_is_of_numbers, args)):
        return OF_NUMBERS[name](*args)
    return getattr(_import_module(SYMBOLIC_SHAPES), name)(*args, **options)


class _Symbol:
    """Class of nothing: as long as sympy is not imported, no value is one of its."""


class _NoSymbols(ModuleType):
    """Stands for a module of symbols while sizes are numbers: sympy, or what torch has for them.

    It has what functions of torch ask for. For all else, the module is imported.

    Args:
        name: of the module.
        attributes: for functions of torch.
    """

    def __init__(self, name: str, attributes: Mapping[str, Any]) -> None:
        super().__init__(name)
        self._attributes = attributes

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any attribute of a module
        """Return an attribute.

        Raises:
            AttributeError: it is one that modules are only asked for, as by ``inspect``.
        """
        is_package = self.__name__ == SYMBOLS
        if name.startswith("__") and name != "__all__" and not (is_package and name == "__path__"):
            raise AttributeError(name)
        if name in self._attributes and sys.modules.get(self.__name__) is self and _is_torch_function(sys._getframe(1)):  # noqa: SLF001 - who asks
            return self._attributes[name]
        return getattr(_import_module(self.__name__), name)


def _is_torch_function(frame: FrameType) -> bool:
    """Tell whether a frame is that of a function of torch, and not the body of a module or a class."""
    name = str(frame.f_globals.get("__name__"))
    return name.split(".")[0] == "torch" and bool(frame.f_code.co_flags & CO_OPTIMIZED)


def _import_module(name: str) -> ModuleType:
    """Import a module of symbols instead of what stands for it."""
    _remove_stand_ins(name, SYMBOLS)
    return importlib.import_module(name)


def _remove_stand_ins(*names: str) -> None:
    with LOCK:  # ranks may be threads
        for name in names:
            if isinstance(sys.modules.get(name), _NoSymbols):
                del sys.modules[name]


@contextmanager
def without_sympy_import() -> Iterator[None]:
    """Allow functions of torch that import sympy to compare numbers to be called inside; restore torch afterwards.

    Operations on the meta device compare sizes by functions that also know symbolic ones, as ``torch.autograd.grad``
    does if it is given gradients. The first comparison imports sympy: 34 MB in every rank.
    """
    with LOCK:
        is_imported = SYMBOLS in sys.modules or SYMBOLIC_SHAPES in sys.modules
        if not is_imported:
            of_numbers = {name: partial(_call, name) for name in OF_NUMBERS}
            sys.modules.setdefault(SYMBOLS, _NoSymbols(SYMBOLS, {"Basic": _Symbol}))
            sys.modules.setdefault(SYMBOLIC_SHAPES, _NoSymbols(SYMBOLIC_SHAPES, of_numbers))
    try:
        yield
    finally:
        if not is_imported:
            _remove_stand_ins(SYMBOLS, SYMBOLIC_SHAPES)
