"""Where a unit lives on one rank: weights and gradients in flat buffers, parameters as views of them.

A collective works on the flat buffer, a share is a range of it, and an optimizer that treats numbers apart sees
one tensor instead of many. A unit whose gradient no other rank needs has no gradient buffer: autograd's own
tensors are used as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

import torch
from torch import Tensor, nn

from counterpoint.errors import DataError

Span = tuple[Fraction, Fraction]
Allocate: TypeAlias = Callable[[int, torch.dtype], Tensor]
WHOLE: Span = (Fraction(0), Fraction(1))


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter in an arena: its name, local shape, first element, and option group."""

    name: str
    shape: tuple[int, ...]
    start: int
    group: int

    @property
    def stop(self) -> int:
        """One past its last element."""
        return self.start + math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the parameters of one unit and dtype lie in their arena; the same on every rank of a slice.

    Args:
        dtype: of all of them.
        slots: back to back, those of one option group together.
        cut_anywhere: whether a share may end within a parameter.
    """

    dtype: torch.dtype
    slots: tuple[Slot, ...]
    cut_anywhere: bool

    @property
    def num_elements(self) -> int:
        """Length of the arena."""
        return self.slots[-1].stop if self.slots else 0

    def range_of(self, span: Span) -> tuple[int, int]:
        """Return the elements from and to of a part of the arena."""
        return self._cut(span[0]), self._cut(span[1])

    def bounds(self, num_parts: int) -> list[int]:
        """Return the ``num_parts + 1`` elements where its shares begin and end."""
        return [self._cut(Fraction(index, num_parts)) for index in range(num_parts + 1)]

    def _cut(self, at: Fraction) -> int:
        element = int(self.num_elements * at)
        if self.cut_anywhere or element == 0:
            return element
        return min(slot.stop for slot in self.slots if slot.stop >= element)

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


def new_tensor(num_elements: int, dtype: torch.dtype) -> Tensor:
    """Return a flat tensor of this process's own memory."""
    return torch.empty(num_elements, dtype=dtype)


class Arena:
    """The parameters of one unit and dtype, back to back in one buffer.

    Args:
        layout: where each lies.
        params: the rank's parameters by name; they become views of the buffer.
        home: the part whose weights are kept when nothing is gathered.
        empty: makes memory for gradients of so many elements; the fabric's own need not be copied by collectives.
    """

    def __init__(
        self, layout: Layout, params: Mapping[str, nn.Parameter], home: Span, empty: Allocate = new_tensor
    ) -> None:
        self.layout = layout
        self.empty = empty
        self.params = {slot.name: params[slot.name] for slot in layout.slots}
        self.is_gathered = True
        self.weights = torch.cat([self.params[slot.name].detach().reshape(-1) for slot in layout.slots])
        for slot in layout.slots:
            self.params[slot.name].data = self.weights[slot.start : slot.stop].view(slot.shape)
        self.home = layout.range_of(home)
        self.gradient: Tensor | None = None
        self.part: Tensor | None = None
        self.kept: Tensor | None = None
        self.missed: list[str] | None = None  # in this step's every fold so far; None before the first
        if home != WHOLE:
            self.kept = self.weights[self.home[0] : self.home[1]].clone()
            self.release_weights()

    def restore_weights(self) -> None:
        """Give the full buffer its memory back and put the kept share into it; the rest is unspecified."""
        if self.is_gathered or self.kept is None:
            return
        self.weights.untyped_storage().resize_(self.layout.num_elements * self.weights.element_size())
        self.weights.data[self.home[0] : self.home[1]].copy_(self.kept)
        self.is_gathered = True

    def release_weights(self) -> None:
        """Free the full buffer; the kept share stays."""
        if self.kept is not None and self.is_gathered:
            self.weights.untyped_storage().resize_(0)
            self.is_gathered = False

    def fold(self) -> Tensor:
        """Return the flat gradient, after moving into it what autograd has put on the parameters.

        Raises:
            DataError: a gradient is sparse, which a flat buffer cannot hold.
        """
        fresh = self.gradient is None
        missed = []
        if self.gradient is None:
            count = self.layout.num_elements
            on_host = self.weights.device.type == "cpu"
            self.gradient = self.empty(count, self.layout.dtype) if on_host else self.weights.new_empty(count)
        for slot in self.layout.slots:
            param = self.params[slot.name]
            view = self.gradient[slot.start : slot.stop].view(slot.shape)
            if param.grad is None:
                missed.append(slot.name)
                if fresh:
                    view.zero_()
                continue
            if param.grad.is_sparse:
                raise DataError(
                    f"the gradient of {slot.name} is sparse, but it has to be added up over ranks as a dense one; "
                    "build the embedding with sparse=False"
                )
            (view.copy_ if fresh else view.add_)(param.grad)
            param.grad = None
        self.missed = missed if self.missed is None else [name for name in self.missed if name in missed]
        return self.gradient

    def missing(self) -> list[str]:
        """Return the parameters on which autograd has put no gradient in this step, folded or not."""
        names = self.params if self.missed is None else self.missed
        return [name for name in names if self.params[name].grad is None]

    def add_part(self, start: int, stop: int) -> None:
        """Add a range of the summed gradient to this rank's share and forget the flat gradient."""
        assert self.gradient is not None, "a share needs a gradient"
        mine = self.gradient[start:stop]
        self.part = mine if self.part is None else self.part.add_(mine)
        if self.part is not mine:
            self.gradient = None

    def drop_gradient(self) -> None:
        """Free the flat gradient; a share that was a view of it becomes a tensor of its own."""
        if self.part is not None and self.gradient is not None:
            self.part = self.part.clone()
        self.gradient = None

    def clear(self) -> None:
        """Forget all gradients."""
        self.gradient = self.part = None
        for param in self.params.values():
            param.grad = None

    def view_of(self, start: int, stop: int) -> Tensor:
        """Return the weights of a range as the optimizer updates them, in a parameter's shape where it is one."""
        return self._shaped(self.view_of_flat(start, stop), start, stop)

    def view_of_flat(self, start: int, stop: int) -> Tensor:
        """Return the weights of a range that this rank keeps, as one flat view."""
        source, low = (self.weights, 0) if self.kept is None else (self.kept, self.home[0])
        return source[start - low : stop - low]

    def put(self, name: str, values: Tensor) -> None:
        """Write a parameter's values into what of it lies here."""
        slot = next(slot for slot in self.layout.slots if slot.name == name)
        flat = values.reshape(-1)
        if self.kept is None:
            self.weights.data[slot.start : slot.stop].copy_(flat)
            return
        start, stop = max(slot.start, self.home[0]), min(slot.stop, self.home[1])
        if start < stop:
            self.kept[start - self.home[0] : stop - self.home[0]].copy_(flat[start - slot.start : stop - slot.start])

    def gradient_of(self, start: int, stop: int, span: Span) -> Tensor:
        """Return the gradient that belongs to :meth:`view_of` the same range."""
        if self.part is not None:
            low = self.layout.range_of(span)[0]
            return self._shaped(self.part[start - low : stop - low], start, stop)
        return self._shaped(self.fold()[start:stop], start, stop)

    def _shaped(self, flat: Tensor, start: int, stop: int) -> Tensor:
        if self.layout.cut_anywhere:
            return flat
        shape = next(
            (slot.shape for slot in self.layout.slots if (slot.start, slot.stop) == (start, stop)), (stop - start,)
        )
        return flat.view(shape)
