"""Torch's exporter without a library that it loads and does not use.

With the exporter comes a part of torch's compiler that weighs up what to recompute, and with that comes networkx: 300
modules, and 12 MB in every rank that traces a model. Only annotations ask it for something while it is loaded. So a
module stands in for it there, and hands on to the library whatever anybody else asks of it, then and later.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from inspect import CO_OPTIMIZED
from threading import Lock
from types import FrameType, ModuleType
from typing import Any

LIBRARY = "networkx"
IMPORTER = "torch._functorch.partitioners"
"""The part of torch that loads it."""
ANNOTATION_NAME = "DiGraph"
"""What annotations of torch name in it."""
LOCK = Lock()


class LazyNetworkx(ModuleType):
    """A module that has what the library has, and loads it for that."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the library has
        if name == ANNOTATION_NAME and is_torch_module_body(sys._getframe(1)):  # noqa: SLF001 - who asks
            return object
        restore_real_module(self)
        return getattr(importlib.import_module(LIBRARY), name)


def is_torch_module_body(frame: FrameType) -> bool:
    """Tell whether it is the body of a module of torch, or of a class in it, that asks, and no function."""
    return str(frame.f_globals.get("__name__")).startswith("torch.") and not frame.f_code.co_flags & CO_OPTIMIZED


def restore_real_module(module: LazyNetworkx) -> None:
    """Whoever imports the library from now on loads it, unless that has happened."""
    with LOCK:
        if sys.modules.get(LIBRARY) is module:
            del sys.modules[LIBRARY]


@contextmanager
def without_networkx() -> Iterator[None]:
    """Inside, the exporter can be loaded without the library; afterwards that is as if nobody had asked for it.

    A thread that imports the library meanwhile gets what it has; but ``from networkx import *`` finds nothing there,
    and a module of it that is imported by its full name is loaded twice.
    """
    is_settled = IMPORTER in sys.modules or LIBRARY in sys.modules
    spec = None if is_settled else find_spec(LIBRARY)
    if spec is None:
        yield
        return
    module = LazyNetworkx(LIBRARY)
    module.__spec__, module.__loader__, module.__file__ = spec, spec.loader, spec.origin  # as `inspect` asks of all
    if sys.modules.setdefault(LIBRARY, module) is not module:
        yield
        return
    try:
        yield
    finally:
        restore_real_module(module)
