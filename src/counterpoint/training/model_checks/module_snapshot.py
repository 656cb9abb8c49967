"""The state of modules at one moment, to be restored before each of several runs of the same model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from counterpoint.partitioning.stores import find_stores_in, is_store_changed, read_store, write_store

_MODULE_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training"}
_COPIED_TYPES = (bool, int, float, str, Tensor, list, dict, set, tuple, type(None))


class ModuleSnapshot:
    """Parameters, buffers and plain attributes of modules; the modules stay the same objects.

    Losses, hooks and optimizers that refer to the modules or their parameters keep doing so, which they would not with
    copies of them. Objects in attributes stay the same, too, and get their own attributes back.

    Args:
        modules: those to restore, with all modules inside.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        unique = dict.fromkeys(inner for module in modules for inner in module.modules())
        self._params = {
            param: param.detach().clone() for module in unique for param in module.parameters(recurse=False)
        }
        kept: list[Any] = [*unique, *self._params]
        self._memo = {id(value): value for value in kept}
        self._buffers = [
            (module, name, buffer, clone_of(buffer)) for module in unique for name, buffer in own_buffers(module)
        ]
        self._attributes = [(module, self._copy_attributes(vars(module))) for module in unique]
        self._objects = [
            (store, read_store(store))
            for _, attributes in self._attributes
            for value in attributes.values()
            if not isinstance(value, _COPIED_TYPES)
            for store in find_stores_in(value, with_shared=False)
        ]

    def _copy_attributes(self, attributes: dict[str, Any]) -> dict[str, Any]:
        return {
            name: copy_value(value, dict(self._memo)) if isinstance(value, _COPIED_TYPES) else value
            for name, value in attributes.items()
            if name not in _MODULE_ATTRIBUTES
        }

    def restore(self, dtype: torch.dtype | None = None) -> None:
        """Restore everything.

        Args:
            dtype: of floating-point parameters and buffers; by default their own.
        """
        for param, value in self._params.items():
            param.data = convert_floats(value, dtype).clone()
            param.grad = None
        for module, name, buffer, saved in self._buffers:
            if buffer is not None and saved is not None:
                buffer.data = convert_floats(saved, dtype).clone()
            vars(module)["_buffers"][name] = buffer
        for module, attributes in self._attributes:
            for name in vars(module).keys() - attributes.keys() - _MODULE_ATTRIBUTES:
                del vars(module)[name]
            vars(module).update(self._copy_attributes(attributes))
        for store, values in self._objects:
            if is_store_changed(store, values):
                write_store(store, values)


def copy_value(value: Any, memo: dict[int, Any]) -> Any:  # noqa: ANN401 - whatever an attribute holds
    """Return a deep copy; the value itself where one is impossible, as of a tensor with a gradient function."""
    try:
        return copy.deepcopy(value, memo)
    except (RuntimeError, TypeError):
        return value


def own_buffers(module: nn.Module) -> list[tuple[str, Tensor | None]]:
    """Return the buffers of a module without those of modules inside, also those that are None."""
    return list(vars(module)["_buffers"].items())


def clone_of(value: Tensor | None) -> Tensor | None:
    """Return a copy of a tensor, or None."""
    return None if value is None else value.detach().clone()


def convert_floats(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a tensor in another dtype, if it is floating-point and a dtype is given."""
    return value if dtype is None or not value.is_floating_point() else value.to(dtype)
