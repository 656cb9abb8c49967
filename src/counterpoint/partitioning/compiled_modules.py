"""Models that the user has compiled with ``torch.compile``: they stay compiled, or are refused, naming ``compile=``.

Dry runs look at a model under dispatch modes, where Dynamo cannot compile it and remembers that; they run it eagerly.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType

import torch
from torch import nn

from counterpoint.errors import PlanError
from counterpoint.model.compilation import Compilation
from counterpoint.partitioning.own_generators import find_reachable

USE_OPTION = "drop .compile() and torch.compile(), and give compile='segments', which compiles what ranks run"
"""The remedy for a model that would lose its compilation."""

WRAPPER = "_orig_mod"
"""Name of the model in the module that ``torch.compile(model)`` returns."""


def find_compiled(model: nn.Module) -> list[str]:
    """Return the paths of the modules whose calls are compiled; the model's own is empty.

    Example:
        >>> find_compiled(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
        []
    """
    dynamo = sys.modules.get("torch._dynamo")  # without it nothing is compiled
    wrapper = getattr(getattr(dynamo, "eval_frame", None), "OptimizedModule", ())
    return [
        path
        for path, module in model.named_modules()
        if isinstance(module, wrapper) or is_compiled_in_place(module) or is_compiled_function(module.forward)
    ]


def is_compiled_function(value: object) -> bool:
    """Return whether a function or a method is one that ``torch.compile`` has returned."""
    return isinstance(value, FunctionType | MethodType) and hasattr(value, "_is_torch_compile")


def is_compiled_in_place(module: nn.Module) -> bool:
    """Return whether a module was compiled by its method ``compile``, and not by ``torch.compile``."""
    return vars(module).get("_compiled_call_impl") is not None


@contextmanager
def run_eagerly(model: nn.Module) -> Iterator[None]:
    """Run compiled modules of a model eagerly inside."""
    if "torch._dynamo" not in sys.modules:  # without it nothing is compiled
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def require_compilable(
    model: nn.Module,
    plan: str,
    compilation: Compilation | None,
    opened: Collection[str] = (),
    *,
    is_traced: bool,
    draws: bool,
) -> None:
    """Check that the compiled modules of a model will run compiled.

    Args:
        model: the user's.
        plan: as text, for the error.
        compilation: that the plan compiles it with; None for none.
        opened: paths of the modules whose children ranks call instead of them.
        is_traced: whether ranks run a trace of it.
        draws: whether it draws random numbers in training.

    Raises:
        PlanError: they would silently run without compilation, or in pieces, or the plan compiles them again.
    """
    compiled = find_compiled(model)
    if not compiled:
        functions = find_reachable(model, is_compiled_function)
        if not functions or compilation is not None:  # its graphs contain those of functions
            return
        name = getattr(functions[0], "__qualname__", "a function")
        what = f"{describe_module(model, '')} calls {name}, which is compiled with torch.compile"
    else:
        what = f"{describe_module(model, compiled[0])} is compiled with torch.compile"
    if compilation is not None:
        raise PlanError(
            f"{what}, and compile={compilation} compiles it, too; drop .compile() and torch.compile(), or compile="
        )
    uncalled = next((path for path in compiled if path in opened), None)
    if uncalled is not None:
        raise PlanError(
            f"{describe_module(model, uncalled)} is compiled with torch.compile, but under {plan} ranks call its "
            f"children one by one; compile these instead, or {USE_OPTION}"
        )
    if is_traced:
        raise PlanError(
            f"{what}, but under {plan} ranks run the operations of a trace of the model, which is not compiled; "
            f"{USE_OPTION}"
        )
    if draws:
        raise PlanError(
            f"{what}, but the model draws random numbers in training, which ranks key by sample, and which a graph "
            f"draws under compile= only; {USE_OPTION}, or set dropout to 0"
        )


def require_not_copied(model: nn.Module, plan: str, remedy: str) -> None:
    """Check that no module of a model is compiled that ranks train copies of.

    Args:
        model: the user's.
        plan: as text, for the error.
        remedy: another one; empty for none.

    Raises:
        PlanError: one is; copies of modules are not compiled.
    """
    compiled = find_compiled(model)
    if compiled:
        raise PlanError(
            f"{describe_module(model, compiled[0])} is compiled with torch.compile, but under {plan} ranks train "
            f"copies of the model, and copies are not compiled; {USE_OPTION}{remedy}"
        )


def describe_module(model: nn.Module, path: str) -> str:
    """Return a module for an error: its path, or the class of the model itself."""
    inner = without_wrapper(path)
    return f"'{inner}'" if inner else type(getattr(model, WRAPPER, model)).__name__


def without_wrapper(path: str) -> str:
    """Return the path of a module without the name that ``torch.compile(model)`` puts before it.

    Example:
        >>> without_wrapper("_orig_mod.blocks.0"), without_wrapper("_orig_mod"), without_wrapper("blocks.0")
        ('blocks.0', '', 'blocks.0')
    """
    return ".".join(name for name in path.split(".") if name != WRAPPER)
