"""Find objects that code of a model or a loss can reach, and restore what a dry run draws from its own generators."""

from __future__ import annotations

import inspect
import random
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

OwnGenerator: TypeAlias = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
"""An object with a random state, of torch, numpy or Python."""

MAX_DEPTH = 4
"""Of objects in objects."""

MAX_ENTRIES = 100
"""Of a collection that is looked into."""

MODULE_REGISTRIES = frozenset(vars(nn.Module())) - {"_forward_hooks", "_forward_pre_hooks"}
"""Attributes that every module has; not its hooks, which may draw."""

OTHER_PACKAGES = (sys.stdlib_module_names | {"torch", "torchvision", "numpy", "counterpoint"}) - {
    "types",
    "collections",
}
"""Packages whose objects are not looked into."""

OWN_DRAWS_RULE = (
    "but a model is split along the operations of one call, which would repeat the numbers of that call in every step; "
    "draw with torch.rand, randn or F.dropout and without generator=, or use a strategy that keeps the model whole "
    "(data, zero of level 1 or 2, server)"
)
"""Why a model that is traced has no generator of its own; of an error."""


def find_generators(value: object) -> list[OwnGenerator]:
    """Return the generators that a module or a function can reach: by attributes, closures, globals and defaults.

    Example:
        >>> generator = torch.Generator()
        >>> find_generators(partial(torch.rand, generator=generator)) == [generator]
        True
    """
    found = find_reachable(value, lambda one: isinstance(one, OwnGenerator))
    return [one for one in found if isinstance(one, OwnGenerator)]


def find_reachable(value: object, is_wanted: Callable[[object], bool]) -> list[object]:
    """Return the objects that a module or a function can reach: by attributes, closures, globals and defaults.

    Args:
        value: where to begin.
        is_wanted: whether an object is returned, instead of looked into.
    """
    found: dict[int, object] = {}
    seen: set[int] = set()
    pending: list[tuple[object, int]] = [
        (part, 0) for part in (value.modules() if isinstance(value, nn.Module) else [value])
    ]
    while pending:
        current, depth = pending.pop()
        if id(current) in seen or depth > MAX_DEPTH:
            continue
        seen.add(id(current))
        if is_wanted(current):
            found[id(current)] = current
        else:
            pending += [(part, depth + 1) for part in _parts_of(current)]
    return [*found.values()]


def _parts_of(value: object) -> Iterator[object]:
    """Yield the objects that code of a value can reach in one step."""
    if isinstance(value, nn.Module):
        yield from value.children()
        yield from (part for key, part in vars(value).items() if key not in MODULE_REGISTRIES)
        if not _is_torchs(type(value)):
            yield from _methods_of(type(value))
    elif isinstance(value, types.FunctionType):
        if not _is_torchs(value):
            yield from _variables_of(value)
    elif isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, dict):
        yield from value.values() if len(value) <= MAX_ENTRIES else ()
    elif isinstance(value, list | tuple):
        yield from value if len(value) <= MAX_ENTRIES else ()
    elif hasattr(value, "__dict__") and not isinstance(value, type | types.ModuleType) and not _is_torchs(type(value)):
        yield from vars(value).values() if len(vars(value)) <= MAX_ENTRIES else ()
        yield from (vars(kind).get("__call__") for kind in type(value).__mro__)


def _methods_of(kind: type[nn.Module]) -> Iterator[object]:
    """Yield the forward of a module, and the methods of its class that it may call."""
    methods: list[object] = [kind.forward]
    for method in methods:  # which grows
        code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
        called = (getattr(kind, name, None) for name in (code.co_names if code else ()))
        methods += [one for one in called if isinstance(one, types.FunctionType) and one not in methods]
    yield from methods


def _variables_of(function: types.FunctionType) -> Iterator[object]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from (function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__)
    yield from (function.__defaults__ or (), function.__kwdefaults__ or {}, vars(function))


def _is_torchs(value: object) -> bool:
    """Tell whether a class or a function is torch's, this library's or Python's."""
    return str(getattr(value, "__module__", "")).partition(".")[0] in OTHER_PACKAGES


def read_states(generators: Sequence[OwnGenerator]) -> list[object]:
    """Return the states, to see whether one is used."""
    states = map(_get_state, generators)
    return [state.numpy().tobytes() if isinstance(state, Tensor) else repr(state) for state in states]


@contextmanager
def preserve_generators(generators: Sequence[OwnGenerator]) -> Iterator[None]:
    """Restore the states afterwards."""
    states = [*map(_get_state, generators)]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            _set_state(generator, state)


def _get_state(generator: OwnGenerator) -> Any:  # noqa: ANN401 - of several libraries
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _set_state(generator: OwnGenerator, state: Any) -> None:  # noqa: ANN401 - as above
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)
