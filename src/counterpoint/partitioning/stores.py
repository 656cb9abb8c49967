"""What code of a user can write to besides parameters and buffers: collections, objects, tensors and arrays.

Runs that only inspect a model leave these as they were. So each one is read before, and written again if it changed.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import suppress
from queue import Queue, SimpleQueue
from threading import Condition, Event, Lock, RLock, Thread
from types import CellType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

SHARED = (type(Lock()), type(RLock()), Condition, Event, Thread, Executor, SimpleQueue, Queue)
"""What an object has that threads share: they may be about to change it while a model is inspected."""


COLLECTIONS = (list, dict, set, deque)
MAX_DEPTH = 3
"""Of collections and objects in each other, such as the lists of a dict by layer that is an attribute."""
MAX_ENTRIES = 10_000
"""Of a collection inside of another value."""
MAX_ELEMENTS = 4_000_000
"""Of a tensor or an array, which is copied."""
MAX_SHARE_WORK = 100_000
"""Candidates that are tried for an element that two tensors have in common."""
DTYPES = frozenset({
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128,
})  # fmt: skip
"""Of tensors that are copied; others, such as float8 and quantized ones, cannot be compared."""


def find_stores_in(
    value: object, *, with_shared: bool = True, is_library: bool = False, seen: dict[int, int] | None = None
) -> Iterator[Any]:
    """Yield what can be written to in a value: itself, and collections, objects, tensors and arrays that it holds.

    Args:
        value: of any type.
        with_shared: whether objects are among them that threads share, such as a ``queue.Queue``.
        is_library: whether the value may be an object of torch's, or of this library.
        seen: by ``id`` the depth at which values were found in others, such as a configuration that all blocks have;
            they are left out, and those of this value are added.

    Example:
        >>> from types import SimpleNamespace
        >>> count = SimpleNamespace(calls=0)
        >>> [type(store).__name__ for store in find_stores_in({"count": count, "total": torch.zeros(2)})]
        ['dict', 'SimpleNamespace', 'Tensor']
    """
    if is_library or not _is_library(value):
        yield from _find_stores(value, 0, {} if seen is None else seen, with_shared=with_shared)


def _find_stores(value: object, depth: int, seen: dict[int, int], *, with_shared: bool) -> Iterator[Any]:
    if seen.get(id(value), MAX_DEPTH + 2) <= depth or not _is_store(value, depth):
        return
    seen[id(value)] = depth
    if isinstance(value, Tensor | np.ndarray):
        yield value
        return
    held = _held_values(value)
    if not (with_shared or isinstance(value, COLLECTIONS)) and any(isinstance(one, SHARED) for one in (value, *held)):
        return
    if not isinstance(value, tuple):
        yield value
    for part in held:
        if depth < MAX_DEPTH or isinstance(part, Tensor | np.ndarray):
            yield from _find_stores(part, depth + 1, seen, with_shared=with_shared)


def _is_store(value: object, depth: int) -> bool:
    """Tell whether a value can be written to, or holds others that can."""
    if isinstance(value, Tensor):
        return can_compare(value) and value.numel() <= MAX_ELEMENTS
    if isinstance(value, np.ndarray):
        return value.size <= MAX_ELEMENTS
    if isinstance(value, (*COLLECTIONS, tuple)):
        return not depth or len(value) <= MAX_ENTRIES
    if isinstance(value, type | FunctionType | ModuleType | nn.Module):
        return False
    return not (depth and _is_library(value)) and bool(hasattr(value, "__dict__") or _slots_of(value))


def can_compare(tensor: Tensor) -> bool:
    """Tell whether the values of a tensor can be copied and compared: not those of a meta or a sparse tensor."""
    is_plain = tensor.layout is torch.strided and not (tensor.requires_grad or tensor.is_meta or tensor.is_nested)
    return is_plain and tensor.dtype in DTYPES


def memory_extent(tensor: Tensor) -> tuple[int, int]:
    """Return the first address of a tensor and the one after its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def share_elements(first: Tensor, second: Tensor) -> bool:
    """Tell whether two strided tensors have an element in common, which every second row and the rows between have not.

    Where the answer takes too long to find, it is that they do.
    """
    try:
        arrays = _AddressedArray(first).array, _AddressedArray(second).array
        return np.shares_memory(*arrays, max_work=MAX_SHARE_WORK)  # type: ignore[arg-type]  # numpy takes any number
    except (np.exceptions.TooHardError, ValueError):  # numpy has at most 64 dims
        return True


class _AddressedArray:
    """An array with the address, shape and strides of a tensor on any device, whose values must not be read."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{size}",
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "data": (tensor.data_ptr(), True),
        }
        self.array = np.asarray(self)


def _is_library(value: object) -> bool:
    """Tell whether a value is an object of torch, numpy or this library that is not a tensor or array."""
    module = type(value).__module__.partition(".")[0]
    return module in {"torch", "counterpoint", "numpy"} and not isinstance(value, Tensor | np.ndarray)


def _slots_of(value: object) -> list[str]:
    """Return the names of the attributes that an object has in slots, as a dataclass may."""
    slots: list[str] = []
    for kind in type(value).__mro__:
        own = vars(kind).get("__slots__", ())
        slots += [own] if isinstance(own, str) else own
    return [name for name in slots if not name.startswith("__")]


def _held_values(value: object) -> list[Any]:
    """Return what a collection or an object holds."""
    if isinstance(value, dict):  # other mappings may compute their values; they are objects
        return [*dict.values(value)]
    if isinstance(value, (*COLLECTIONS, tuple)):
        return [*value]
    return [*_read_attributes(value).values()]


def _read_attributes(value: object) -> dict[str, Any]:
    in_slots = {name: getattr(value, name) for name in _slots_of(value) if hasattr(value, name)}
    return in_slots | getattr(value, "__dict__", {})


def read_store(store: Any) -> Any:  # noqa: ANN401 - whatever a user's code has
    """Return a copy of what a store has."""
    if isinstance(store, CellType):
        try:
            return store.cell_contents
        except ValueError:  # empty
            return None
    if isinstance(store, dict):
        return dict(store)
    if isinstance(store, Tensor):
        return store.detach().clone()
    return copy.copy(store) if isinstance(store, (*COLLECTIONS, np.ndarray)) else _read_attributes(store)


def is_store_changed(store: Any, values: Any) -> bool:  # noqa: ANN401 - as above
    """Tell whether a store has other values than a copy; what is in a collection or an object is not looked into."""
    if isinstance(store, Tensor):
        is_alike = (store.shape, store.dtype) == (values.shape, values.dtype)
        return not is_alike or store.requires_grad or not _is_same_tensor(store, values)
    if isinstance(store, np.ndarray):
        return bool(store.shape != values.shape or store.tobytes() != values.tobytes())
    current = read_store(store)
    if isinstance(store, CellType):
        return current is not values
    if isinstance(current, dict):
        return [(key, id(value)) for key, value in current.items()] != [(key, id(one)) for key, one in values.items()]
    return bool(current != values) if isinstance(store, set) else [*map(id, current)] != [*map(id, values)]


def _is_same_tensor(first: Tensor, second: Tensor) -> bool:
    """Tell whether two tensors of one shape and dtype have the same values, nan or not."""
    if torch.equal(first, second):
        return True
    return bool(((first == second) | ((first != first) & (second != second))).all())


def write_store(store: Any, values: Any) -> None:  # noqa: ANN401 - as above
    """Give a store the values of a copy."""
    if isinstance(store, CellType):
        store.cell_contents = values
    elif isinstance(store, list | deque):
        store.clear()
        store.extend(values)
    elif isinstance(store, dict | set):
        store.clear()
        store.update(values)
    elif isinstance(store, Tensor):
        _write_tensor(store, values)
    elif isinstance(store, np.ndarray):
        _write_array(store, values)
    else:  # another thread may use the object
        for name in _read_attributes(store).keys() - values.keys():
            object.__delattr__(store, name)
        for name, value in values.items():
            if getattr(store, "__dict__", {}).get(name, store) is not value:
                _write_attribute(store, name, value)


def _write_array(store: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> None:
    """Give an array its values back, and its shape."""
    if store.shape != values.shape:
        store.resize(values.shape, refcheck=False)
    np.copyto(store, values)


def _write_tensor(store: Tensor, values: Tensor) -> None:
    """Give a tensor its values back, and its shape and dtype."""
    try:
        if (store.shape, store.dtype) != (values.shape, values.dtype):
            raise RuntimeError
        store.detach().copy_(values)
    except RuntimeError:  # or its elements share memory
        store.data = values
    with suppress(RuntimeError):  # of a view
        store.detach_()


def _write_attribute(store: object, name: str, value: object) -> None:
    """Write an attribute without the code that an object may have for it."""
    attributes = getattr(store, "__dict__", {})
    if name in _slots_of(store):
        object.__setattr__(store, name, value)
    else:
        attributes[name] = value
