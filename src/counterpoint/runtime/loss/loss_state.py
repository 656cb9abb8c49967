"""Find, and restore, what a loss function keeps from one call to the next: buffers, attributes, closures, generators.

A loop without microbatches calls a loss once in a step. Where a batch is divided, it is called for each microbatch and
each rank, so that a step counter counts faster, and a moving average moves further. A value that a call only
overwrites, such as a loss that is kept to be printed, is not such state: another call with the same arguments leaves
the same value.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from counterpoint.data.microbatch_reader import preserve_rng
from counterpoint.partitioning.dry_run import MODULE_ATTRIBUTES, ModuleAttributes, assign_values, preserve_device_rng
from counterpoint.partitioning.hook_state import preserve_stores
from counterpoint.partitioning.own_generators import (
    OTHER_PACKAGES,
    find_generators,
    preserve_generators,
    read_states,
)
from counterpoint.runtime.rng.draw_sites import other_rng_state

MAX_DEPTH = 4
"""Of objects in objects, from the loss on."""

MAX_ENTRIES = 100
"""Of a collection that is looked into."""


class StateSlot(NamedTuple):
    """Where a loss may keep a number or a tensor.

    Args:
        name: for errors.
        read: returns the present value.
        write: replaces it; None for an entry of a tuple.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None] | None


class LossState:
    """The numbers, tensors and generators that a loss function can reach, apart from parameters.

    Args:
        loss: any callable.
    """

    def __init__(self, loss: object) -> None:
        self.generators = find_generators(loss)
        self.seen: set[int] = set()
        self.slots = list(self._find(loss, "the loss", 0))

    def read(self) -> list[tuple[Any, int]]:
        """Return each value with its version; tensors are not copied."""
        values = [slot.read() for slot in self.slots]
        return [(value, value._version if isinstance(value, Tensor) else 0) for value in values]  # noqa: SLF001 - as torch counts changes

    def find_changed(self, before: list[tuple[Any, int]]) -> list[int]:
        """Return the indices of the values that were replaced or changed in place since they were read."""
        pairs = enumerate(zip(before, self.read(), strict=True))
        return [
            index
            for index, ((old, old_version), (value, version)) in pairs
            if version != old_version or value is not old
        ]

    @contextmanager
    def restored(self, indices: list[int]) -> Iterator[None]:
        """Restore some of the values afterwards."""
        values = [self.slots[index].read() for index in indices]
        copies = [value.clone() if isinstance(value, Tensor) else value for value in values]
        try:
            yield
        finally:
            for index, value, saved in zip(indices, values, copies, strict=True):
                if isinstance(value, Tensor) and not torch.equal(value, saved):
                    assign_values(value.detach(), saved.detach())
                write = self.slots[index].write
                if write is not None and self.slots[index].read() is not value:
                    write(value)

    @contextmanager
    def preserve_generators(self, devices: set[torch.device]) -> Iterator[None]:
        """Restore the global generators and those of the loss afterwards, so that its next call draws the same."""
        with preserve_rng(), preserve_device_rng(devices), preserve_generators(self.generators):
            yield

    def read_generators(self) -> list[object]:
        """Return the states of the global generators and those of the loss, to see whether it draws."""
        return [torch.get_rng_state().numpy().tobytes(), other_rng_state(), *read_states(self.generators)]

    def _find(self, value: Any, name: str, depth: int) -> Iterator[StateSlot]:  # noqa: ANN401 - anything
        """Yield what a value holds."""
        if depth > MAX_DEPTH or id(value) in self.seen or isinstance(value, type | types.ModuleType):
            return
        self.seen.add(id(value))
        if isinstance(value, partial | types.MethodType):
            for part in _parts_of_callable(value):
                yield from self._find(part, name, depth)
        elif isinstance(value, types.FunctionType):
            yield from self._find_in_function(value, name, depth)
        elif isinstance(value, nn.Module):
            yield from self._find_in_module(value, name, depth)
        elif isinstance(value, dict | list | tuple):
            yield from self._find_in_collection(value, name, depth)
        elif hasattr(value, "__dict__") and not _is_torchs(type(value)):
            yield from self._find_in_dict(vars(value), name, depth)
            for kind in type(value).__mro__:
                yield from self._find(vars(kind).get("__call__"), name, depth)

    def _find_in_function(self, function: types.FunctionType, name: str, depth: int) -> Iterator[StateSlot]:
        if _is_torchs(function):
            return
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            yield from self._slot_or_parts(
                value,
                f"the variable {variable} of {name}",
                partial(getattr, cell, "cell_contents"),
                partial(setattr, cell, "cell_contents"),
                depth,
            )
        for variable in function.__code__.co_names:
            if variable in function.__globals__:
                yield from self._find_at(function.__globals__, variable, f"the global {variable}", depth)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            yield from self._find(value, name, depth + 1)
        yield from self._find_in_dict(vars(function), name, depth)

    def _find_in_module(self, module: nn.Module, name: str, depth: int) -> Iterator[StateSlot]:
        for path, inner in module.named_modules():
            prefix = f"{path}." if path else ""
            self.seen.add(id(inner))
            for key, buffer in inner._buffers.items():  # noqa: SLF001 - where they can be replaced
                if buffer is not None:
                    yield _dict_slot(inner._buffers, key, f"{prefix}{key} of {name}")  # noqa: SLF001 - as above
            if not _is_torchs(type(inner)):
                for key in list(vars(inner)):
                    if key not in MODULE_ATTRIBUTES:
                        yield from self._find_at(vars(inner), key, f"{prefix}{key} of {name}", depth)
                yield from self._find(type(inner).forward, name, depth + 1)

    def _find_in_dict(self, values: dict[str, Any], name: str, depth: int) -> Iterator[StateSlot]:
        for key in list(values)[:MAX_ENTRIES]:
            yield from self._find_at(values, key, f"{key} of {name}", depth)

    def _find_in_collection(self, values: Any, name: str, depth: int) -> Iterator[StateSlot]:  # noqa: ANN401 - dict, list or tuple
        if len(values) > MAX_ENTRIES:
            return
        if isinstance(values, dict):
            yield from self._find_in_dict(values, name, depth)
            return
        for index, value in enumerate(values):
            write = partial(values.__setitem__, index) if isinstance(values, list) else None
            yield from self._slot_or_parts(value, name, partial(values.__getitem__, index), write, depth)

    def _find_at(self, values: dict[str, Any], key: Any, name: str, depth: int) -> Iterator[StateSlot]:  # noqa: ANN401 - of any dict
        slot = _dict_slot(values, key, name)
        yield from self._slot_or_parts(values[key], name, slot.read, slot.write, depth)

    def _slot_or_parts(
        self,
        value: Any,  # noqa: ANN401 - anything
        name: str,
        read: Callable[[], Any],
        write: Callable[[Any], None] | None,
        depth: int,
    ) -> Iterator[StateSlot]:
        if isinstance(value, nn.Parameter):
            return
        if value is None or isinstance(value, Tensor | int | float | complex | np.generic | str):
            yield StateSlot(name, read, write)
        else:
            yield from self._find(value, name, depth + 1)


def _parts_of_callable(value: partial[Any] | types.MethodType) -> tuple[Any, ...]:
    if isinstance(value, partial):
        return (value.func, *value.args, *value.keywords.values())
    return value.__self__, value.__func__


def _dict_slot(values: dict[Any, Any], key: Any, name: str) -> StateSlot:  # noqa: ANN401 - of any dict
    def write(value: object) -> None:
        if isinstance(values, dict):
            values[key] = value

    return StateSlot(name, lambda: values.get(key), write)


def _is_torchs(value: Any) -> bool:  # noqa: ANN401 - a class or a function
    """Tell whether a class or a function is torch's, this library's or Python's."""
    return str(getattr(value, "__module__", "")).partition(".")[0] in OTHER_PACKAGES


def _are_equal(one: Any, other: Any) -> bool:  # noqa: ANN401 - what a slot has
    """Tell whether two values are the same number or text, or tensors with the same values."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        is_alike = one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
        return is_alike and (torch.equal(one, other) or torch.equal(one.nan_to_num(), other.nan_to_num()))
    return isinstance(one, int | float | complex | np.generic | str | None) and (one == other or one != one)


@contextmanager
def preserve_loss(loss: Any) -> Iterator[None]:  # noqa: ANN401 - any callable
    """Restore collections, objects and tensors that a loss writes to afterwards, such as a list of losses to be shown.

    Args:
        loss: the user's; the parameters and buffers of a module stay as they are.
    """
    owner = getattr(loss, "__self__", loss)
    if not isinstance(owner, nn.Module):
        with preserve_stores(loss):
            yield
        return
    attributes = ModuleAttributes(owner)
    try:
        yield
    finally:
        attributes.restore()


def find_running_state(
    state: LossState, before: list[tuple[Any, int]], compute: Callable[[], object]
) -> tuple[str, list[int]]:
    """Return the name of a value that each call of a loss changes further; empty if there is none.

    Args:
        state: of the loss.
        before: the state, as it was before a first call.
        compute: calls the loss a second time, with the same arguments.

    Returns:
        The name, and the indices of the values that calls have changed.
    """
    changed = state.find_changed(before)
    values = [state.slots[index].read() for index in changed]
    copies = [value.clone() if isinstance(value, Tensor) else value for value in values]
    compute()
    for index, value in zip(changed, copies, strict=True):
        if not _are_equal(value, state.slots[index].read()):
            return state.slots[index].name, changed
    return "", changed


@contextmanager
def preserve_loss_module(module: nn.Module | None) -> Iterator[None]:
    """Restore the buffers and the gradients of the module of a loss afterwards; inside, they are None.

    Args:
        module: of the loss; None if it is a function.
    """
    params = [] if module is None else list(module.parameters())
    grads = [param.grad for param in params]
    buffers = [] if module is None else list(module.buffers())
    before = [buffer.clone() for buffer in buffers]
    for param in params:
        param.grad = None
    try:
        yield
    finally:
        for buffer, values in zip(buffers, before, strict=True):
            if not torch.equal(buffer, values):
                assign_values(buffer, values)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
