"""Memory for the rows of a table, which are read and written at places all over it."""

from __future__ import annotations

from math import prod
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from counterpoint.server.places import Numbers

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
