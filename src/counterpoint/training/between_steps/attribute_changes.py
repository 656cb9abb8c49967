"""Attributes of a user's model that code between two steps changes, where ranks run a trace or copies of it."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from counterpoint.errors import DataError
from counterpoint.partitioning.dry_run import TrainingModes
from counterpoint.partitioning.stores import MAX_ELEMENTS, can_compare, is_store_changed, read_store
from counterpoint.training.agreement.values_of_code import (
    FUNCTIONS,
    HOOKS,
    MAX_DEPTH,
    ListEntries,
    WatchedValue,
    has_attributes,
    is_plain,
    plain_parts,
    values_of_code,
)


class AttributeCheck:
    """Detects changes of the model's plain attributes between steps, such as a temperature or the rate of a dropout.

    Ranks that run copies of the model, or a trace of it, have the values of the first step. Compared are numbers, texts
    and collections of them, in attributes of modules or of objects in these (a configuration), functions, tensors that
    are not buffers, and hooks; under a trace also attributes and methods of classes, and the globals, variables of
    closures, environment variables and context variables that functions read. Attributes that the model's own forward
    changes, which user code may call between steps, are left out; of torch's modules only floats, functions and hooks
    are compared.
    """

    def __init__(self) -> None:
        self.watched: list[WatchedValue] = []
        self.tensors: list[WatchedTensor] = []
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
        of_buffers = {buffer.untyped_storage()._cdata for buffer in model.buffers() if _has_storage(buffer)}  # noqa: SLF001 - its identity
        self.tensors = [
            WatchedTensor(value, is_compared=not (is_traced or _shares_memory(value.value, of_buffers)))
            for value in arrays
            if isinstance(value.value, Tensor)
        ]
        if is_traced:
            self.watched += [value.copy() for value in values_of_code(model)]
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
        changes = [(tensor.watched.name, tensor.find_change()) for tensor in self.tensors]
        return changed + [(name, change) for name, change in changes if change]

    def _leave_out_changed_by(self, run_forward: Callable[[], object]) -> None:
        every = [*self.watched, *(tensor.watched for tensor in self.tensors)]
        before = [replace(watched, value=watched.read()).copy() for watched in every]
        with suppress(Exception):  # the step fails likewise, with its location
            run_forward()
        changed = {id(watched) for watched, value in zip(every, before, strict=True) if value.is_changed()}
        for watched, value in zip(every, before, strict=True):
            if id(watched) in changed and isinstance(watched.holder, dict):
                watched.holder[watched.key] = value.value
        self.watched = [watched for watched in self.watched if id(watched) not in changed]
        self.tensors = [tensor for tensor in self.tensors if id(tensor.watched) not in changed]


class WatchedTensor:
    """A tensor that is not a buffer, and may be replaced, or changed in place.

    Its values are compared where its version counter differs, because runs that inspect the model restore what its
    forward has written. A large tensor is not copied: its counter alone tells of a change. Tensors of
    ``torch.inference_mode`` have no counter, and their values are compared in every step.

    Args:
        watched: where the tensor is.
        is_compared: whether ranks do not see a change in place: they see it in the memory of a buffer, which they get
            before each step, or of a trace.
    """

    def __init__(self, watched: WatchedValue, *, is_compared: bool) -> None:
        tensor: Tensor = watched.value  # type: ignore[assignment]
        self.watched = watched
        self.is_compared = is_compared
        self.version = _read_version(tensor)
        is_copied = can_compare(tensor) and (tensor.numel() <= MAX_ELEMENTS or self.version is None)
        self.values = read_store(tensor) if is_compared and is_copied else None

    def find_change(self) -> str:
        """Return how the tensor was changed; empty if it was not."""
        tensor: Tensor = self.watched.value  # type: ignore[assignment]
        if self.watched.read() is not tensor:
            return "to another value"
        version = _read_version(tensor)
        is_same = version == self.version and (version is not None or self.values is None)
        if is_same or not self.is_compared:
            return ""
        if self.values is None or is_store_changed(tensor, self.values):
            return "in place"
        self.version = version
        return ""


def _read_version(tensor: Tensor) -> int | None:
    """Return how often torch saw the tensor change in place; None where it does not count."""
    return None if tensor.is_inference() else tensor._version  # noqa: SLF001 - there is no other way to see changes


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta


def _shares_memory(value: object, storages: Collection[int]) -> bool:
    return isinstance(value, Tensor) and _has_storage(value) and value.untyped_storage()._cdata in storages  # noqa: SLF001 - its identity


_REGISTRIES = frozenset(vars(nn.Module()))  # of parameters, buffers, modules and hooks
_MAX_NUMBERS = 10_000  # of an array of numpy that is compared in every step


def _plain_values(model: nn.Module) -> Iterator[WatchedValue]:
    """Yield the plain attributes and hooks of modules, and the plain attributes of objects in them."""
    seen: dict[int, int] = {}
    for path, module in model.named_modules():
        is_torchs = type(module).__module__.startswith("torch.nn.")
        for key, value in vars(module).items():
            name = f"{path}.{key}".lstrip(".") + " of the model"
            if key in HOOKS and isinstance(value, dict):
                yield WatchedValue(name, vars(module), key, value)
            elif key == "training" or key.startswith("_"):
                continue
            elif isinstance(value, FUNCTIONS) or (isinstance(value, float) if is_torchs else is_plain(value)):
                yield WatchedValue(name, vars(module), key, value)
            elif not is_torchs and has_attributes(value):
                yield from plain_parts(f"{path}.{key}".lstrip("."), value, seen, " of the model")


def _arrays_of(model: nn.Module) -> Iterator[WatchedValue]:
    """Yield tensors that are not parameters or buffers, and arrays of numpy, in attributes and in what these hold."""
    for path, module in model.named_modules():
        own = {key: value for key, value in vars(module).items() if key not in _REGISTRIES}
        for watched in _arrays_in(path, own, MAX_DEPTH):
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
    return vars(value) if has_attributes(value) else None
