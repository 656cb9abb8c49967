"""Values of which a rank keeps a part between two uses, while the other members of its group keep the others.

A value is kept as the bytes of its memory in order, so that a gathered value has the strides and bits that it had::

    value  --split-->   bytes [own part]                                 (1)
    whole  <--gather--  bytes [part 0 | part 1 | ... | part n-1 + rest]  (2), of equal length
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, repeat

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ValuePart:
    """One of equal parts of a value's bytes, and what is needed to make the value again.

    Args:
        data: the part, as bytes, (1).
        index: of the part.
        num_parts: of the value.
        shape: of the value.
        strides: of the value, in elements.
        dtype: of the value.
    """

    data: Tensor
    index: int
    num_parts: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bounds(self) -> list[int]:
        """The first byte of each part in the buffer of all, and the end of the last one."""
        return [0, *accumulate(repeat(len(self.data), self.num_parts))]

    def allocate_whole(self) -> Tensor:
        """Return a buffer for all parts (2), with this one at its place."""
        whole = self.data.new_empty(self.num_parts * len(self.data))
        whole[self.bounds[self.index] : self.bounds[self.index + 1]] = self.data
        return whole

    def view_value(self, whole: Tensor) -> Tensor:
        """Return the value whose bytes are in a buffer of all parts; it has their memory."""
        num_bytes = self.dtype.itemsize * torch.Size(self.shape).numel()
        return whole[:num_bytes].view(self.dtype).as_strided(self.shape, self.strides)


def split_value(value: Tensor, index: int, num_parts: int) -> ValuePart | None:
    """Return a copy of one of equal parts of a value; the only one has the value's memory.

    Args:
        value: detached.
        index: of the part.
        num_parts: of all.

    Returns:
        The part; None for a value that is empty, or whose elements do not fill its memory, as those of an expanded one.
    """
    if not value.numel() or not _is_dense(value):
        return None
    data = value.as_strided((value.numel(),), (1,)).view(torch.uint8)
    if num_parts == 1:
        return ValuePart(data, 0, 1, tuple(value.shape), value.stride(), value.dtype)
    length = -(-len(data) // num_parts)
    own = data.new_zeros(length)
    found = data[index * length : (index + 1) * length]
    own[: len(found)] = found
    return ValuePart(own, index, num_parts, tuple(value.shape), value.stride(), value.dtype)


def _is_dense(value: Tensor) -> bool:
    """Return whether a value's elements fill its memory, in any order of its dims."""
    expected = 1
    dims = zip(value.stride(), value.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in dims if size > 1):
        if stride != expected:
            return False
        expected *= size
    return value.layout == torch.strided and not value.is_conj() and not value.is_neg()
