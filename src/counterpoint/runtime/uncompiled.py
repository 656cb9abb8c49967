"""Calls of torch's optimizers that do not load torch's compiler.

Some methods of optimizers are marked as none of the compiler's business. Their wrappers look that up in the compiler,
and so the first optimizer of a process loads all of it: two seconds, and 70 MB in every rank. Where nobody has loaded
it, nobody compiles anything, and the methods can be called as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from torch import optim

COMPILER = "torch._dynamo"
METHODS = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
KNOWN = "__dynamo_disable"
"""Where a wrapper keeps what it has found: what it calls in the method's place."""


@contextmanager
def without_compiler() -> Iterator[None]:
    """Inside, optimizers can be made without loading the compiler; afterwards torch is as it was."""
    methods = [getattr(getattr(optim.Optimizer, name), "__wrapped__", None) for name in METHODS]
    fresh = [] if COMPILER in sys.modules else [one for one in methods if one is not None and not hasattr(one, KNOWN)]
    for method in fresh:
        setattr(method, KNOWN, method)
    try:
        yield
    finally:
        for method in fresh:
            delattr(method, KNOWN)
