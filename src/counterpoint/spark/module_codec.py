"""Serialization of modules as JSON and tensors: classes and functions by import path, never pickle."""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from counterpoint.errors import PlanError

Tree: TypeAlias = Any
"""JSON: plain values as they are; everything else is a list that begins with its kind."""

CONTAINERS: dict[str, type] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "size": torch.Size,
}
MAPPINGS: dict[str, type] = {"dict": dict, "ordered": OrderedDict}


@dataclass(frozen=True, slots=True)
class SerializedModule:
    """A value that may contain modules, as JSON and tensors.

    Args:
        tree: structure of the value as JSON.
        tensors: parameters and buffers by the keys used in the tree; a shared tensor has one key.
    """

    tree: Tree
    tensors: Mapping[str, Tensor]


def serialize_module(value: object, name: str) -> SerializedModule:
    """Return a module, a function or plain data as JSON and tensors.

    Args:
        value: modules of importable classes with plain attributes, importable functions and classes, partials of them,
            numbers, text, containers, tensors.
        name: name of the value in errors.

    Raises:
        PlanError: a part of it could only be pickled; the first such part is named.

    Example:
        >>> serialize_module(partial(torch.optim.SGD, lr=0.1), "optimizer").tree
        ['partial', ['name', 'torch.optim.sgd:SGD'], ['list'], ['dict', ['lr', 0.1]]]
    """
    writer = _ModuleSerializer()
    return SerializedModule(writer.tree(value, name), writer.tensors)


def deserialize_module(serialized: SerializedModule) -> Any:  # noqa: ANN401 - whatever was written
    """Return the value given to ``serialize_module``, with its own tensors; shared objects are shared again.

    Names in the tree are imported, so read only trees from sources that you would run code from.

    Raises:
        PlanError: a name cannot be imported here, or is neither a function nor a class.

    Example:
        >>> found = deserialize_module(serialize_module(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), "model"))
        >>> found[0].out_features, type(found[1]).__name__
        (3, 'ReLU')
    """
    return _ModuleDeserializer(serialized.tensors).value(serialized.tree)


@dataclass(slots=True)
class _ModuleSerializer:
    tensors: dict[str, Tensor] = field(default_factory=dict)
    keys: dict[int, str] = field(default_factory=dict)
    modules: dict[int, int] = field(default_factory=dict)
    keep_alive: list[object] = field(default_factory=list)  # an id is unique only while its object is alive

    def tree(self, value: object, where: str) -> Tree:
        """Return the JSON tree of a value; ``where`` names it in errors."""
        match value:
            case None | bool() | int() | float() | str():
                return value
            case nn.Module():
                return self._module(value, where)
            case Tensor():
                return ["tensor", self._key(value), isinstance(value, nn.Parameter), value.requires_grad]
            case torch.dtype():
                return ["dtype", str(value).removeprefix("torch.")]
            case torch.device():
                return ["device", str(value)]
            case partial():
                return ["partial", *(self.tree(part, where) for part in (value.func, list(value.args), value.keywords))]
            case _:
                return self._other(value, where)

    def _other(self, value: object, where: str) -> Tree:
        for kind, container in (CONTAINERS | MAPPINGS).items():
            if type(value) is container:
                return [kind, *self._items(value, where)]
        return ["name", _import_path(value, where)]

    def _items(self, value: Any, where: str) -> list[Tree]:  # noqa: ANN401 - a container
        if isinstance(value, dict):
            return [[self.tree(key, where), self.tree(item, f"{where}[{key!r}]")] for key, item in value.items()]
        ordered = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        return [self.tree(item, f"{where}[{at}]") for at, item in enumerate(ordered)]

    def _module(self, module: nn.Module, where: str) -> Tree:
        if id(module) in self.modules:
            return ["shared", self.modules[id(module)]]
        name = _import_path(type(module), where)
        self.modules[id(module)] = len(self.modules)
        self.keep_alive.append(module)
        state = module.__getstate__()  # type: ignore[no-untyped-call] # the state that pickle would have used
        values = [[key, self.tree(value, _attribute_path(where, key))] for key, value in state.items()]
        return ["module", name, values]

    def _key(self, tensor: Tensor) -> str:
        if id(tensor) not in self.keys:
            self.keep_alive.append(tensor)
            key = self.keys[id(tensor)] = f"{len(self.keys):04}"
            self.tensors[key] = tensor.detach().cpu().clone().contiguous()
        return self.keys[id(tensor)]


@dataclass(slots=True)
class _ModuleDeserializer:
    tensors: Mapping[str, Tensor]
    restored: dict[str, Tensor] = field(default_factory=dict)
    modules: list[nn.Module] = field(default_factory=list)

    def value(self, tree: Tree) -> Any:  # noqa: ANN401 - whatever was written
        """Return the value of a JSON tree."""
        if not isinstance(tree, list):
            return tree
        kind, *parts = tree
        if kind in CONTAINERS:
            return CONTAINERS[kind](map(self.value, parts))
        if kind in MAPPINGS:
            return MAPPINGS[kind]((self.value(key), self.value(item)) for key, item in parts)
        made = self._constructors().get(kind)
        if made is None:
            raise PlanError(f"unknown kind {kind!r} in a serialized module; read it with the version that wrote it")
        return made(*parts)

    def _constructors(self) -> dict[str, Callable[..., Any]]:
        return {
            "module": self._module,
            "shared": self.modules.__getitem__,
            "tensor": self._tensor,
            "dtype": partial(getattr, torch),
            "device": torch.device,
            "partial": self._partial,
            "name": _import_object,
        }

    def _partial(self, function: Tree, args: Tree, keywords: Tree) -> partial[Any]:
        return partial(self.value(function), *self.value(args), **self.value(keywords))

    def _module(self, name: str, values: Tree) -> nn.Module:
        kind = _import_object(name)
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise PlanError(f"{name} is not an nn.Module class; the data was not written by serialize_module")
        module: Any = kind.__new__(kind)
        self.modules.append(module)
        module.__setstate__({key: self.value(value) for key, value in values})
        return module  # type: ignore[no-any-return]

    def _tensor(self, key: str, is_parameter: bool, requires_grad: bool) -> Tensor:  # noqa: FBT001 - as written
        if key not in self.restored:
            tensor = self.tensors[key].clone()
            self.restored[key] = (
                nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)
            )
        return self.restored[key]


def _attribute_path(where: str, key: str) -> str:
    """Return the path of a module's attribute; submodules and tensors omit torch's own dictionaries."""
    return where if key in {"_modules", "_parameters", "_buffers"} else f"{where}.{key}"


def _import_path(value: object, where: str) -> str:
    """Return the path from which another process can import a function or a class.

    Raises:
        PlanError: there is none.
    """
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module and name and module != "__main__":
        try:
            if attrgetter(name)(importlib.import_module(module)) is value:
                return f"{module}:{name}"
        except (ImportError, AttributeError, ValueError):
            pass
    shown = name if isinstance(name, str) else f"a {type(value).__name__}"
    raise PlanError(
        f"{where} has {shown}, which another process cannot import; use functions and classes defined at module level "
        "in a file that the executors have, and plain attributes (numbers, text, containers, tensors)"
    )


def _import_object(name: str) -> Any:  # noqa: ANN401 - a function or a class
    module, _, path = name.partition(":")
    try:
        target = attrgetter(path)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise PlanError(f"{name} cannot be imported here ({error}); install the package that defines it") from error
    if not callable(target):
        raise PlanError(f"{name} is neither a function nor a class; the data was not written by serialize_module")
    return target
