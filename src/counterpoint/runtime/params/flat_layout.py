"""Positions of one unit's parameters in a flat buffer; equal on every rank that holds the same slice of the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

ShardSpan: TypeAlias = tuple[Fraction, Fraction]
LayoutKey: TypeAlias = tuple[torch.dtype, torch.dtype | None]
"""The dtype of parameters, and the one in which they are read if it is narrower."""
WHOLE: ShardSpan = (Fraction(0), Fraction(1))
SMALL_BYTES = 64 << 10
"""Gradients up to this size are copied together; larger ones one by one, while they are in the cache."""


@dataclass(frozen=True, slots=True)
class ParamSlot:
    """The place of one parameter in a flat buffer.

    Args:
        name: of the parameter.
        shape: of what the rank has of it: less than the model's if it is tensor-parallel.
        start: its first element in the buffer.
        group: the optimizer's option group (``param_groups``) that it belongs to.

    Attributes:
        stop: one past its last element.

    Example:
        >>> ParamSlot("fc.weight", (2, 3), start=4, group=0).stop
        10
    """

    name: str
    shape: tuple[int, ...]
    start: int
    group: int
    stop: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", self.start + math.prod(self.shape))


class ParamRange(NamedTuple):
    """A range of a parameter, and where it is in a tensor that an optimizer updates.

    Args:
        name: of the parameter.
        first: its first element in the parameter, flattened.
        start: its first element in the tensor, flattened.
        stop: one past its last there.
    """

    name: str
    first: int
    start: int
    stop: int


class ParamValues(NamedTuple):
    """A range of a rank's parameter that is to get its first values.

    Args:
        name: of the parameter.
        first: its first element in the parameter, flattened.
        values: flat and contiguous; gets the values.
    """

    name: str
    first: int
    values: Tensor


@dataclass(frozen=True, slots=True)
class FirstValues:
    """The first values of a rank's parameters that have none yet.

    Args:
        names: of these parameters.
        write: writes ranges of them; called with those of one unit at a time.
    """

    names: Collection[str]
    write: Callable[[Sequence[ParamValues]], None]

    def fill(self, targets: Sequence[ParamValues], params: Mapping[str, Tensor]) -> None:
        """Write ranges of parameters.

        Args:
            targets: the ranges.
            params: have the values of those that are not in ``names``.
        """
        for name, first, values in targets:
            if name not in self.names:
                values.copy_(params[name].detach().reshape(-1)[first : first + values.numel()])
        self.write([target for target in targets if target.name in self.names])


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Positions of the parameters of one unit and dtype in their flat buffer.

    Args:
        dtype: of all of them.
        slots: contiguous, sorted by option group.
        split_size: a shard may end within a parameter after a multiple of so many elements, if as many are left; None
            if it may not.
        merges_params: whether an optimizer gets the parameters of a group as one tensor, if they may be split.
        read_dtype: the dtype of the casts that the model reads, in which freed weights are gathered; None if the
            model reads the parameters themselves.
        holds_casts: whether whole weights and gradients are in the read dtype, and in ``dtype`` only the master weights
            of what the rank updates.
        reduce_dtype: the narrower dtype in which gradients are summed over ranks; None for ``dtype``.
        max_target_elements: the most elements of a tensor that an optimizer gets; None for any number.

    Attributes:
        num_elements: length of the buffer.
    """

    dtype: torch.dtype
    slots: tuple[ParamSlot, ...]
    split_size: int | None
    merges_params: bool = True
    read_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    holds_casts: bool = False
    max_target_elements: int | None = None
    num_elements: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_elements", self.slots[-1].stop if self.slots else 0)

    @property
    def may_split_params(self) -> bool:
        """Whether a shard may end within a parameter."""
        return self.split_size is not None

    @property
    def held_dtype(self) -> torch.dtype:
        """The dtype of whole weights and of gradients."""
        return self.read_dtype if self.holds_casts and self.read_dtype is not None else self.dtype

    @property
    def key(self) -> LayoutKey:
        """What tells it from the other layouts of its unit."""
        return self.dtype, self.read_dtype

    def element_range(self, span: ShardSpan) -> tuple[int, int]:
        """Return the first element of a shard and one past its last."""
        low, high = (int(self.num_elements * bound) for bound in span)
        return self._align(low), self._align(high)

    def shard_bounds(self, num_parts: int) -> list[int]:
        """Return the ``num_parts + 1`` bounds of equal shards."""
        return [self._align(self.num_elements * index // num_parts) for index in range(num_parts + 1)]

    def _align(self, element: int) -> int:
        """Return the first element from here on at which a shard may end."""
        if self.split_size == 1 or element == 0:
            return element
        slot = next(slot for slot in self.slots if slot.stop >= element)
        if self.split_size is None:
            return slot.stop
        cut = slot.start - (slot.start - element) // self.split_size * self.split_size
        return cut if slot.stop - cut >= self.split_size else slot.stop

    def shard_ranges(self, num_parts: int, excluded: Collection[str] = ()) -> list[list[tuple[int, int]]]:
        """Return the ranges of single parameters that each of equal shards consists of.

        Args:
            num_parts: number of shards.
            excluded: parameters that are left out.
        """
        bounds = self.shard_bounds(num_parts)
        return [
            [
                (max(slot.start, low), min(slot.stop, high))
                for slot in self.slots
                if slot.name not in excluded and max(slot.start, low) < min(slot.stop, high)
            ]
            for low, high in pairwise(bounds)
        ]

    def as_param_shape(self, flat: Tensor, start: int, stop: int) -> Tensor:
        """View a range in the shape of its parameter; flat if it is not exactly one, or shards may split them."""
        if self.may_split_params:
            return flat
        shapes = (slot.shape for slot in self.slots if (slot.start, slot.stop) == (start, stop))
        return flat.view(next(shapes, (stop - start,)))

    def slots_in(self, span: ShardSpan) -> Iterator[tuple[ParamSlot, int, int]]:
        """Yield each parameter that has elements in a shard, with its first element there and one past its last."""
        low, high = self.element_range(span)
        for slot in self.slots:
            start, stop = max(slot.start, low), min(slot.stop, high)
            if start < stop:
                yield slot, start, stop

    def name_at(self, element: int) -> str:
        """Return the parameter that an element belongs to."""
        return next(slot.name for slot in self.slots if slot.start <= element < slot.stop)

    def params_in(self, start: int, stop: int) -> list[ParamRange]:
        """Return the parameters that a range consists of."""
        return [
            ParamRange(slot.name, low - slot.start, low - start, min(slot.stop, stop) - start)
            for slot in self.slots
            if (low := max(slot.start, start)) < min(slot.stop, stop)
        ]

    def values_in(self, flat: Tensor, start: int) -> list[ParamValues]:
        """Return the parts of a range of the buffer by parameter.

        Args:
            flat: the range.
            start: its first element in the buffer.
        """
        ranges = self.params_in(start, start + flat.numel())
        return [ParamValues(one.name, one.first, flat[one.start : one.stop]) for one in ranges]

    def optimizer_ranges(self, span: ShardSpan) -> list[tuple[int, int, int]]:
        """Return ``(option group, start, stop)`` of every tensor that an optimizer gets for a shard."""
        ranges: list[tuple[int, int, int]] = []
        for slot, start, stop in self.slots_in(span):
            if self.may_split_params and self.merges_params and ranges and ranges[-1][0] == slot.group:
                ranges[-1] = (slot.group, ranges[-1][1], stop)
            else:
                ranges.append((slot.group, start, stop))
        if self.max_target_elements is None:
            return ranges
        size = self.max_target_elements
        return [
            (group, low, min(low + size, stop)) for group, start, stop in ranges for low in range(start, stop, size)
        ]


def is_small(slot: ParamSlot, layout: FlatLayout) -> bool:
    """Return whether a gradient is copied into the flat buffer together with others."""
    return (slot.stop - slot.start) * layout.held_dtype.itemsize <= SMALL_BYTES


def build_layouts(
    params: Sequence[tuple[str, tuple[int, ...], torch.dtype, int]],
    *,
    split_size: int | None,
    merges_params: bool = True,
    read_dtypes: Mapping[str, torch.dtype] = MappingProxyType({}),
    reduce_dtype: torch.dtype | None = None,
    holds_casts: bool = False,
) -> tuple[FlatLayout, ...]:
    """Return one layout for each dtype and the dtype in which parameters are read.

    Args:
        params: ``(name, local shape, dtype, option group)`` of each.
        split_size: of the layouts.
        merges_params: whether an optimizer gets the parameters of a group as one tensor, if they may be split.
        read_dtypes: of the parameters that are read in a narrower dtype.
        reduce_dtype: in which gradients are summed over ranks, unless theirs is no wider; None for theirs.
        holds_casts: whether ranks hold these parameters in the dtype that they are read in.
    """
    layouts = []
    for dtype, read_dtype in dict.fromkeys((dtype, read_dtypes.get(name)) for name, _, dtype, _ in params):
        members = [item for item in params if (item[2], read_dtypes.get(item[0])) == (dtype, read_dtype)]
        slots: list[ParamSlot] = []
        for name, shape, _, group in sorted(members, key=lambda item: item[3]):
            slots.append(ParamSlot(name, shape, slots[-1].stop if slots else 0, group))
        is_narrower = (
            reduce_dtype is not None and dtype.is_floating_point and reduce_dtype.itemsize < dtype.itemsize
        )  # not a complex dtype, which would lose its imaginary parts
        narrower, is_held = reduce_dtype if is_narrower else None, holds_casts and read_dtype is not None
        layouts.append(FlatLayout(dtype, tuple(slots), split_size, merges_params, read_dtype, narrower, is_held))
    return tuple(layouts)


def limit_targets(layouts: Sequence[FlatLayout], max_target_elements: int | None) -> tuple[FlatLayout, ...]:
    """Return the layouts, with tensors of at most so many elements for an optimizer; None for any number."""
    return tuple(replace(layout, max_target_elements=max_target_elements) for layout in layouts)
