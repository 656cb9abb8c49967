"""Operators of torch that graphs of ``torch.compile`` call, registered so that a call costs little.

``torch.library.custom_op`` puts five Python functions around each call, of an operator's gradient, its device and its
outputs' memory. A graph calls its operators after matrix products that have emptied the processor's caches, so that
each of these functions costs many times what it does in a loop of its own. Here torch's dispatcher calls the kernel
itself, and a gradient is written as a :class:`torch.autograd.Function` that AOTAutograd traces, so that no graph calls
it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from threading import RLock
from typing import Any, TypeVar

import torch

Registered = TypeVar("Registered")
Library: Any = torch.library.Library  # which has no types
NAMESPACE = "counterpoint"


def register_once(function: Callable[[], Registered]) -> Callable[[], Registered]:
    """Return a function that registers operators in its first call, also if several threads call it."""
    lock, cached = RLock(), cache(function)

    @wraps(function)
    def call() -> Registered:
        with lock:
            return cached()

    return call


@cache
def graph_library() -> Any:  # noqa: ANN401 - as above
    """Return the registrations of this package's operators, which last as long as the process."""
    return Library(NAMESPACE, "FRAGMENT")


def define_operator(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Register an operator without a gradient, for all devices; return it.

    Args:
        schema: name, arguments and result, as torch writes them.
        kernel: computes new tensors, which are not views of the arguments.
        fake: returns empty tensors of the shapes, dtypes and devices that the kernel returns.
    """
    name = schema.partition("(")[0]
    library = graph_library()
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    return _find(name)


def define_differentiable(schema: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Register a function that calls other operators, and an :class:`torch.autograd.Function`; return its operator.

    Args:
        schema: name, arguments and result, as torch writes them.
        function: Dynamo does not look into it; AOTAutograd traces what it calls, in forward and in backward.
    """
    name = schema.partition("(")[0]
    library = graph_library()
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, function, "CompositeImplicitAutograd")
    return _find(name)


def _find(name: str) -> Callable[..., Any]:
    operator: Callable[..., Any] = getattr(torch.ops.counterpoint, name).default
    return operator
