"""Find forward hooks that keep what a module computes, for a loss to read: right only where the module itself runs.

Ranks that run a trace of the model call no hooks. Ranks with parts of a model would differentiate a kept value twice,
or have that of another microbatch.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from counterpoint.data.microbatch_reader import preserve_rng
from counterpoint.errors import PlanError
from counterpoint.partitioning.dry_run import Inputs, ModuleAttributes, preserve_state, split_call_args
from counterpoint.runtime.gradient_hooks import find_stores, read_store, write_store


def require_no_kept_outputs(model: nn.Module, inputs: Inputs, plan: str, *, are_copied: bool) -> None:
    """Run the model once if it has forward hooks, and check that they keep nothing that can be differentiated.

    Args:
        model: the user's; its state, and what hooks keep, are preserved.
        inputs: those of a microbatch.
        plan: as text, for the error.
        are_copied: whether ranks run copies of the whole model, which share functions, but not objects that are hooks.

    Raises:
        PlanError: a hook keeps a differentiable value.
    """
    hooks = [
        (path, hook)
        for path, module in model.named_modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())  # noqa: SLF001 - there is no other way to see them
        if not (are_copied and isinstance(hook, FunctionType))
    ]
    stores = [(path, store) for path, hook in hooks for store in find_stores(hook)]
    before = [(store, read_store(store)) for _, store in stores]
    if not stores:
        return
    known = {id(value) for _, values in before for value in _tensors(values)}
    try:
        _run(model, inputs)
        kept = [
            path
            for path, store in stores
            if any(value.grad_fn is not None and id(value) not in known for value in _tensors(read_store(store)))
        ]
    except Exception:  # noqa: BLE001 - training raises it again, with its location
        return
    finally:
        for store, values in before:
            write_store(store, values)
    if kept:
        raise PlanError(
            f"a forward hook of {f'module {kept[0]!r}' if kept[0] else type(model).__name__} keeps a differentiable "
            f"value, but under {plan} ranks run copies, parts or a trace of the model, so a loss that reads the value "
            "would see another one; return it from forward together with the output, keep value.detach() if it is only "
            "looked at, or train in a single process (solo)"
        )


def _run(model: nn.Module, inputs: Inputs) -> None:
    args, kwargs = split_call_args(tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, inputs))
    attributes = ModuleAttributes(model)
    try:
        with preserve_rng(), preserve_state(model, attributes=attributes), torch.enable_grad():
            model(*args, **kwargs)
    finally:
        attributes.restore()


def _tensors(values: Any) -> list[Tensor]:  # noqa: ANN401 - as above
    return [
        leaf for leaf in tree_leaves(list(values) if isinstance(values, set) else values) if isinstance(leaf, Tensor)
    ]
