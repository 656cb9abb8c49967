"""Objects sent between ranks; nothing is pickled, so received data cannot run code."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from counterpoint.compat.horovod import collectives
from counterpoint.compat.horovod.collectives import NamedGroup
from counterpoint.compat.horovod.process_sets import ProcessSet, global_process_set, member_group
from counterpoint.compat.horovod.synchronize import wait_tensor
from counterpoint.compat.horovod.world import current_world
from counterpoint.errors import DataError
from counterpoint.rpc.tensor_codec import as_memoryview
from counterpoint.value_codec import decode_value, encode_parts


def encode_object(value: object) -> Tensor:
    """Return the value as bytes; see :func:`~counterpoint.value_codec.encode_value`.

    Raises:
        DataError: a part of it cannot be encoded.
    """
    return torch.frombuffer(bytearray().join(encode_parts(value, "the object", _unsupported)), dtype=torch.uint8)


def decode_object(raw: Tensor) -> Any:  # noqa: ANN401 - whatever was encoded
    """Return the value; its tensors own the bytes."""
    return decode_value(as_memoryview(raw))


def _unsupported(name: str, part: object) -> DataError:
    return DataError(
        f"{name} is a {type(part).__module__}.{type(part).__qualname__}, which cannot be sent; "
        "objects are never pickled: send numbers, text, lists, tuples, sets, dicts, tensors "
        "and numpy arrays, such as its state_dict(), and rebuild the object on the other ranks"
    )


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
