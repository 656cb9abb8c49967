"""Functions that a user registers as hooks: what they can write to, and whether those on gradients are linear."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from counterpoint.runtime.gradient_code import gradient_errors
from counterpoint.runtime.loss.loss_state import LossState

MAGNITUDES = (1e-10, 1e-5, 1.0, 1e5, 1e10)
"""Of the gradients that a hook is called with: a clamp changes those above its bound only."""


def is_linear_hook(hook: Callable[[Tensor], Tensor | None], param: Tensor) -> bool:
    """Tell whether a gradient hook gives for a sum of gradients the sum of what it gives for each.

    It is called with random numbers of several magnitudes; what it keeps, and the generators, are as before.

    Args:
        hook: the user's.
        param: that it is registered on.

    Example:
        >>> param = torch.zeros(3)
        >>> is_linear_hook(lambda grad: grad * 2, param), is_linear_hook(lambda grad: grad.clamp(-1, 1), param)
        (True, False)
    """
    generator, state = torch.Generator().manual_seed(0), LossState(hook)
    detached = param.detach()

    def draw(magnitude: float) -> Tensor:
        return (torch.randn(param.shape, generator=generator) * magnitude).to(detached)

    def call(grad: Tensor) -> Tensor:
        given = grad.clone()
        result = hook(given)
        return given if result is None else result

    every = [*range(len(state.slots))]
    with torch.no_grad(), state.preserve_generators({param.device}), state.restored(every), preserve_stores(hook):
        for magnitude in MAGNITUDES:
            first, second = draw(magnitude), draw(magnitude)
            both = first + second
            if not both.isfinite().all():  # as in float16
                continue
            try:
                one, two, together = call(first), call(second), call(both)
            except Exception:  # noqa: BLE001 - whatever it raises for a gradient, it may raise for parts only
                return False
            if not together.isfinite().all() or any(
                gradient_errors([together], [one + two], torch.finfo(param.dtype).eps)
            ):
                return False
    return True


@contextmanager
def preserve_stores(hook: Callable[..., object]) -> Iterator[None]:
    """Restore the closure, collections and attributes that a hook can write to afterwards."""
    before = [(store, read_store(store)) for store in find_stores(hook)]
    try:
        yield
    finally:
        for store, values in before:
            write_store(store, values)


def find_stores(hook: Callable[..., object]) -> Iterator[Any]:
    """Yield what a hook can write to: cells of its closure, collections, and objects with attributes."""
    if isinstance(hook, partial):
        for value in (*hook.args, *hook.keywords.values()):
            yield from _as_store(value)
        yield from find_stores(hook.func)
    elif isinstance(hook, MethodType):
        yield from _as_store(hook.__self__)
    elif isinstance(hook, FunctionType):
        for cell in hook.__closure__ or ():
            yield cell
            yield from _as_store(read_store(cell))
        for name in hook.__code__.co_names:
            yield from _as_store(hook.__globals__.get(name))
        for value in hook.__defaults__ or ():
            yield from _as_store(value)
    else:
        yield from _as_store(hook)


def _as_store(value: object) -> Iterator[Any]:
    is_object = hasattr(value, "__dict__") and not isinstance(
        value, type | FunctionType | ModuleType | nn.Module | Tensor
    )
    if type(value) in {list, dict, set} or is_object:
        yield value


def read_store(store: Any) -> Any:  # noqa: ANN401 - whatever a hook has
    """Return a copy of what a store has."""
    if isinstance(store, CellType):
        try:
            return store.cell_contents
        except ValueError:  # empty
            return None
    return copy.copy(store if type(store) in {list, dict, set} else vars(store))


def write_store(store: Any, values: Any) -> None:  # noqa: ANN401 - as above
    """Give a store the values of a copy."""
    if isinstance(store, CellType):
        store.cell_contents = values
    elif type(store) is list:
        store[:] = values
    else:
        target = store if type(store) in {dict, set} else vars(store)
        target.clear()
        target.update(values)
