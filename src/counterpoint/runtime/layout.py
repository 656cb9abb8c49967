"""How the parameters of one unit lie back to back in a flat buffer; the same on every rank of a slice."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TypeAlias

import torch
from torch import Tensor

Span: TypeAlias = tuple[Fraction, Fraction]
WHOLE: Span = (Fraction(0), Fraction(1))
SMALL_BYTES = 64 << 10
"""A gradient up to this size is moved together with others; a larger one at once, while it is in the cache."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter in an arena: its name, local shape, first element, option group; and one past its last element."""

    name: str
    shape: tuple[int, ...]
    start: int
    group: int
    stop: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", self.start + math.prod(self.shape))


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the parameters of one unit and dtype lie in their arena; the same on every rank of a slice.

    Args:
        dtype: of all of them.
        slots: back to back, those of one option group together.
        cut_anywhere: whether a share may end within a parameter.

    Attributes:
        num_elements: length of the arena.
    """

    dtype: torch.dtype
    slots: tuple[Slot, ...]
    cut_anywhere: bool
    num_elements: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_elements", self.slots[-1].stop if self.slots else 0)

    def range_of(self, span: Span) -> tuple[int, int]:
        """Return the elements from and to of a part of the arena."""
        low, high = (int(self.num_elements * at) for at in span)
        return self._cut(low), self._cut(high)

    def bounds(self, num_parts: int) -> list[int]:
        """Return the ``num_parts + 1`` elements where its shares begin and end."""
        return [self._cut(self.num_elements * index // num_parts) for index in range(num_parts + 1)]

    def _cut(self, element: int) -> int:
        if self.cut_anywhere or element == 0:
            return element
        return min(slot.stop for slot in self.slots if slot.stop >= element)

    def shaped(self, flat: Tensor, start: int, stop: int) -> Tensor:
        """Return the numbers of a range in a parameter's shape where they are one and a share may not end within it."""
        if self.cut_anywhere:
            return flat
        shapes = (slot.shape for slot in self.slots if (slot.start, slot.stop) == (start, stop))
        return flat.view(next(shapes, (stop - start,)))

    def within(self, span: Span) -> Iterator[tuple[Slot, int, int]]:
        """Yield each parameter that has elements in a part, with the elements from and to."""
        low, high = self.range_of(span)
        for slot in self.slots:
            start, stop = max(slot.start, low), min(slot.stop, high)
            if start < stop:
                yield slot, start, stop

    def updated(self, span: Span) -> list[tuple[int, int, int]]:
        """Return ``(group, start, stop)`` of every tensor an optimizer is given for a part of the arena."""
        found: list[tuple[int, int, int]] = []
        for slot, start, stop in self.within(span):
            if self.cut_anywhere and found and found[-1][0] == slot.group:
                found[-1] = (slot.group, found[-1][1], stop)
            else:
                found.append((slot.group, start, stop))
        return found


def is_small(slot: Slot, layout: Layout) -> bool:
    """Tell whether a gradient waits for others with which it is moved."""
    return (slot.stop - slot.start) * layout.dtype.itemsize <= SMALL_BYTES


def lay_out(
    params: Sequence[tuple[str, tuple[int, ...], torch.dtype, int]], *, cut_anywhere: bool
) -> tuple[Layout, ...]:
    """Return one layout per dtype for parameters given as ``(name, local shape, dtype, option group)``."""
    layouts = []
    for dtype in dict.fromkeys(dtype for _, _, dtype, _ in params):
        slots: list[Slot] = []
        for name, shape, _, group in sorted((item for item in params if item[2] == dtype), key=lambda item: item[3]):
            slots.append(Slot(name, shape, slots[-1].stop if slots else 0, group))
        layouts.append(Layout(dtype, tuple(slots), cut_anywhere))
    return tuple(layouts)
