"""Torch's exporter without a library that it loads and does not use.

With the exporter comes a part of torch's compiler that weighs up what to recompute, and with that comes networkx: 300
modules, and 12 MB in every rank that traces a model. Only annotations ask it for something while it is loaded. So a
module stands in for it there, which becomes the library itself as soon as anybody wants anything else of it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

LIBRARY = "networkx"
NAMED = "DiGraph"
"""What annotations of torch name in it."""


class StandIn(ModuleType):
    """A module that is loaded when it is first asked for something that it does not have."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the module has
        spec = self.__spec__
        if spec is None or spec.loader is None:
            raise AttributeError(name)
        self.__class__ = ModuleType  # type: ignore[assignment]  # so that nobody asks twice
        self.__dict__.pop(NAMED, None)
        self.__path__ = list(spec.submodule_search_locations or ())
        spec.loader.exec_module(self)
        return getattr(self, name)


@contextmanager
def without_graph_library() -> Iterator[None]:
    """Inside, the exporter can be loaded without the library; afterwards that is as if it had been imported."""
    spec = None if LIBRARY in sys.modules else importlib.util.find_spec(LIBRARY)
    if spec is None:
        yield
        return
    module = StandIn(LIBRARY, None)
    module.__spec__, module.__loader__, module.__file__ = spec, spec.loader, spec.origin
    module.__dict__[NAMED] = object
    sys.modules[LIBRARY] = module
    try:
        yield
    finally:
        if isinstance(module, StandIn):
            del module.__dict__[NAMED]
