"""Where a unit lives on one rank: weights and gradients in flat buffers, parameters as views of them.

A collective works on the flat buffer, a share is a range of it, and an optimizer that treats numbers apart sees
one tensor instead of many. A unit whose gradient no other rank needs has no gradient buffer: autograd's own
tensors are used as they are. Where replicas have memory in common, their arenas live there together
(:mod:`counterpoint.runtime.commons`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from counterpoint.errors import DataError
from counterpoint.fabric.encounter import reduce_in_order
from counterpoint.runtime.commons import Commons
from counterpoint.runtime.layout import WHOLE, Layout, Slot, Span

Allocate: TypeAlias = Callable[[int, torch.dtype], Tensor]


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
        self.house(self.weights)
        self.home = layout.range_of(home)
        self.gradient: Tensor | None = None
        self.part: Tensor | None = None
        self.kept: Tensor | None = None
        self.commons: Commons | None = None
        self.filled: set[str] = set()  # the parameters whose place in the flat gradient holds theirs
        self.reached: set[str] = set()  # those on which autograd has put a gradient in this step
        if home != WHOLE:
            self.kept = self.weights[self.home[0] : self.home[1]].clone()
            self.release_weights()

    def house(self, weights: Tensor) -> None:
        """Let the parameters be views of these weights."""
        self.weights = weights
        for slot in self.layout.slots:
            self.params[slot.name].data = weights[slot.start : slot.stop].view(slot.shape)

    def enter(self, commons: Commons) -> None:
        """Live in memory that the replicas have in common; what it holds are the weights of all of them."""
        self.clear()
        self.commons = commons
        self.house(commons.weights)
        commons.receive(self.layout, self.params, self.move)

    def leave(self) -> Commons | None:
        """Live in memory of one's own again, with the weights as they are; return what is left, if anything is."""
        left = self.commons
        if left is not None:
            self.house(self.weights.clone())
            left.cease()
            self.commons = None
            self.clear()
        return left

    def begin(self) -> None:
        """Start a step, in which no parameter has got a gradient."""
        self.reached.clear()

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

    def buffer(self) -> Tensor:
        """Return the flat gradient; where it is new, what is in it is unspecified."""
        if self.gradient is None:
            self.filled.clear()
            if self.commons is not None:
                self.gradient = self.commons.own
            else:
                count, on_host = self.layout.num_elements, self.weights.device.type == "cpu"
                self.gradient = self.empty(count, self.layout.dtype) if on_host else self.weights.new_empty(count)
        return self.gradient

    def move(self, slot: Slot) -> None:
        """Put the gradient that autograd has put on a parameter where it belongs in the flat one, if there is any.

        Raises:
            DataError: it is sparse, which a flat buffer cannot hold.
        """
        param = self.params[slot.name]
        fresh = param.grad
        if fresh is None:
            return
        if fresh.is_sparse:
            raise DataError(
                f"the gradient of {slot.name} is sparse, but it has to be added up over ranks as a dense one; "
                "build the embedding with sparse=False"
            )
        view = self.buffer()[slot.start : slot.stop].view(slot.shape)
        (view.add_ if slot.name in self.filled else view.copy_)(fresh)
        self.filled.add(slot.name)
        self.reached.add(slot.name)
        param.grad = None

    def landing(self, slot: Slot) -> tuple[Tensor, bool]:
        """Return where a gradient is written that autograd will not hand over, and whether it adds to what is there."""
        has_some = self.gradient is not None and slot.name in self.filled
        view = self.buffer()[slot.start : slot.stop].view(slot.shape)
        self.filled.add(slot.name)
        self.reached.add(slot.name)
        return view, has_some

    def fold(self) -> Tensor:
        """Return the flat gradient, after moving into it what autograd has put on the parameters.

        Raises:
            DataError: a gradient is sparse.
        """
        whole = self.buffer()
        slots: Sequence[Slot] = self.layout.slots
        if self.commons is not None and not self.filled.issuperset(gathered := self.commons.small_names):
            gathered = self.commons.gather() if self.filled.isdisjoint(gathered) else frozenset()
            self.filled |= gathered
            self.reached |= gathered
            slots = self.commons.large if gathered else slots
        for slot in slots:
            self.move(slot)
            if slot.name not in self.filled:
                whole[slot.start : slot.stop].zero_()
                self.filled.add(slot.name)
        return whole

    def add(self, gradient: Tensor) -> None:
        """Add a whole flat gradient that has come from elsewhere; it may be used as memory."""
        if self.gradient is None and self.commons is None:
            self.gradient, self.filled = gradient, set(self.params)
        else:
            self.fold().add_(gradient)

    def missing(self) -> list[str]:
        """Return the parameters on which autograd has put no gradient in this step, folded or not."""
        return [name for name, param in self.params.items() if name not in self.reached and param.grad is None]

    def add_part(self, start: int, stop: int) -> None:
        """Add a range of the summed gradient to this rank's share and forget the flat gradient."""
        assert self.gradient is not None, "a share needs a gradient"
        mine = self.gradient[start:stop]
        self.part = mine if self.part is None else self.part.add_(mine)
        if self.part is not mine:
            self.gradient = None

    def show(self) -> None:
        """All replicas see each other's gradients, of which this rank will add up its share where it is needed."""
        assert self.commons is not None, "there is memory in common"
        self.commons.is_shown = True

    def parts(self, start: int, stop: int, span: Span) -> list[Tensor]:
        """Return what adds up to the gradient of a range: each replica's, or the sum where it has been made."""
        if self.commons is not None and self.commons.is_shown and self.part is None:
            return [row[start:stop] for row in self.commons.rows]
        low = self.layout.range_of(span)[0] if self.part is not None else 0
        return [(self.fold() if self.part is None else self.part)[start - low : stop - low]]

    def add_up(self, span: Span) -> None:
        """Make the sum of this rank's share, if the replicas' gradients have only been shown so far."""
        if self.commons is not None and self.commons.is_shown and self.part is None:
            start, stop = self.layout.range_of(span)
            mine = self.commons.own[start:stop]
            mine.copy_(reduce_in_order([row[start:stop] for row in self.commons.rows], "sum"))
            self.part = mine

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
        if self.commons is not None:
            self.commons.is_shown = False

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
        self.add_up(span)
        (whole,) = self.parts(start, stop, span)
        return self._shaped(whole, start, stop)

    def _shaped(self, flat: Tensor, start: int, stop: int) -> Tensor:
        if self.layout.cut_anywhere:
            return flat
        shape = next(
            (slot.shape for slot in self.layout.slots if (slot.start, slot.stop) == (start, stop)), (stop - start,)
        )
        return flat.view(shape)
