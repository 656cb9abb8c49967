"""Memory for the rows of a table, which are read and written at places all over it."""

from __future__ import annotations

from ctypes import byref
from math import prod
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from counterpoint.fabric.shm.native import DTYPES, Bags, native
from counterpoint.server.places import Numbers
from counterpoint.server.sums import Sums

LINE_BYTES: Final = 64
"""A row that begins with a line of the cache is in the fewest of them."""


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return memory in large pages, if it is large and the kernel has some: numpy asks for them, and torch does not."""
    num_bytes = prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + LINE_BYTES, dtype=np.uint8)
    start = -memory.ctypes.data % LINE_BYTES
    return torch.from_numpy(memory[start : start + num_bytes]).view(dtype).view(shape)


def longer(part: Tensor, used: int, room: int) -> Tensor:
    """Return memory for more rows, the first of which are those that are used.

    Example:
        >>> longer(torch.tensor([[1.0], [2.0]]), 2, 3)[:2]
        tensor([[1.],
                [2.]])
    """
    found = empty((room, *part.shape[1:]), part.dtype)
    found[:used] = part[:used]
    return found


def gathered(part: Tensor, places: Tensor) -> Tensor:
    """Return the rows at places.

    Where torch can, as bags of one row: it fetches those that come next meanwhile, and takes half of the time.

    Example:
        >>> gathered(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([2, 0]))
        tensor([[3.],
                [1.]])
    """
    if part.dtype != torch.float32:
        return part.index_select(0, places)
    return F.embedding_bag(places, part, torch.arange(len(places)), mode="sum")


def add_at(part: Tensor, places: Numbers, values: Tensor, sums: Sums | None, factor: float) -> None:
    """The rows at places, each of which is named once, have got a factor times their values, or sums of values.

    Example:
        >>> part = torch.zeros(3, 1)
        >>> add_at(part, np.array([2, 0]), torch.tensor([[1.0], [2.0]]), None, -1.0)
        >>> part.tolist()
        [[-2.0], [0.0], [-1.0]]
    """
    library, lists = native().library, () if sums is None else (sums.members, sums.starts)
    fits = part.dtype in {torch.float32, torch.float64} and all(one.is_contiguous() for one in (values, *lists))
    if library is None or not fits:
        added = values if sums is None else sums.of(values)
        scatter(part, places, gathered(part, torch.from_numpy(places)).add_(added, alpha=factor))
        return
    request = Bags(
        dtype=DTYPES[part.dtype],
        part=part.data_ptr(),
        places=places.ctypes.data,
        members=None if sums is None else sums.members.data_ptr(),
        starts=None if sums is None else sums.starts.data_ptr(),
        num_members=0 if sums is None else len(sums.members),
        num_lists=len(places),
        width=part.shape[1],
        values=values.data_ptr(),
        factor=factor,
    )
    library.cp_add_sums(byref(request))


def scatter(part: Tensor, places: Numbers, rows: Tensor) -> None:
    """The rows are at places, each of which is named once; as one value each, three times as fast as by their numbers.

    Example:
        >>> part = torch.zeros(3, 2)
        >>> scatter(part, np.array([2, 0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> part
        tensor([[3., 4.],
                [0., 0.],
                [1., 2.]])
    """
    _values(part)[places] = _values(rows)


def _values(part: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.void]]:
    """Return each row as one value."""
    rows: np.ndarray[tuple[int, ...], np.dtype[np.void]]
    rows = part.view(torch.uint8).numpy().view(f"V{part.shape[1] * part.itemsize}").reshape(-1)
    return rows
