"""Find forward hooks that keep what a module computes, for a loss to read: right only where the module itself runs.

Ranks that run a trace of the model call no hooks. Ranks with parts of a model would differentiate a kept value twice,
or have that of another microbatch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from counterpoint.data.microbatch_reader import preserve_rng
from counterpoint.errors import PlanError
from counterpoint.partitioning.dry_run import Inputs, ModuleAttributes, preserve_state, split_call_args


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
    stores = [(path, store) for path, hook in hooks for store in _find_stores(hook)]
    before = [(store, _read(store)) for _, store in stores]
    if not stores:
        return
    known = {id(value) for _, values in before for value in _tensors(values)}
    try:
        _run(model, inputs)
        kept = [
            path
            for path, store in stores
            if any(value.grad_fn is not None and id(value) not in known for value in _tensors(_read(store)))
        ]
    except Exception:  # noqa: BLE001 - training raises it again, with its location
        return
    finally:
        for store, values in before:
            _write(store, values)
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


def _find_stores(hook: Callable[..., object]) -> Iterator[Any]:
    """Yield what a hook can write to: cells of its closure, collections, and objects with attributes."""
    if isinstance(hook, partial):
        for value in (*hook.args, *hook.keywords.values()):
            yield from _as_store(value)
        yield from _find_stores(hook.func)
    elif isinstance(hook, MethodType):
        yield from _as_store(hook.__self__)
    elif isinstance(hook, FunctionType):
        for cell in hook.__closure__ or ():
            yield cell
            yield from _as_store(_read(cell))
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


def _read(store: Any) -> Any:  # noqa: ANN401 - whatever a hook has
    """Return a copy of what a store has."""
    if isinstance(store, CellType):
        try:
            return store.cell_contents
        except ValueError:  # empty
            return None
    return copy.copy(store if type(store) in {list, dict, set} else vars(store))


def _write(store: Any, values: Any) -> None:  # noqa: ANN401 - as above
    if isinstance(store, CellType):
        store.cell_contents = values
    elif type(store) is list:
        store[:] = values
    else:
        target = store if type(store) in {dict, set} else vars(store)
        target.clear()
        target.update(values)


def _tensors(values: Any) -> list[Tensor]:  # noqa: ANN401 - as above
    return [
        leaf for leaf in tree_leaves(list(values) if isinstance(values, set) else values) if isinstance(leaf, Tensor)
    ]
