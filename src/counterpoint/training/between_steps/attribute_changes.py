"""Attributes of a user's model that code between two steps changes, where ranks run a trace or copies of it."""

from __future__ import annotations

import copy
import reprlib
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

from counterpoint.errors import DataError
from counterpoint.launchers.environment import environment_variables
from counterpoint.partitioning.dry_run import TrainingModes


class AttributeCheck:
    """Detects changes of the model's plain attributes between steps, such as a temperature or the rate of a dropout.

    Ranks that run copies of the model, or a trace of it, have the values of the first step. Compared are numbers, texts
    and collections of them, in attributes of modules or of objects in these (a configuration), functions, tensors that
    are no buffers, and hooks; under a trace also attributes and methods of classes, and the globals, variables of
    closures, environment variables and context variables that functions read. Attributes that the model's own forward
    changes, which user code may call between steps, are left out; of torch's modules only floats, functions and hooks
    are compared.
    """

    def __init__(self) -> None:
        self.watched: list[WatchedValue] = []
        self.tensors: list[tuple[WatchedValue, int]] = []  # with their version counters; -1 if a trace has the tensor
        self.modes: list[tuple[nn.Module, bool]] = []  # of the model and its submodules
        self.names: list[str] = []  # of the modules
        self.plain_forwards: list[
            tuple[str, dict[str, Any]]
        ] = []  # the attributes of modules with their class's forward

    def watch(self, model: nn.Module, *, is_traced: bool) -> None:
        """Compare the attributes of a model with their present values from now on."""
        arrays = [*_arrays_of(model)]
        self.watched = [value.copy() for value in _plain_values(model)]
        self.watched += [value.copy() for value in arrays if isinstance(value.value, np.ndarray)]
        self.tensors = [
            (value, -1 if is_traced else value.value._version)  # noqa: SLF001 - there is no other way to see changes
            for value in arrays
            if isinstance(value.value, Tensor)
        ]
        if is_traced:
            self.watched += [value.copy() for value in _values_of_code(model)]
        self.modes = TrainingModes(model).flags
        self.names = [name for name, _ in model.named_modules()]
        attributes = [(name, vars(module)) for name, module in model.named_modules()]
        self.plain_forwards = [(name, values) for name, values in attributes if "forward" not in values]

    def find_new_modes(self) -> str:
        """Return which submodules of a model in training were put into another mode than they had; else empty."""
        if not self.modes or not self.modes[0][0].training:
            return ""
        changed = [index for index, (module, training) in enumerate(self.modes) if module.training is not training]
        if not changed:
            return ""
        name, training = self.names[changed[0]], self.modes[changed[0]][0].training
        more = f" and {len(changed) - 1} other modules were" if changed[1:] else " was"
        return f"{name or 'the model'}{more} put into {'training' if training else 'evaluation'} mode"

    def require_unchanged(self, plan: str, run_forward: Callable[[], object]) -> None:
        """Check that the attributes have the values of the first step.

        Args:
            plan: of the ranks, for the error.
            run_forward: runs the model once.

        Raises:
            DataError: one has another value, and a forward does not change it.
        """
        if not self._find_changed():
            return
        self._leave_out_changed_by(run_forward)
        for name, change in self._find_changed():
            raise DataError(
                f"{name} was changed {change} between two steps, but under {plan} "
                "ranks run the model as it was in the first step; give the value to forward as an input, which may "
                "differ in every step, or close() and call parallelize(...) again (or make a new Trainer)"
            )

    def _find_changed(self) -> list[tuple[str, str]]:
        changed = [
            (f"{name}.forward".lstrip(".") + " of the model", "to another function")
            for name, values in self.plain_forwards
            if "forward" in values
        ]
        changed += [
            (watched.name, f"from {reprlib.repr(watched.value)} to {reprlib.repr(watched.read())}")
            for watched in self.watched
            if watched.is_changed()
        ]
        for watched, version in self.tensors:
            current = watched.read()
            if current is not watched.value:
                changed.append((watched.name, "to another value"))
            elif version >= 0 and watched.value._version != version:  # type: ignore[attr-defined] # noqa: SLF001 - as above
                changed.append((watched.name, "in place"))
        return changed

    def _leave_out_changed_by(self, run_forward: Callable[[], object]) -> None:
        every = [*self.watched, *(watched for watched, _ in self.tensors)]
        before = [replace(watched, value=watched.read()).copy() for watched in every]
        with suppress(Exception):  # the step fails likewise, with its location
            run_forward()
        changed = {id(watched) for watched, value in zip(every, before, strict=True) if value.is_changed()}
        for watched, value in zip(every, before, strict=True):
            if id(watched) in changed and isinstance(watched.holder, dict):
                watched.holder[watched.key] = value.value
        self.watched = [watched for watched in self.watched if id(watched) not in changed]
        self.tensors = [(watched, version) for watched, version in self.tensors if id(watched) not in changed]


@dataclass(frozen=True, slots=True)
class WatchedValue:
    """A value that code may change.

    Args:
        name: for errors.
        holder: has it, such as the ``vars`` of a module.
        key: of the value.
        value: that it had.
    """

    name: str
    holder: Mapping[Any, Any]
    key: Any
    value: object

    def read(self) -> object:
        """Return the present value."""
        return self.holder.get(self.key)

    def copy(self) -> WatchedValue:
        """Return the same with a copy of a collection, which is then compared by its entries."""
        if isinstance(self.value, np.ndarray):
            return replace(self, value=self.value.copy())
        if not isinstance(self.value, _COLLECTIONS):
            return self
        return replace(self, value=copy.copy(self.value) if self.key in _HOOKS else copy.deepcopy(self.value))

    def is_changed(self) -> bool:
        """Return whether the present value is another one."""
        current = self.holder.get(self.key)
        if current is self.value:
            return False
        if isinstance(current, np.ndarray) and isinstance(self.value, np.ndarray):
            is_alike = (current.dtype, current.shape) == (self.value.dtype, self.value.shape)
            return not is_alike or current.tobytes() != self.value.tobytes()
        return type(current) is not type(self.value) or isinstance(current, Tensor) or bool(current != self.value)


_NUMBERS = (bool, int, float, str, type(None))
_COLLECTIONS = (list, dict, set, tuple)
FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, partial)
_LIBRARIES = frozenset({"torch", "counterpoint", "builtins", "typing", "abc"})
_LIBRARY_DIRS = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_REGISTRIES = frozenset(vars(nn.Module()))  # of parameters, buffers, modules and hooks
_MAX_DEPTH = 3  # of collections and objects in each other, in which arrays are looked for
_MAX_NUMBERS = 10_000  # of an array of numpy that is compared in every step
_MAX_ENTRIES = 1000  # of a collection that is compared in every step


def _is_plain(value: object) -> bool:
    """Tell whether a value is a number, a text or None, or a collection of them."""
    if isinstance(value, _COLLECTIONS):
        entries = [*value, *value.values()] if isinstance(value, dict) else value
        return len(value) <= _MAX_ENTRIES and all(map(_is_plain, entries))
    return isinstance(value, _NUMBERS)


def _plain_values(model: nn.Module) -> Iterator[WatchedValue]:
    """Yield the plain attributes and hooks of modules, and the plain attributes of objects in them."""
    seen: dict[int, int] = {}
    for path, module in model.named_modules():
        is_torchs = type(module).__module__.startswith("torch.nn.")
        for key, value in vars(module).items():
            name = f"{path}.{key}".lstrip(".") + " of the model"
            if key in _HOOKS and isinstance(value, dict):
                yield WatchedValue(name, vars(module), key, value)
            elif key == "training" or key.startswith("_"):
                continue
            elif isinstance(value, FUNCTIONS) or (isinstance(value, float) if is_torchs else _is_plain(value)):
                yield WatchedValue(name, vars(module), key, value)
            elif not is_torchs and _has_attributes(value):
                yield from _plain_parts(f"{path}.{key}".lstrip("."), value, seen, " of the model")


def _plain_parts(
    name: str, holder: object, seen: dict[int, int], where: str = "", depth: int = _MAX_DEPTH
) -> Iterator[WatchedValue]:
    """Yield the plain attributes of an object, such as a configuration, that is no module, and of objects in it.

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
        if _is_plain(item):
            yield WatchedValue(f"{name}.{attribute}{where}", vars(holder), attribute, item)
        elif depth and _has_attributes(item) and not isinstance(item, ModuleType):
            yield from _plain_parts(f"{name}.{attribute}", item, seen, where, depth - 1)


def _has_attributes(value: object) -> bool:
    """Tell whether a value is an object of the user's that holds attributes, such as a configuration."""
    kind = type(value)
    return (
        hasattr(value, "__dict__")
        and not (isinstance(value, type | Tensor | nn.Module) or callable(value))
        and kind.__module__.partition(".")[0] not in {"torch", "counterpoint"}
    )


def _arrays_of(model: nn.Module) -> Iterator[WatchedValue]:
    """Yield tensors that are no parameters or buffers, and arrays of numpy, in attributes and in what these hold."""
    for path, module in model.named_modules():
        own = {key: value for key, value in vars(module).items() if key not in _REGISTRIES}
        for watched in _arrays_in(path, own, _MAX_DEPTH):
            holder = vars(module) if watched.holder is own else watched.holder
            yield replace(watched, name=f"{watched.name.lstrip('.')} of the model", holder=holder)


def _arrays_in(path: str, holder: Mapping[Any, Any], depth: int) -> Iterator[WatchedValue]:
    for key, value in holder.items():
        name = f"{path}[{key!r}]" if isinstance(holder, ListEntries) or not isinstance(key, str) else f"{path}.{key}"
        if isinstance(value, Tensor | np.ndarray):
            is_param = isinstance(value, Tensor) and value.requires_grad
            is_large = isinstance(value, np.ndarray) and value.size > _MAX_NUMBERS
            if not is_param and not is_large:
                yield WatchedValue(name, holder, key, value)
        elif depth and (entries := _entries_of(value)) is not None:
            yield from _arrays_in(name, entries, depth - 1)


def _entries_of(value: object) -> Mapping[Any, Any] | None:
    """Return what a collection or an object of the user's holds; None for another value."""
    if isinstance(value, dict):
        return value
    if isinstance(value, list | tuple):
        return ListEntries(value)
    return vars(value) if _has_attributes(value) else None


def _values_of_code(model: nn.Module) -> Iterator[WatchedValue]:
    """Yield the plain attributes and the methods of the modules' classes, and what the functions of the model read."""
    classes = {kind for module in model.modules() for kind in type(module).__mro__}
    classes = {kind for kind in classes if kind.__module__.partition(".")[0] not in _LIBRARIES}
    functions = [value for module in model.modules() for value in vars(module).values()]
    for kind in sorted(classes, key=lambda kind: f"{kind.__module__}.{kind.__qualname__}"):
        functions += vars(kind).values()
        if "forward" not in vars(kind):
            yield WatchedValue(f"{kind.__qualname__}.forward", vars(kind), "forward", None)
        for key, value in vars(kind).items():
            if isinstance(value, FunctionType) or (not key.startswith("_") and _is_plain(value)):
                yield WatchedValue(f"{kind.__qualname__}.{key}", vars(kind), key, value)
    seen: set[tuple[int, str]] = set()
    for function in _functions_of(functions):
        yield from (*_defaults_of(function), *_environment_of(function))
        for name, holder, key in _names_of(function):
            holder, key, value = _look_into_context(holder, key)
            if (id(holder), key) in seen:
                continue
            seen.add((id(holder), key))
            if _is_plain(value):
                yield WatchedValue(name, holder, key, value)
            elif _has_attributes(value) and not isinstance(value, ModuleType):
                yield from _plain_parts(name, value, {})


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
            if isinstance(value, _COLLECTIONS) and _is_plain(value):
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
