"""What the hooks of a user can write to, which runs that inspect a model leave as it is."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from functools import partial
from queue import Queue, SimpleQueue
from threading import Condition, Event, Lock, RLock, Thread
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn


@contextmanager
def preserve_hook_stores(model: nn.Module) -> Iterator[None]:
    """Restore what the forward hooks of a model's modules can write to afterwards.

    Args:
        model: the module.
    """
    with ExitStack() as stack:
        for module in model.modules():
            for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):  # noqa: SLF001 - there is no other way to see them
                if not _is_own(hook):
                    stack.enter_context(preserve_stores(hook))
        yield


def _is_own(hook: Any) -> bool:  # noqa: ANN401 - a function, a method, or an object that is called
    """Tell whether a hook is one of this package, which inspects the model with it."""
    function = hook.func if isinstance(hook, partial) else hook
    return str(getattr(function, "__module__", "")).partition(".")[0] == __name__.partition(".")[0]


@contextmanager
def preserve_stores(hook: Callable[..., object]) -> Iterator[None]:
    """Restore the closure, collections and attributes that a hook can write to afterwards."""
    before = [(store, read_store(store)) for store in find_stores(hook, with_shared=False)]
    try:
        yield
    finally:
        for store, values in before:
            write_store(store, values)


def find_stores(hook: Callable[..., object], *, with_shared: bool = True) -> Iterator[Any]:
    """Yield what a hook can write to: cells of its closure, nested collections, and objects with attributes.

    Args:
        hook: the function, or what else is called.
        with_shared: whether objects are among them that threads share, such as a ``queue.Queue``.
    """
    as_store = partial(_as_store, with_shared=with_shared)
    if isinstance(hook, partial):
        for value in (*hook.args, *hook.keywords.values()):
            yield from as_store(value)
        yield from find_stores(hook.func, with_shared=with_shared)
    elif isinstance(hook, MethodType):
        yield from as_store(hook.__self__)
    elif isinstance(hook, FunctionType):
        for cell in hook.__closure__ or ():
            yield cell
            yield from as_store(read_store(cell))
        for name in hook.__code__.co_names:
            yield from as_store(hook.__globals__.get(name))
        for value in hook.__defaults__ or ():
            yield from as_store(value)
    else:
        yield from as_store(hook)


SHARED = (type(Lock()), type(RLock()), Condition, Event, Thread, Executor, SimpleQueue, Queue)
"""What an object has that threads share: they may be about to change it while a model is inspected."""


COLLECTIONS = (list, dict, set, deque)
MAX_DEPTH = 3
"""Of collections in collections, such as the lists of a dict by layer that is an attribute."""


def _as_store(value: object, depth: int = 0, *, with_shared: bool = True) -> Iterator[Any]:
    is_object = hasattr(value, "__dict__") and not isinstance(
        value, type | FunctionType | ModuleType | nn.Module | Tensor
    )
    is_collection = isinstance(value, COLLECTIONS)
    if not is_collection and (depth or not is_object):
        return
    if not (is_collection or with_shared) and any(isinstance(one, SHARED) for one in (value, *vars(value).values())):
        return
    yield value
    held: Any = value if is_collection else vars(value)
    for part in [*(held.values() if isinstance(held, dict) else held)] if depth < MAX_DEPTH else ():
        if isinstance(part, COLLECTIONS):
            yield from _as_store(part, depth + 1, with_shared=with_shared)


def read_store(store: Any) -> Any:  # noqa: ANN401 - whatever a hook has
    """Return a copy of what a store has."""
    if isinstance(store, CellType):
        try:
            return store.cell_contents
        except ValueError:  # empty
            return None
    if isinstance(store, dict):
        return dict(store)
    return copy.copy(store if isinstance(store, COLLECTIONS) else vars(store))


def write_store(store: Any, values: Any) -> None:  # noqa: ANN401 - as above
    """Give a store the values of a copy."""
    if isinstance(store, CellType):
        store.cell_contents = values
    elif isinstance(store, list):
        store[:] = values
    elif isinstance(store, deque):
        store.clear()
        store.extend(values)
    elif isinstance(store, dict | set):
        store.clear()
        store.update(values)
    else:  # another thread may use the object
        attributes = vars(store)
        for name in attributes.keys() - values.keys():
            del attributes[name]
        attributes.update(values)
