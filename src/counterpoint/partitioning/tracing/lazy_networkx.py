"""Import torch's exporter without networkx, which it imports but does not use.

The exporter imports a part of torch's compiler that chooses what to recompute, and with it networkx: 300 modules and
12 MB in every rank that traces a model. Torch only names it in annotations. So a stand-in module is registered during
the import; any other access to its attributes, then or later, loads the real library.
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
"""The module of torch that imports it."""
ANNOTATION_NAME = "DiGraph"
"""The name that annotations of torch use."""
LOCK = Lock()


class LazyNetworkx(ModuleType):
    """A module that imports networkx when an attribute is used."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the library has
        if name == ANNOTATION_NAME and is_torch_module_body(sys._getframe(1)):  # noqa: SLF001 - who asks
            return object
        restore_real_module(self)
        return getattr(importlib.import_module(LIBRARY), name)


def is_torch_module_body(frame: FrameType) -> bool:
    """Tell whether a frame is the body of a torch module, or of a class in it, and not a function."""
    return str(frame.f_globals.get("__name__")).startswith("torch.") and not frame.f_code.co_flags & CO_OPTIMIZED


def restore_real_module(module: LazyNetworkx) -> None:
    """Remove the stand-in from ``sys.modules``, so that the next import loads the library."""
    with LOCK:
        if sys.modules.get(LIBRARY) is module:
            del sys.modules[LIBRARY]


@contextmanager
def without_networkx() -> Iterator[None]:
    """Allow importing the exporter without networkx inside; afterwards networkx can be imported as usual.

    A thread that imports networkx inside this context gets its attributes on demand; but ``from networkx import *``
    imports no names, and a submodule that is imported by its full name is loaded twice.
    """
    is_loaded = IMPORTER in sys.modules or LIBRARY in sys.modules
    spec = None if is_loaded else find_spec(LIBRARY)
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
