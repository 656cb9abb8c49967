"""Slices of global tensors: each has its position, so that any sharding can be loaded into any other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from counterpoint.errors import CheckpointError
from counterpoint.optim.validation import shorten
from counterpoint.terminal_text import escape_surrogates

Offset = int | tuple[int, ...]
Box: TypeAlias = tuple[tuple[int, int], ...]
"""The first and the last index, exclusive, in each dim."""

MAX_DIMS = 64
MAX_ELEMENTS = 2**60 - 1
"""The largest tensor, so that its bytes can be counted in 63 bits."""

MAX_CELLS = 2**22
"""Into how many parts the edges of its slices may divide a tensor, at one byte each."""

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
    if escape_surrogates(tensor_slice.name) != tensor_slice.name:
        raise CheckpointError(
            f"the tensor {tensor_slice.name!r} cannot be saved: its name has no form in UTF-8; rename the module"
        )
    name = dtype_name(tensor_slice.tensor.dtype)
    if tensor_slice.tensor.layout is not torch.strided or name not in DTYPES:
        kind = f"{name}, {tensor_slice.tensor.layout}"
        raise CheckpointError(
            f"tensor {tensor_slice.name!r} ({kind}) cannot be saved; a checkpoint can have dense tensors of "
            f"{', '.join(DTYPES)}; convert it first"
        )
    check_extent(tensor_slice.name, tuple(tensor_slice.tensor.shape), tensor_slice.global_shape, tensor_slice.offset)


def check_extent(name: str, shape: tuple[int, ...], global_shape: tuple[int, ...], offset: Offset) -> None:
    """Check that a slice lies inside its global tensor, which has a size that a tensor can have.

    Raises:
        CheckpointError: it does not.
    """
    for lengths in (shape, global_shape):
        if len(lengths) > MAX_DIMS or math.prod(filter(None, lengths)) > MAX_ELEMENTS:  # a length of 0 hides no other
            raise CheckpointError(
                f"{name!r} has {len(lengths)} dims, {str(list(lengths[:4]))[:80]}...; a tensor has at most {MAX_DIMS} "
                f"dims and {MAX_ELEMENTS} elements"
            )
    if isinstance(offset, int):
        inside = offset >= 0 and offset + math.prod(shape) <= math.prod(global_shape)
    else:
        inside = len(offset) == len(shape) == len(global_shape) and all(
            first >= 0 and first + length <= total
            for first, length, total in zip(offset, shape, global_shape, strict=True)
        )
    if not inside:
        raise CheckpointError(
            f"a slice of {name!r} with shape {list(shape)} at offset {shorten(str(offset))} is outside the global "
            f"shape {list(global_shape)}; an int offset counts flattened elements, a tuple has one index per dim"
        )


def check_cover(name: str, extents: Sequence[SliceExtent]) -> None:
    """Check that the slices together have every element of the tensor exactly once.

    Raises:
        CheckpointError: elements are missing or duplicated; the message has the first one.
    """
    global_shape = extents[0].global_shape
    shapes = {extent.global_shape for extent in extents}
    if len(shapes) > 1:
        listed = " and ".join(str(list(shape)) for shape in sorted(shapes)[:3])
        raise CheckpointError(f"the slices of {name!r} have different global shapes: {listed}")
    total = math.prod(global_shape)
    held = sum(math.prod(extent.shape) for extent in extents)
    if held == total and (len(extents) == 1 or total == 0):
        return
    present = [extent for extent in extents if math.prod(extent.shape)]
    are_ranges = all(isinstance(extent.offset, int) for extent in present)
    flaw = _find_range_flaw(present, total) if are_ranges else _find_box_flaw(name, present, global_shape)
    if flaw:
        raise CheckpointError(
            f"the slices of {name!r} {list(global_shape)} have {held:,} of {total:,} elements, flat element {flaw}; "
            "every element must be written by exactly one rank"
        )


def _find_range_flaw(extents: Sequence[SliceExtent], total: int) -> str:
    """Return the first flat element that is missing or duplicated, and which of the two; empty if there is none."""
    spans = [(cast("int", extent.offset), cast("int", extent.offset) + math.prod(extent.shape)) for extent in extents]
    for (_, stop), (start, _) in pairwise([(0, 0), *sorted(spans), (total, total)]):
        if start != stop:
            return f"{stop:,} is missing" if start > stop else f"{start:,} is duplicated"
    return ""


def _find_box_flaw(name: str, extents: Sequence[SliceExtent], global_shape: tuple[int, ...]) -> str:
    """Return a flat element that is missing or duplicated, and which of the two; empty if there is none.

    The edges of all slices divide the tensor into cells, each of which is written whole or not at all. So memory and
    time depend on the number of slices, and not on what they say about their sizes.
    """
    boxes = [box for extent in extents for box in _list_boxes(extent)]
    edges = [
        sorted({0, length, *(edge for box in boxes for edge in box[dim])}) for dim, length in enumerate(global_shape)
    ]
    dims = [dim for dim, dim_edges in enumerate(edges) if len(dim_edges) > 2]  # in which the tensor is divided
    num_cells = math.prod(len(edges[dim]) - 1 for dim in dims)
    if num_cells > MAX_CELLS:
        raise CheckpointError(
            f"the {len(extents)} slices of {name!r} divide it into {num_cells} parts; at most {MAX_CELLS} can be "
            "checked: divide it into ranges of the flattened tensor, or along fewer dims"
        )
    indices = {dim: {edge: index for index, edge in enumerate(edges[dim])} for dim in dims}
    is_written = np.zeros([len(edges[dim]) - 1 for dim in dims], dtype=np.bool_)

    def flat_element(cells: Sequence[int]) -> int:
        at = dict(zip(dims, cells, strict=True))
        return sum(edges[dim][at.get(dim, 0)] * math.prod(global_shape[dim + 1 :]) for dim in range(len(edges)))

    for box in boxes:
        spans = [(indices[dim][box[dim][0]], indices[dim][box[dim][1]]) for dim in dims]
        place: tuple[Any, ...] = (*(slice(*span) for span in spans), ...)
        cells = is_written[place]
        if cells.any():
            duplicate = np.unravel_index(int(cells.argmax()), cells.shape)
            first = flat_element([start + int(at) for (start, _), at in zip(spans, duplicate, strict=True)])
            return f"{first:,} is duplicated"
        cells[...] = True
    if is_written.all():
        return ""
    missing = np.unravel_index(int(is_written.argmin()), is_written.shape)
    return f"{flat_element([int(at) for at in missing]):,} is missing"


def _list_boxes(extent: SliceExtent) -> list[Box]:
    """Return boxes that together are a slice; a range of the flattened tensor is at most two of them for each dim."""
    if isinstance(extent.offset, int):
        return list(_split_range(extent.global_shape, extent.offset, extent.offset + math.prod(extent.shape)))
    return [tuple((first, first + length) for first, length in zip(extent.offset, extent.shape, strict=True))]


def _split_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes of a range of the flattened tensor: the end of a row, whole rows, the beginning of a row."""
    if not shape:
        yield ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if start < first * row:
        end = min(stop, first * row)
        for box in _split_range(shape[1:], start - (first - 1) * row, end - (first - 1) * row):
            yield ((first - 1, first), *box)
    if first < last:
        yield ((first, last), *((0, length) for length in shape[1:]))
    if first <= last and last * row < stop:
        for box in _split_range(shape[1:], 0, stop - last * row):
            yield ((last, last + 1), *box)
