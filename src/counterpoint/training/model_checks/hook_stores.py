"""Find forward hooks that keep what a module computes, for a loss to read: right only where the module itself runs.

Ranks that run a trace of the model call no hooks. Ranks with parts of a model would differentiate a kept value twice,
or have that of another microbatch.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from counterpoint.data.microbatch_reader import preserve_rng
from counterpoint.errors import PlanError
from counterpoint.partitioning.dry_run import Inputs, ModuleAttributes, preserve_state, split_call_args
from counterpoint.partitioning.hook_state import find_stores
from counterpoint.partitioning.stores import is_store_changed, read_store
from counterpoint.partitioning.tracing.export_trace import WHOLE_MODEL_RULE
from counterpoint.runtime.microbatches import copy_tensors
from counterpoint.terminal_text import warn

Found = TypeVar("Found")


def require_no_kept_outputs(
    model: nn.Module, inputs: Inputs, plan: str, *, are_copied: bool, are_traced: bool = False
) -> None:
    """Run the model once if it has forward hooks, and check that they keep nothing that can be differentiated.

    A warning names a hook that keeps something else, if ranks run a trace, in which it is not called.

    Args:
        model: the user's; its state, and what hooks keep, are preserved.
        inputs: those of a microbatch.
        plan: as text, for the error.
        are_copied: whether ranks run copies of the whole model, which share functions, but not objects that are hooks.
        are_traced: whether ranks run a trace.

    Raises:
        PlanError: a hook keeps a differentiable value.
    """
    stores = [
        (path, store)
        for path, module in model.named_modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())  # noqa: SLF001 - there is no other way to see them
        if not (are_copied and isinstance(hook, FunctionType))
        for store in find_stores(hook)
    ]
    if not stores:
        return
    before = [read_store(store) for _, store in stores]
    known = {id(value) for store, values in zip(stores, before, strict=True) for value in _parts(store[1], values)}

    def find_kept() -> tuple[list[str], list[str]]:
        """Return the paths of modules whose hooks keep a differentiable value, and of those that keep any."""
        new = [(path, value) for path, store in stores for value in _parts(store, read_store(store))]
        kept = [path for path, value in new if value.grad_fn is not None and id(value) not in known]
        changed = [
            path for (path, store), values in zip(stores, before, strict=True) if is_store_changed(store, values)
        ]
        return kept, changed

    try:
        kept, changed = _run(model, inputs, find_kept)
    except Exception:  # noqa: BLE001 - training raises it again, with its location
        return
    if kept:
        raise PlanError(
            f"a forward hook of {_describe(model, kept[0])} keeps a differentiable value, but under {plan} ranks run "
            "copies, parts or a trace of the model, so a loss that reads the value would see another one; return it "
            "from forward together with the output, keep value.detach() if it is only looked at, or train in a single "
            "process (solo)"
        )
    if changed and are_traced:
        warn(
            f"a forward hook of {_describe(model, changed[0])} keeps what it sees, but under {plan} ranks run a trace "
            "of the model, which calls no hooks, so that it keeps nothing in training; return the value from forward "
            f"together with the output, or {WHOLE_MODEL_RULE}",
            stacklevel=2,
        )


def _describe(model: nn.Module, path: str) -> str:
    return f"module {path!r}" if path else type(model).__name__


def _run(model: nn.Module, inputs: Inputs, find_kept: Callable[[], Found]) -> Found:
    """Run a model; return what a function finds before what hooks have written to is restored."""
    args, kwargs = split_call_args(copy_tensors(inputs))
    attributes = ModuleAttributes(model)
    try:
        with preserve_rng(), preserve_state(model, attributes=attributes), torch.enable_grad():
            model(*args, **kwargs)
            return find_kept()
    finally:
        attributes.restore()


def _parts(store: Any, values: Any) -> list[Tensor]:  # noqa: ANN401 - as above
    """Return the tensors that a store has; one that is a store itself, if a hook has made it differentiable."""
    leaves = [store] if isinstance(store, Tensor) else tree_leaves([*values] if isinstance(values, set) else values)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and not (leaf is store and leaf.grad_fn is None)]
