"""Modules as bytes, with :mod:`counterpoint.value_codec`: classes and functions by import path, never pickle.

Data of a stranger may name only what is in ``TORCH``: torch's own layers and functions of tensors. Nothing is imported
for it, and it cannot replace a method of a module or add a hook. Whoever trusts the data says so; see ``Trust``.
"""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from counterpoint.errors import CheckpointError, CounterpointError, PlanError
from counterpoint.json_reader import JsonValue
from counterpoint.optim.validation import shorten
from counterpoint.value_codec import ValueDecoder, ValueEncoder, decode_value, malformed_value

Trust: TypeAlias = bool | Collection[str]
"""What data may import besides what is in ``TORCH``: everything, for True, or what these modules, and modules in them,
define. Importing a module runs its code, and a trusted class may do anything when it is called."""

CONTAINERS = frozenset({list, tuple, set, frozenset, dict, OrderedDict})
FUNCTION_NAMES: Final = (
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "celu", "cosine_similarity", "cross_entropy", "elu",
    "gelu", "glu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "huber_loss", "kl_div", "l1_loss",
    "leaky_relu", "log_softmax", "logsigmoid", "mish", "mse_loss", "nll_loss", "normalize", "pairwise_distance", "relu",
    "relu6", "selu", "sigmoid", "silu", "smooth_l1_loss", "softmax", "softmin", "softplus", "softshrink", "softsign",
    "tanh", "tanhshrink",
)  # fmt: skip
LAYERS: Final = (
    nn.modules.linear.NonDynamicallyQuantizableLinear,  # of attention
    *(
        kind
        for name, kind in vars(nn).items()
        if isinstance(kind, type) and issubclass(kind, nn.Module) and not name.startswith(("Lazy", "DataParallel"))
    ),
)
TORCH: Final[Mapping[str, Any]] = {
    f"{one.__module__}:{one.__qualname__}": one
    for one in (*(getattr(nn.functional, name) for name in FUNCTION_NAMES), *LAYERS)
}
"""The classes and functions that data may name without trust, by import path: they only compute tensors."""
PARTS: Final[Mapping[str, type]] = {"_parameters": nn.Parameter, "_buffers": Tensor, "_modules": nn.Module}


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


def decode_module(data: bytes, *, trust: Trust = False) -> Any:  # noqa: ANN401 - whatever was encoded
    """Return the value given to ``encode_module``, with its own tensors; shared objects are shared again.

    Args:
        data: from ``encode_module``.
        trust: what the data may import. True is for data that did not leave the user's hands, such as that of a driver
            for its ranks.

    Raises:
        PlanError: a name is not trusted, cannot be imported here, or is neither a function nor a class.
        ProtocolError: the data is malformed.

    Example:
        >>> found = decode_module(encode_module(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), "model"))
        >>> found[0].out_features, type(found[1]).__name__
        (3, 'ReLU')
    """
    decoder = _ModuleDecoder(trust)
    kinds: dict[str, Callable[..., Any]] = {
        "module": decoder.module,
        "tensor_of_module": decoder.tensor,
        "shared": decoder.shared,
        "partial": decoder.bound_function,
        "name": lambda _, path: decoder.find(path),
        "device": lambda _, text: torch.device(text),
        "size": lambda _, *lengths: torch.Size(lengths),
    }
    return decode_value(data, {kind: partial(_decode_checked, kind, decode) for kind, decode in kinds.items()})


def decode_model_table(rows: Sequence[Mapping[str, object]], trust: Trust) -> tuple[nn.Module, str, list[float]]:
    """Return the model, the plan and the losses in the table of a saved Spark model.

    Args:
        rows: of the table, by column.
        trust: see :func:`decode_module`.

    Raises:
        CheckpointError: the table is not one of a model.
        PlanError: as :func:`decode_module` raises it.
        ProtocolError: as before.
    """
    match rows:
        case [{"model": bytes() | bytearray() as data, "plan": str(plan), "losses": [*found]}] if all(
            isinstance(loss, float) for loss in found
        ):
            losses: Any = found
            model = decode_module(bytes(data), trust=trust)
        case _:
            columns = shorten(", ".join(map(str, rows[0]))) if rows else "no columns"
            raise CheckpointError(
                f"its table has {len(rows)} rows with {columns}, but a saved TorchModel has one, with the columns "
                "model, plan and losses; give the path of a TorchModel"
            )
    if not isinstance(model, nn.Module):
        raise CheckpointError(f"its table has a {type(model).__name__} in place of a model; save a TorchModel there")
    return model, plan, losses


def _decode_checked(kind: str, decode: Callable[..., Any], *parts: JsonValue) -> Any:  # noqa: ANN401 - as decoded
    """Return what ``decode`` returns.

    Raises:
        ProtocolError: the parts are not those of the kind.
    """
    try:
        return decode(*parts)
    except (CounterpointError, RecursionError):
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        problem = shorten(ascii(str(error)))
        raise malformed_value(f"a part of the kind {kind} is wrong ({type(error).__name__}: {problem})") from error


def add_trusted(trust: Trust, text: str) -> Trust:
    """Return what is trusted together with a text of modules.

    Args:
        trust: what is trusted anyway.
        text: modules separated by commas; ``*`` for all, empty for none.

    Example:
        >>> add_trusted(["a"], "b, c"), add_trusted(False, "*"), add_trusted(True, "b")
        (['a', 'b', 'c'], True, True)
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    return True if trust is True or "*" in names else [*(trust or ()), *names]


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
    """Decode what only modules have.

    Args:
        trust: what the data may import.
    """

    def __init__(self, trust: Trust) -> None:
        self._trust = trust
        self._objects: list[nn.Module | Tensor] = []  # in the order of their numbers
        self._unfinished: set[int] = set()  # the ids of those whose parts are being decoded

    def module(self, values: ValueDecoder, path: str, attributes: JsonValue) -> nn.Module:
        """Return a module."""
        kind = self.find(path)
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise PlanError(f"{path} is not an nn.Module class; the data was not written by encode_module")
        module: Any = kind.__new__(kind)
        self._objects.append(module)
        self._unfinished.add(id(module))
        state = values.decode(attributes)
        self._check_parts(path, state)
        if self._trust is not True:
            _check_state(kind, path, state)
        module.__setstate__(state)
        self._unfinished.remove(id(module))
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
        if not 0 <= number < len(self._objects):
            raise malformed_value(f"nothing before it has the number {number}")
        return self._objects[number]

    def bound_function(self, values: ValueDecoder, *parts: JsonValue) -> partial[Any]:
        """Return a function with some of its arguments."""
        function, args, keywords = map(values.decode, parts)
        return partial(function, *args, **keywords)

    def find(self, path: str) -> Any:  # noqa: ANN401 - a function or a class
        """Return the function or the class of an import path.

        Raises:
            PlanError: it is not trusted, cannot be imported here, or is neither.
        """
        if path in TORCH:
            return TORCH[path]
        module, _, name = path.partition(":")
        if not _is_trusted(module, self._trust):
            raise PlanError(
                f"the data names {shorten(ascii(path))}, which is not one of torch's layers and functions, and to "
                "import it may run any code; if you would run the code of its author, give trust="
                f"[{shorten(ascii(module))}], or trust=True for everything"
            )
        try:
            target = attrgetter(name)(importlib.import_module(module))
        except (ImportError, AttributeError) as error:
            raise PlanError(f"{path} cannot be imported here ({error}); install the package that defines it") from error
        if not callable(target):
            raise PlanError(f"{path} is neither a function nor a class; the data was not written by encode_module")
        if not _is_trusted(getattr(target, "__module__", None) or "", self._trust):
            raise PlanError(f"{path} is defined in {target.__module__}, which is not trusted; name it there")
        return target

    def _check_parts(self, path: str, state: object) -> None:
        """Raise ProtocolError unless the parameters, buffers and submodules of a state are that, none of itself."""
        if type(state) is not dict:
            raise malformed_value(f"the state of {path} is a {type(state).__name__}")
        for key, kind in PARTS.items():
            parts = state.get(key, {})
            if not isinstance(parts, dict) or not all(
                isinstance(name, str) and isinstance(part, kind | None) for name, part in parts.items()
            ):
                raise malformed_value(f"{key} of {path} is not a mapping from names to a {kind.__name__}")
        if not self._unfinished.isdisjoint(map(id, state.get("_modules", {}).values())):
            raise malformed_value(f"{path} contains itself")


def _is_trusted(module: str, trust: Trust) -> bool:
    names = [trust] if isinstance(trust, str) else trust
    return names if isinstance(names, bool) else any(f"{module}.".startswith(f"{name}.") for name in names)


def _check_state(kind: type[nn.Module], path: str, state: Mapping[str, Any]) -> None:
    """Check that a state only has data: no hooks, no method replaced, and what torch keeps of the type that it has.

    Raises:
        ProtocolError: it does not.
    """
    missing = {*PARTS, "training"} - state.keys()
    if missing and path in TORCH:
        raise malformed_value(f"{path} has no {', '.join(sorted(missing))}")
    for key, empty in vars(nn.Module()).items():
        if key not in state or (key == "_is_full_backward_hook" and type(state[key]) is bool):
            continue
        if type(state[key]) is not type(empty) or ("hooks" in key and state[key]):
            raise malformed_value(f"{key} of {path} has hooks, or is of another type than torch's")
    for key, value in state.items():
        is_dunder = key.startswith("__") and key.endswith("__")
        if is_dunder or key == "_compiled_call_impl" or (callable(value) and callable(getattr(kind, key, None))):
            raise malformed_value(f"{shorten(ascii(key))} of {path} would replace what torch calls")


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
