"""Modules as bytes, with :mod:`counterpoint.value_codec`: classes and functions by import path, never pickle."""

from __future__ import annotations

import importlib
from collections import OrderedDict
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from counterpoint.errors import PlanError
from counterpoint.value_codec import JsonValue, ValueDecoder, ValueEncoder, decode_value

CONTAINERS = frozenset({list, tuple, set, frozenset, dict, OrderedDict})


def encode_module(value: object, name: str) -> bytes:
    """Return a module, a function or plain data as bytes; an object that occurs twice is encoded once.

    Args:
        value: modules of importable classes with plain attributes, importable functions and classes, partials of them,
            numbers, text, containers, tensors.
        name: name of the value in errors.

    Raises:
        PlanError: a part of it could only be pickled; the first such part is named.
    """
    values = _ModuleEncoder().values
    return b"".join(values.parts(values.encode(value, name)))


def decode_module(data: bytes) -> Any:  # noqa: ANN401 - whatever was encoded
    """Return the value given to ``encode_module``, with its own tensors; shared objects are shared again.

    Names in the data are imported, so read only data from sources that you would run code from.

    Raises:
        PlanError: a name cannot be imported here, or is neither a function nor a class.
        ProtocolError: the data is malformed.

    Example:
        >>> found = decode_module(encode_module(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), "model"))
        >>> found[0].out_features, type(found[1]).__name__
        (3, 'ReLU')
    """
    decoder = _ModuleDecoder()
    return decode_value(
        data,
        {
            "module": decoder.module,
            "tensor_of_module": decoder.tensor,
            "shared": decoder.shared,
            "partial": _decode_partial,
            "name": lambda _, path: _import_object(path),
            "device": lambda _, text: torch.device(text),
            "size": lambda _, *lengths: torch.Size(lengths),
        },
    )


class _ModuleEncoder:
    """Encode what only modules have."""

    def __init__(self) -> None:
        self.values = ValueEncoder(_unsupported, self._encode)
        self._numbers: dict[int, int] = {}
        self._keep_alive: list[object] = []  # an id is unique only while its object is alive

    def _encode(self, value: object, name: str) -> JsonValue:
        match value:
            case nn.Module() | Tensor():
                return self._encode_once(value, name)
            case torch.device():
                return ["device", str(value)]
            case torch.Size():
                return ["size", *value]
            case partial():
                parts = (value.func, list(value.args), value.keywords)
                return ["partial", *(self.values.encode(part, name) for part in parts)]
            case list() | tuple() | set() | frozenset() | dict() if type(value) in CONTAINERS:
                return None
            case None | bool() | int() | float() | str() | torch.dtype():
                return None
            case _:
                return ["name", _import_path(value, name)]

    def _encode_once(self, value: nn.Module | Tensor, name: str) -> JsonValue:
        if id(value) in self._numbers:
            return ["shared", self._numbers[id(value)]]
        self._numbers[id(value)] = len(self._numbers)
        self._keep_alive.append(value)
        if isinstance(value, Tensor):
            tensor = self.values.encode_tensor(value, name)
            return ["tensor_of_module", tensor, isinstance(value, nn.Parameter), value.requires_grad]
        path = _import_path(type(value), name)
        state = value.__getstate__()  # type: ignore[no-untyped-call] # the state that pickle would have used
        attributes = {key: self.values.encode(part, _attribute_path(name, key)) for key, part in state.items()}
        return ["module", path, attributes]


class _ModuleDecoder:
    """Decode what only modules have."""

    def __init__(self) -> None:
        self._objects: list[nn.Module | Tensor] = []  # in the order of their numbers

    def module(self, values: ValueDecoder, path: str, attributes: JsonValue) -> nn.Module:
        """Return a module."""
        kind = _import_object(path)
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise PlanError(f"{path} is not an nn.Module class; the data was not written by encode_module")
        module: Any = kind.__new__(kind)
        self._objects.append(module)
        module.__setstate__(values.decode(attributes))
        return module  # type: ignore[no-any-return]

    def tensor(self, values: ValueDecoder, tree: JsonValue, is_parameter: bool, requires_grad: bool) -> Tensor:  # noqa: FBT001 - as encoded
        """Return a tensor."""
        tensor = values.decode(tree).clone()
        self._objects.append(
            nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)
        )
        return self._objects[-1]  # type: ignore[return-value]

    def shared(self, values: ValueDecoder, number: int) -> nn.Module | Tensor:
        """Return a module or a tensor that was decoded before."""
        del values
        return self._objects[number]


def _decode_partial(values: ValueDecoder, *parts: JsonValue) -> partial[Any]:
    function, args, keywords = map(values.decode, parts)
    return partial(function, *args, **keywords)


def _attribute_path(where: str, key: str) -> str:
    """Return the path of a module's attribute; submodules and tensors omit torch's own dictionaries."""
    return where if key in {"_modules", "_parameters", "_buffers"} else f"{where}.{key}"


def _unsupported(name: str, part: object) -> PlanError:
    shown = getattr(part, "__qualname__", None)
    return PlanError(
        f"{name} has {shown if isinstance(shown, str) else f'a {type(part).__name__}'}, which another process cannot "
        "import; use functions and classes defined at module level in a file that the executors have, and plain "
        "attributes (numbers, text, containers, tensors)"
    )


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
    raise _unsupported(where, value)


def _import_object(name: str) -> Any:  # noqa: ANN401 - a function or a class
    module, _, path = name.partition(":")
    try:
        target = attrgetter(path)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise PlanError(f"{name} cannot be imported here ({error}); install the package that defines it") from error
    if not callable(target):
        raise PlanError(f"{name} is neither a function nor a class; the data was not written by encode_module")
    return target
