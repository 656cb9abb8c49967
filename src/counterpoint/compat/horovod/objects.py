"""Objects encoded as JSON and raw tensors; nothing is pickled, so received data cannot run code."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

from counterpoint.compat.horovod import collectives
from counterpoint.compat.horovod.collectives import DTYPES, NamedGroup
from counterpoint.compat.horovod.process_sets import ProcessSet, global_process_set, member_group
from counterpoint.compat.horovod.synchronize import wait_tensor
from counterpoint.compat.horovod.world import current_world
from counterpoint.errors import DataError
from counterpoint.fabric.fingerprint import dtype_name

TENSOR_TYPES = {dtype_name(dtype): dtype for dtype in DTYPES}


def encode_object(value: object, where: str = "the object") -> Tensor:
    """Return the value as bytes: None, numbers, text, bytes, lists, tuples, sets, dicts, dtypes, tensors and arrays.

    Args:
        value: to encode.
        where: name of the value in errors.

    Raises:
        DataError: a part of it has another type.

    Example:
        >>> decode_object(encode_object({"epoch": 3, 7: (1.5, None)}))
        {'epoch': 3, 7: (1.5, None)}
    """
    payload: list[Tensor] = []
    head = json.dumps(_to_tree(value, where, payload)).encode()
    size = torch.tensor([len(head)], dtype=torch.int64).view(torch.uint8)
    return torch.cat([size, _bytes(head), *payload])


def decode_object(raw: Tensor) -> Any:  # noqa: ANN401 - whatever was encoded
    """Return the value; its tensors own their memory."""
    start = 8 + int(raw[:8].clone().view(torch.int64))
    tree = json.loads(raw[8:start].numpy().tobytes())
    return _from_tree(tree, raw[start:])


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _to_tree(value: object, where: str, payload: list[Tensor]) -> object:
    """Return JSON in which all but plain values are tagged with their type; append tensors to ``payload``."""
    match value:
        case None | bool() | str():
            return value
        case int() | float() if type(value) in {int, float}:
            return value
        case list() | tuple() | set() | frozenset() if type(value) in {list, tuple, set, frozenset}:
            items = [_to_tree(item, f"{where}[{index}]", payload) for index, item in enumerate(value)]
            return [type(value).__name__, *items]
        case dict():
            pairs = [
                [_to_tree(key, f"a key of {where}", payload), _to_tree(item, f"{where}[{key!r}]", payload)]
                for key, item in value.items()
            ]
            return ["dict", *pairs]
        case bytes():
            return ["bytes", *_append_tensor(_bytes(value), payload)]
        case torch.dtype():
            return ["dtype", dtype_name(value)]
        case Tensor() if value.layout == torch.strided and value.dtype in DTYPES:
            return ["tensor", *_append_tensor(value.detach().cpu(), payload)]
        case np.ndarray() | np.generic() if np.asarray(value).dtype.kind in "biufc":
            array = np.asarray(value)
            raw = torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8) if array.size else _bytes(b"")
            kind = "array" if isinstance(value, np.ndarray) else "number"
            return [kind, array.dtype.str, list(array.shape), *_append_tensor(raw, payload)]
        case _:
            raise DataError(
                f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be sent; "
                "objects are never pickled: send numbers, text, lists, tuples, sets, dicts, tensors "
                "and numpy arrays, such as its state_dict(), and rebuild the object on the other ranks"
            )


def _append_tensor(tensor: Tensor, payload: list[Tensor]) -> list[object]:
    """Append a tensor to ``payload``, and return its dtype, shape, offset and length."""
    whole = tensor.contiguous()
    start = sum(len(part) for part in payload)
    raw = whole.reshape(-1).view(torch.uint8) if whole.numel() else _bytes(b"")
    payload.append(raw)
    return [dtype_name(whole.dtype), list(whole.shape), start, len(raw)]


def _read_tensor(facts: list[Any], payload: Tensor) -> Tensor:
    name, shape, start, size = facts
    return payload[start : start + size].clone().view(TENSOR_TYPES[name]).view(shape)


def _from_tree(tree: Any, payload: Tensor) -> Any:  # noqa: ANN401 - one line for each type
    if not isinstance(tree, list):
        return tree
    kind, *items = tree
    if kind == "dict":
        return {_from_tree(key, payload): _from_tree(item, payload) for key, item in items}
    if kind == "tensor":
        return _read_tensor(items, payload)
    if kind == "bytes":
        return _read_tensor(items, payload).numpy().tobytes()
    if kind == "dtype":
        return TENSOR_TYPES[items[0]]
    if kind in {"array", "number"}:
        raw = _read_tensor(items[2:], payload).numpy().tobytes()
        array = np.frombuffer(raw, dtype=np.dtype(items[0])).reshape(items[1]).copy()
        return array if kind == "array" else array[()]
    found = [_from_tree(item, payload) for item in items]
    return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](found)


def broadcast_object(
    obj: Any = None,  # noqa: ANN401 - any supported object
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:  # noqa: ANN401
    """Return the root's object; the root gets its own, the others an equal one.

    Args:
        obj: None, numbers, text, bytes, lists, tuples, sets, dicts, dtypes, tensors and numpy arrays, nested; ignored
            on the other ranks.
        root_rank: a global rank.
        name: for errors.
        process_set: members.

    Raises:
        DataError: a part of the object has another type; the error names it, also on the other ranks.
        HorovodInternalError: another rank has exited or is late.
    """
    world, group = current_world(), member_group(process_set)
    name = name or "an object"
    collectives.check_member(f"broadcast_object of {name}", root_rank, group)
    is_root = world.fabric.rank == root_rank
    raw, error = _try_encode(obj) if is_root else (torch.empty(0, dtype=torch.uint8), None)
    sizes = world.all_gather_ints("size of", name, [-1 if error is not None else len(raw)], group)
    _check_all_encoded(sizes, group, name, error)
    if not is_root:
        raw = torch.empty(sizes[group.index(root_rank)][0], dtype=torch.uint8)
    wait_tensor(collectives.broadcast(world, raw, root_rank, NamedGroup(name, group)))
    return obj if is_root else decode_object(raw)


def allgather_object(
    obj: Any,  # noqa: ANN401 - any supported object
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return all members' objects, in rank order; the types are those of :func:`broadcast_object`.

    Raises:
        DataError: a part of this rank's object has another type.
        HorovodInternalError: another rank has exited or is late, or its object cannot be encoded.
    """
    world, group = current_world(), member_group(process_set)
    name = name or "an object"
    raw, error = _try_encode(obj)
    sizes = world.all_gather_ints("size of", name, [-1 if error is not None else len(raw)], group)
    _check_all_encoded(sizes, group, name, error)
    whole = wait_tensor(collectives.all_gather(world, [raw], NamedGroup(name, group)))
    return [decode_object(part) for part in torch.split(whole, [size for (size,) in sizes])]


def _try_encode(value: object) -> tuple[Tensor, DataError | None]:
    try:
        return encode_object(value), None
    except DataError as error:
        return torch.empty(0, dtype=torch.uint8), error


def _check_all_encoded(sizes: list[list[int]], group: tuple[int, ...], name: str, own: DataError | None) -> None:
    """Raise unless all objects could be encoded; other ranks' errors name the rank."""
    if own is not None:
        raise own
    for member, (size,) in zip(group, sizes, strict=True):
        if size < 0:
            raise DataError(
                f"{name} of rank {member} cannot be sent; objects are never pickled: "
                f"the error of rank {member} names the part"
            )
