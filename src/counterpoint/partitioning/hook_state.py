"""What the hooks of a user can write to, which runs that inspect a model leave as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from counterpoint.partitioning.stores import find_stores_in, is_store_changed, read_store, write_store


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
            if is_store_changed(store, values):
                write_store(store, values)


def find_stores(hook: Callable[..., object], *, with_shared: bool = True) -> Iterator[Any]:
    """Yield what a hook can write to: cells of its closure, and what is in these, in globals and in default arguments.

    Args:
        hook: the function, or what else is called.
        with_shared: whether objects are among them that threads share, such as a ``queue.Queue``.
    """
    find = partial(find_stores_in, with_shared=with_shared)
    if isinstance(hook, partial):
        for value in (*hook.args, *hook.keywords.values()):
            yield from find(value)
        yield from find_stores(hook.func, with_shared=with_shared)
    elif isinstance(hook, MethodType):
        yield from find(hook.__self__)
    elif isinstance(hook, FunctionType):
        for cell in hook.__closure__ or ():
            yield cell
            yield from find(read_store(cell))
        for name in hook.__code__.co_names:
            yield from find(hook.__globals__.get(name))
        for value in hook.__defaults__ or ():
            yield from find(value)
    else:
        yield from find(hook, is_library=True)
