"""Slices of global tensors: each has its position, so that any sharding can be loaded into any other."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from counterpoint.errors import CheckpointError

Offset = int | tuple[int, ...]

#: torch's name of a dtype -> the name in a safetensors header. What is not here cannot be saved.
DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a name in ``DTYPES``."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), f"{name} is not a dtype"
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True, eq=False)
class TensorSlice:
    """A slice of the global tensor ``name`` on this rank.

    Args:
        name: of the tensor; any text.
        tensor: the values of the slice, on any device.
        global_shape: shape of the whole tensor.
        offset: an int for a range of the *flattened* tensor that begins there; a tuple for a box, with its first index
            in every dim.
    """

    name: str
    tensor: Tensor
    global_shape: tuple[int, ...]
    offset: Offset = 0


class SliceExtent(Protocol):
    """The position of a slice in its global tensor."""

    @property
    def name(self) -> str:
        """The tensor's name."""

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the slice."""

    @property
    def offset(self) -> Offset:
        """First flat index, or first index in every dim."""


def whole_tensor(name: str, tensor: Tensor) -> TensorSlice:
    """Return the slice that is all of ``tensor``."""
    return TensorSlice(name, tensor, tuple(tensor.shape))


def flat_slice(name: str, values: Tensor, global_shape: tuple[int, ...], start: int) -> TensorSlice:
    """Return the slice that is a range of a flattened tensor, in the tensor's own shape if it is all of it."""
    is_whole = values.numel() == math.prod(global_shape)
    return TensorSlice(name, values.view(global_shape) if is_whole else values, global_shape, start)


def check_slice(tensor_slice: TensorSlice) -> None:
    """Check that a slice can be saved: dense, of a known dtype, inside its global tensor.

    Raises:
        CheckpointError: it cannot be saved.
    """
    name = dtype_name(tensor_slice.tensor.dtype)
    if tensor_slice.tensor.layout is not torch.strided or name not in DTYPES:
        kind = f"{name}, {tensor_slice.tensor.layout}"
        raise CheckpointError(
            f"tensor {tensor_slice.name!r} ({kind}) cannot be saved; a checkpoint can have dense tensors of "
            f"{', '.join(DTYPES)}; convert it first"
        )
    check_extent(tensor_slice.name, tuple(tensor_slice.tensor.shape), tensor_slice.global_shape, tensor_slice.offset)


def check_extent(name: str, shape: tuple[int, ...], global_shape: tuple[int, ...], offset: Offset) -> None:
    """The slice lies inside its global tensor.

    Raises:
        CheckpointError: it does not.
    """
    if isinstance(offset, int):
        inside = offset >= 0 and offset + math.prod(shape) <= math.prod(global_shape)
    else:
        inside = len(offset) == len(shape) == len(global_shape) and all(
            first >= 0 and first + length <= total
            for first, length, total in zip(offset, shape, global_shape, strict=True)
        )
    if not inside:
        raise CheckpointError(
            f"a slice of {name!r} with shape {list(shape)} at offset {offset} is outside the global shape "
            f"{list(global_shape)}; an int offset counts flattened elements, a tuple has one index per dim"
        )


def contiguous_ranges(extent: SliceExtent) -> tuple[np.ndarray, int]:
    """Return the ranges of the flattened tensor in a slice: their starts, and their common length."""
    if isinstance(extent.offset, int):
        return np.array([extent.offset], dtype=np.int64), math.prod(extent.shape)
    lengths, totals = extent.shape, extent.global_shape
    cut_dims = [dim for dim in range(len(totals)) if lengths[dim] != totals[dim]]
    last = cut_dims[-1] if cut_dims else 0
    strides = [math.prod(totals[dim + 1 :]) for dim in range(len(totals))]
    starts = np.zeros(1, dtype=np.int64)
    for dim in range(last):
        steps = (np.arange(lengths[dim], dtype=np.int64) + extent.offset[dim]) * strides[dim]
        starts = (starts[:, None] + steps[None, :]).reshape(-1)
    if totals:
        starts += extent.offset[last] * strides[last]
    return starts, math.prod(lengths[last:])


def check_cover(name: str, extents: Sequence[SliceExtent]) -> None:
    """Check that the slices together have every element of the tensor exactly once.

    Raises:
        CheckpointError: elements are missing or duplicated; the message has the first one.
    """
    global_shape = extents[0].global_shape
    shapes = {extent.global_shape for extent in extents}
    if len(shapes) > 1:
        listed = " and ".join(str(list(shape)) for shape in sorted(shapes))
        raise CheckpointError(f"the slices of {name!r} have different global shapes: {listed}")
    total = math.prod(global_shape)
    held = sum(math.prod(extent.shape) for extent in extents)
    if held == total and (len(extents) == 1 or total == 0):
        return
    first, reason = _find_first_flaw(extents, total)
    raise_for = f"the slices of {name!r} {list(global_shape)} have {held:,} of {total:,} elements"
    if reason:
        raise CheckpointError(
            f"{raise_for}, flat element {first:,} {reason}; every element must be written by exactly one rank"
        )


def _find_first_flaw(extents: Iterable[SliceExtent], total: int) -> tuple[int, str]:
    """Return the first flat element that is missing or duplicated, and which of the two."""
    pairs = [contiguous_ranges(extent) for extent in extents if math.prod(extent.shape)]
    if not pairs:
        return 0, "is missing" if total else ""
    starts = np.concatenate([begin for begin, _ in pairs])
    stops = np.concatenate([begin + length for begin, length in pairs])
    order = np.argsort(starts, kind="stable")
    begins = np.append(starts[order], total)
    ends = np.concatenate([[0], stops[order]])
    wrong = np.nonzero(begins != ends)[0]
    if not len(wrong):
        return 0, ""
    at = int(wrong[0])
    return (int(ends[at]), "is missing") if begins[at] > ends[at] else (int(begins[at]), "is duplicated")
