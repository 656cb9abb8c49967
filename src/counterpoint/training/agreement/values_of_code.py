"""Values that the code of a user's model and loss reads from outside: globals, closures, environment variables."""

from __future__ import annotations

import copy
import inspect
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

from counterpoint.launchers.environment import environment_variables

FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, partial)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
MAX_DEPTH = 3
"""Of collections and objects in each other, into which is looked."""
_NOT_IN_A_CALL = frozenset({
    "__init__", "__new__", "__init_subclass__", "__post_init__", "__del__", "__repr__", "__str__", "__reduce__",
    "__reduce_ex__", "__getstate__", "__setstate__", "__copy__", "__deepcopy__",
})  # fmt: skip

_NUMBERS = (bool, int, float, str, type(None))
_COLLECTIONS = (list, dict, set, tuple)
_LIBRARIES = frozenset({"torch", "counterpoint", "builtins", "typing", "abc"})
_LIBRARY_DIRS = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
_MAX_ENTRIES = 1000  # of a collection that is compared in every step
_MAX_NESTED = 100  # collections in each other, far below the limit of recursion
_OF_A_PROCESS = frozenset({
    "_io", "_thread", "asyncio", "concurrent", "http", "io", "logging", "loguru", "mlflow", "multiprocessing", "queue",
    "selectors", "socket", "sqlite3", "ssl", "structlog", "subprocess", "tempfile", "tensorboardX", "threading", "tqdm",
    "urllib", "wandb",
})  # fmt: skip
"""Packages whose objects are loggers, files, locks, threads and the like: no settings of a model."""


@dataclass(frozen=True, slots=True)
class WatchedValue:
    """A value that code may change.

    Args:
        name: for errors.
        holder: has it, such as the ``vars`` of a module.
        key: of the value.
        value: that it had.
        path: by which code reads it, such as ``config.scale``; the key if empty.
    """

    name: str
    holder: Mapping[Any, Any]
    key: Any
    value: object
    path: str = ""

    def read(self) -> object:
        """Return the present value."""
        return self.holder.get(self.key)

    def copy(self) -> WatchedValue:
        """Return the same with a copy of a collection, which is then compared by its entries."""
        if isinstance(self.value, np.ndarray):
            return replace(self, value=self.value.copy())
        if not isinstance(self.value, _COLLECTIONS):
            return self
        return replace(self, value=copy.copy(self.value) if self.key in HOOKS else copy.deepcopy(self.value))

    def is_changed(self) -> bool:
        """Return whether the present value is another one."""
        current = self.holder.get(self.key)
        if current is self.value:
            return False
        if isinstance(current, np.ndarray) and isinstance(self.value, np.ndarray):
            is_alike = (current.dtype, current.shape) == (self.value.dtype, self.value.shape)
            return not is_alike or current.tobytes() != self.value.tobytes()
        return type(current) is not type(self.value) or isinstance(current, Tensor) or bool(current != self.value)


def is_plain(value: object, within: tuple[int, ...] = ()) -> bool:
    """Tell whether a value is a number, a text or None, or a collection of them that does not contain itself.

    Args:
        value: any value.
        within: by ``id`` the collections that contain it.
    """
    if not isinstance(value, _COLLECTIONS):
        return isinstance(value, _NUMBERS)
    if len(value) > _MAX_ENTRIES or len(within) >= _MAX_NESTED or id(value) in within:
        return False
    entries = [*value, *value.values()] if isinstance(value, dict) else value
    return all(is_plain(entry, (*within, id(value))) for entry in entries)


def plain_parts(
    name: str, holder: object, seen: dict[int, int], where: str = "", depth: int = MAX_DEPTH
) -> Iterator[WatchedValue]:
    """Yield the plain attributes of an object, such as a configuration, that is not a module, and of objects in it.

    Args:
        name: of the object.
        holder: the object.
        seen: by ``id`` how deep objects were looked into; only those that were looked into less deep are again.
        where: what the object is part of, for errors.
        depth: how deep to look into it.
    """
    if seen.get(id(holder), -1) >= depth:
        return
    seen[id(holder)] = depth
    for attribute, item in vars(holder).items():
        if attribute.startswith("_"):
            continue
        if is_plain(item):
            yield WatchedValue(f"{name}.{attribute}{where}", vars(holder), attribute, item)
        elif depth and has_attributes(item) and not isinstance(item, ModuleType):
            yield from plain_parts(f"{name}.{attribute}", item, seen, where, depth - 1)


def has_attributes(value: object) -> bool:
    """Tell whether a value is an object of the user's that holds attributes, such as a configuration."""
    kind = type(value)
    return (
        hasattr(value, "__dict__")
        and not (isinstance(value, type | Tensor | nn.Module) or callable(value))
        and kind.__module__.partition(".")[0] not in {"torch", "counterpoint"}
        and _OF_A_PROCESS.isdisjoint(base.__module__.partition(".")[0] for base in kind.__mro__)
    )


def values_of_code(model: nn.Module) -> Iterator[WatchedValue]:
    """Yield the plain attributes and the methods of the modules' classes, and what the functions of the model read."""
    for kind in _own_classes(model):
        if "forward" not in vars(kind):
            yield WatchedValue(f"{kind.__qualname__}.forward", vars(kind), "forward", None)
        for key, value in vars(kind).items():
            if isinstance(value, FunctionType):
                yield WatchedValue(f"{kind.__qualname__}.{key}", vars(kind), key, value)
    yield from class_values_of(model)
    functions = _functions_of(methods_of(model))
    for function in functions:
        yield from _defaults_of(function)
    yield from _values_read_by(functions)


def class_values_of(model: nn.Module) -> Iterator[WatchedValue]:
    """Yield the plain public attributes of the modules' classes that are not torch's."""
    for kind in _own_classes(model):
        for key, value in vars(kind).items():
            if not key.startswith("_") and is_plain(value):
                yield WatchedValue(f"{kind.__qualname__}.{key}", vars(kind), key, value)


def methods_of(model: nn.Module) -> list[object]:
    """Return what the classes of the modules that are not torch's define, and the attributes of the modules."""
    functions = [value for module in model.modules() for value in vars(module).values()]
    return functions + [value for kind in _own_classes(model) for value in vars(kind).values()]


def code_run_by(root: object) -> list[FunctionType]:
    """Return the functions that a call of a module or of another callable may run: not those of ``__init__`` alone.

    These are ``forward`` and special methods, functions among attributes, and functions and methods whose names are in
    the code of one of these.

    Args:
        root: the module or callable.
    """
    parts = [*root.modules()] if isinstance(root, nn.Module) else [root]
    classes = dict.fromkeys(kind for part in parts for kind in type(part).__mro__)
    methods = [item for kind in classes if not _is_of_library(kind) for item in vars(kind).items()]
    is_special = {key for key, _ in methods if key.startswith("__")} - _NOT_IN_A_CALL
    attributes = [value for part in parts for value in getattr(part, "__dict__", {}).values()]
    given = _functions_of(value for one in [root, *attributes] for value in (one, _unwrapped(one)))
    reached: set[str] = {"forward", *is_special}
    while True:
        called = [value for key, value in methods if key in reached]
        functions = _functions_of([*given, *called, *map(_unwrapped, called)])
        names = {name for function in functions for name in _names_in(function.__code__)} - _NOT_IN_A_CALL
        if names <= reached:
            return functions
        reached |= names


def _unwrapped(value: object) -> object:
    """Return the function that a decorator of a library wraps."""
    return inspect.unwrap(value) if isinstance(value, FunctionType) else value


def names_in_own(functions: Iterable[FunctionType]) -> set[str]:
    """Return the names of globals and attributes in the code of functions that are not of an installed package."""
    own = [one for one in functions if not one.__code__.co_filename.startswith(_LIBRARY_DIRS)]
    return {name for function in own for name in _names_in(function.__code__)}


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names in code, and in that of functions and comprehensions in it."""
    yield from code.co_names
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _names_in(value)


def _own_classes(model: nn.Module) -> list[type]:
    """Return the classes of the modules that are not torch's, in an order that is the same in every process."""
    classes = dict.fromkeys(kind for module in model.modules() for kind in type(module).__mro__)
    return [kind for kind in classes if not _is_of_library(kind)]


def _is_of_library(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _LIBRARIES


def values_read_by_own(functions: Iterable[object]) -> Iterator[WatchedValue]:
    """Yield plain values that functions of the user's, and those that they call, read from outside of themselves.

    These are globals, variables of closures, context variables, environment variables, and attributes of objects, such
    as a configuration, whose names are in the code. Functions of installed packages are left out.

    Args:
        functions: functions, methods or partials; other objects are left out.
    """
    own = [one for one in _functions_of(functions) if not one.__code__.co_filename.startswith(_LIBRARY_DIRS)]
    names = {name for function in own for name in function.__code__.co_names}
    for value in _values_read_by(own):
        if value.key in names or not isinstance(value.holder, dict):
            yield value


def _values_read_by(functions: Iterable[FunctionType]) -> Iterator[WatchedValue]:
    """Yield plain values that functions read from outside of themselves."""
    seen: dict[tuple[int, str], object] = {}  # with the holders, as the id of one that was freed may be that of another
    for function in functions:
        for watched in _environment_of(function):
            if seen.setdefault((id(watched.holder), watched.key), watched) is watched:
                yield watched
        for name, read_from, key in _names_of(function):
            if (id(read_from), key) in seen:
                continue
            seen[id(read_from), key] = read_from
            holder, held_key, value = _look_into_context(read_from, key)
            if is_plain(value):
                yield WatchedValue(name, holder, held_key, value, path=key)
            elif has_attributes(value) and not isinstance(value, ModuleType):
                for part in plain_parts(name, value, {}):
                    yield replace(part, path=key + part.name.removeprefix(name))


def _environment_of(function: FunctionType) -> Iterator[WatchedValue]:
    """Yield the environment variables whose names are constants, globals or defaults of a function that reads some."""
    code = function.__code__
    if not {"environ", "getenv"}.intersection(code.co_names):
        return
    read = [function.__globals__.get(key) for key in code.co_names]
    read += [*code.co_consts, *(function.__defaults__ or ()), *ClosureVariables(function).values()]
    values = environment_variables()
    for key in dict.fromkeys(value for value in read if isinstance(value, str) and value.isidentifier()):
        yield WatchedValue(f"the environment variable {key}", values, key, values.get(key))


def _look_into_context(holder: Mapping[str, Any], key: str) -> tuple[Mapping[str, Any], str, Any]:
    """Return where a value is, its key and the value; of a context variable the value that it has."""
    if isinstance(holder[key], ContextVar):
        holder, key = ContextValue(holder[key]), "value"
    return holder, key, holder.get(key)


def _defaults_of(function: FunctionType) -> Iterator[WatchedValue]:
    """Yield the collections among the default arguments of a function, which code may change in place."""
    name = f"a default argument of {function.__qualname__}"
    for holder in (ListEntries(function.__defaults__ or ()), function.__kwdefaults__ or {}):
        for key, value in holder.items():
            if isinstance(value, _COLLECTIONS) and is_plain(value):
                yield WatchedValue(name, holder, key, value)


def _functions_of(values: Iterable[object]) -> list[FunctionType]:
    """Return the functions among some values that are not torch's, and those that functions of the user's call."""
    found: dict[int, FunctionType] = {}
    pending = list(values)
    while pending:
        function = pending.pop()
        function = getattr(function, "func", function)  # of a partial
        function = getattr(function, "__func__", function)  # of a method
        function = getattr(function, "fget", function)  # of a property
        if not isinstance(function, FunctionType) or id(function) in found or len(found) >= _MAX_ENTRIES:
            continue
        if str(function.__module__).partition(".")[0] not in _LIBRARIES:
            found[id(function)] = function
            if not function.__code__.co_filename.startswith(_LIBRARY_DIRS):
                pending += [holder[key] for _, holder, key in _names_of(function)]
    return list(found.values())


def _names_of(function: FunctionType) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """Yield the globals and the variables of its closure that a function reads: for errors, where, and the key."""
    for key in function.__code__.co_names:
        if key in function.__globals__:
            yield f"the global {key} of {function.__module__}", function.__globals__, key
    variables = ClosureVariables(function)
    for key in variables:
        yield f"the variable {key} of {function.__qualname__}", variables, key


class ListEntries(Mapping[int, Any]):
    """The entries of a list or tuple, by index.

    Args:
        values: the list.

    Example:
        >>> values = ["a"]
        >>> entries = ListEntries(values)
        >>> values.append("b")
        >>> dict(entries), entries.get(2)
        ({0: 'a', 1: 'b'}, None)
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self.values_by_index = values

    def __getitem__(self, index: int) -> Any:  # noqa: ANN401 - of any type
        if not 0 <= index < len(self):
            raise KeyError(index)
        return self.values_by_index[index]

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __len__(self) -> int:
        return len(self.values_by_index)


class ContextValue(Mapping[str, Any]):
    """The value of a context variable, as ``value``; empty if it has none.

    Args:
        variable: the context variable.

    Example:
        >>> scale = ContextVar("scale", default=2)
        >>> dict(ContextValue(scale))
        {'value': 2}
    """

    def __init__(self, variable: ContextVar[Any]) -> None:
        self.variable = variable

    def __getitem__(self, key: str) -> Any:  # noqa: ANN401 - of any type
        try:
            return self.variable.get()
        except LookupError:
            raise KeyError(key) from None

    def __iter__(self) -> Iterator[str]:
        return iter(("value",) if self else ())

    def __len__(self) -> int:
        return int("value" in self)


class ClosureVariables(Mapping[str, Any]):
    """The variables of the functions around a function that it reads, by name.

    Args:
        function: the inner one.

    Example:
        >>> def make(scale):
        ...     return lambda x: x * scale
        >>> dict(ClosureVariables(make(3)))
        {'scale': 3}
    """

    def __init__(self, function: FunctionType) -> None:
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        self.cells = {name: cell for name, cell in cells if not _is_empty(cell)}

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 - of any type
        return self.cells[name].cell_contents

    def __iter__(self) -> Iterator[str]:
        return iter(self.cells)

    def __len__(self) -> int:
        return len(self.cells)


def _is_empty(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return True
    return False
