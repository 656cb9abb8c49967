"""Where a unit lives on one rank: weights and gradients in flat buffers, parameters as views of them.

A collective works on the flat buffer, a share is a range of it, and an optimizer that treats numbers apart sees
one tensor instead of many. A unit whose gradient no other rank needs has no gradient buffer: autograd's own
tensors are used as they are. Where replicas have memory in common, their arenas live there together
(:mod:`counterpoint.runtime.commons`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from counterpoint.fabric.encounter import reduce_in_order
from counterpoint.fabric.fabric import Fabric, Group
from counterpoint.runtime.coded import Leftovers
from counterpoint.runtime.commons import Commons
from counterpoint.runtime.layout import WHOLE, Layout, Slot, Span, is_small
from counterpoint.runtime.moving import move_together
from counterpoint.runtime.rows import Piece, piece_of
from counterpoint.runtime.strewn import Strewn
from counterpoint.runtime.tables import Stretch

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
        sparse: the parameters with sparse gradients, whichever arena they lie in.
    """

    def __init__(
        self,
        layout: Layout,
        params: Mapping[str, nn.Parameter],
        home: Span,
        empty: Allocate = new_tensor,
        sparse: frozenset[str] = frozenset(),
    ) -> None:
        self.layout, self.empty = layout, empty
        self.params = {slot.name: params[slot.name] for slot in layout.slots}
        self.is_gathered = True
        self.weights = torch.cat([self.params[slot.name].detach().reshape(-1) for slot in layout.slots])
        self.house(self.weights)
        self.home = layout.range_of(home)
        self.gradient: Tensor | None = None
        self.part: Tensor | None = None
        self.late: Tensor | None = None  # a gradient that was set aside, to be applied a step later
        self.kept: Tensor | None = None
        self.commons: Commons | None = None
        self.sparse = sparse
        self.strewn = Strewn(layout, sparse)
        self.left: dict[Group, Leftovers] = {}  # what codes have not sent, by the group that sums in them
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
        self.strewn = Strewn(self.layout, frozenset() if self.layout.cut_anywhere else self.sparse)
        self.house(commons.weights)
        commons.receive(self.layout, self.params, self.move)

    def leave(self) -> Commons | None:
        """Live in memory of one's own again, with the weights as they are; return what is left, if anything is."""
        left = self.commons
        if left is not None:
            self.house(self.weights.clone())
            left.cease()
            self.commons = None
            self.strewn = Strewn(self.layout, self.sparse)
            self.clear()
        return left

    def begin(self) -> None:
        """Start a step, in which no parameter has got a gradient."""
        self.reached.clear()
        if self.commons is not None:
            self.commons.tables.begin()

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
        """Put the gradient that autograd has put on a parameter where it belongs in the flat one, if there is any."""
        param = self.params[slot.name]
        fresh = param.grad
        if fresh is None:
            return
        param.grad = None
        if fresh.is_sparse and self.commons is not None and slot.name in self.commons.tables.board.tables:
            self.add_rows(slot, piece_of(fresh))
            return
        if self.commons is None and slot.name in self.strewn.slots:
            self.strewn.take(slot.name, fresh)
            self.reached.add(slot.name)
            return
        view, has_some = self.landing(slot)
        (view.add_ if has_some else view.copy_)(fresh.to_dense() if fresh.is_sparse else fresh)

    def add_rows(self, slot: Slot, piece: Piece) -> None:
        """Note that a table's gradient has these rows, too; only where replicas can show them to each other."""
        assert self.commons is not None, "there is memory in common"
        self.commons.tables.board.add(slot.name, piece)
        self.reached.add(slot.name)

    def landing(self, slot: Slot) -> tuple[Tensor, bool]:
        """Return where a gradient is written that autograd will not hand over, and whether it adds to what is there."""
        has_some = self.gradient is not None and slot.name in self.filled
        view = self.buffer()[slot.start : slot.stop].view(slot.shape)
        if self.commons is not None:
            self.commons.tables.stained.add(slot.name)
        self.filled.add(slot.name)
        self.reached.add(slot.name)
        return view, has_some

    def fold(self) -> Tensor:
        """Return the flat gradient, after moving into it what autograd has put on the parameters.

        What is in the places of tables with sparse gradients is unspecified.
        """
        self.gather()
        whole = self.buffer()
        for slot in self.layout.slots:
            if slot.name not in self.filled and (self.commons is not None or slot.name not in self.strewn.slots):
                whole[slot.start : slot.stop].zero_()
                self.filled.add(slot.name)
        if self.commons is not None:
            self.commons.tables.absorb(self.filled)
        return whole

    def gather(self) -> None:
        """Move into the flat gradient what autograd has put on the parameters; the rest of it is unspecified."""
        self.buffer()
        slots: Sequence[Slot] = self.layout.slots
        if self.commons is not None and not self.filled.issuperset(gathered := self.commons.small_names):
            gathered = self.commons.gather() if self.filled.isdisjoint(gathered) else frozenset()
            for names in (self.filled, self.reached, self.commons.tables.stained):
                names.update(gathered)
            slots = self.commons.large if gathered else slots
        self.move_all(slots)

    def move_all(self, slots: Sequence[Slot]) -> None:
        """Do as :meth:`move` for each: small ones together, large ones one by one, so that each is freed at once."""
        if self.commons is None:
            flat, passed = self.buffer(), self.filled.union(self.strewn.slots)
            fresh = [slot for slot in slots if is_small(slot, self.layout) and slot.name not in passed]
            move_together(fresh, self.params, flat, (self.filled, self.reached))
        for slot in slots:
            self.move(slot)

    def announce(self) -> None:
        """This replica's gradient is where the others can read it, as soon as all have met."""
        assert self.commons is not None, "there is memory in common"
        self.gather()
        tables, flat = self.commons.tables, self.buffer()
        for slot in self.layout.slots if len(self.filled) < len(self.params) else ():
            if slot.name not in self.filled and slot.name not in tables.board.tables:
                flat[slot.start : slot.stop].zero_()
                self.filled.add(slot.name)
        tables.absorb(self.filled)
        tables.board.publish(self.filled)

    def swap(self) -> None:
        """Exchange the gradient with the one that was set aside, if there is one."""
        self.strewn.require_none()
        self.gradient, self.late = self.late, self.fold()
        self.filled = set(self.params) if self.gradient is not None else set()

    def set_aside(self) -> Tensor:
        """Return the gradient that was set aside; zeros where that was forgotten."""
        if self.late is None:
            self.late = self.empty(self.layout.num_elements, self.layout.dtype).zero_()
        return self.late

    def message(self) -> list[Tensor]:
        """Return the gradient as tensors to be sent; :meth:`receive` is its opposite."""
        whole = self.fold()
        if not self.strewn.slots:
            return [whole]
        ranges = [whole[low:high] for low, high in self.strewn.dense_ranges(0, self.layout.num_elements)]
        return [torch.cat(ranges) if ranges else whole[:0], *self.strewn.message()]

    def receive(self, tensors: Iterator[Tensor]) -> None:
        """Add a gradient that has come from elsewhere; its tensors may be used as memory."""
        gradient = next(tensors)
        if self.strewn.slots:
            whole, begun = self.fold(), 0
            for low, high in self.strewn.dense_ranges(0, self.layout.num_elements):
                whole[low:high] += gradient[begun : begun + high - low]
                begun += high - low
            self.strewn.receive(tensors)
        elif self.gradient is None and self.commons is None:
            self.gradient, self.filled = gradient, set(self.params)
        else:
            self.fold().add_(gradient)

    def leftovers(self, group: Group) -> Leftovers:
        """Return what a code keeps here for sums over a group."""
        return self.left.setdefault(group, Leftovers())

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

    def show(self, fabric: Fabric, group: Group, label: str) -> None:
        """All replicas see each other's gradients, of which this rank will add up its share where it is needed."""
        assert self.commons is not None, "there is memory in common"
        if self.commons.tables.board.tables:
            self.commons.tables.board.settle(fabric, group, label)
            if not self.layout.cut_anywhere:
                self.strewn.rows = self.commons.tables.as_pieces()
        self.commons.is_shown = True

    def stretches(self, start: int, stop: int, span: Span, *, as_rows: bool) -> list[Stretch]:
        """Return what adds up to the gradient of a range: each replica's, or the sum where it has been made.

        Args:
            start: the first element.
            stop: one past the last.
            span: the part that this rank updates.
            as_rows: whether rows of tables may be left as such.
        """
        if self.commons is not None and self.commons.is_shown and self.part is None:
            return list(self.commons.tables.stretches(start, stop, as_rows=as_rows))
        low = self.layout.range_of(span)[0] if self.part is not None else 0
        whole = self.fold() if self.part is None else self.part
        if self.commons is None:
            self.strewn.add_to(whole, low)
        return [Stretch(start, stop, [whole[start - low : stop - low]])]

    def add_up(self, span: Span) -> None:
        """Make the sum of this rank's share, if the replicas' gradients have only been shown so far."""
        if self.commons is not None and self.commons.is_shown and self.part is None:
            start, stop = self.layout.range_of(span)
            for stretch in self.commons.tables.stretches(start, stop, as_rows=False):
                mine, parts = self.commons.own[stretch.start : stretch.stop], stretch.parts
                total = reduce_in_order(parts, "sum") if len(parts) > 1 else parts[0]
                if total.data_ptr() != mine.data_ptr():
                    mine.copy_(total)
            self.part = self.commons.own[start:stop]

    def sum_of(self, span: Span) -> Tensor:
        """Return what is to be added up with other ranks': the sum of this rank's share, or the whole gradient."""
        self.add_up(span)
        if self.commons is not None:
            self.commons.tables.stain()
        return self.fold() if self.part is None else self.part

    def drop_gradient(self) -> None:
        """Free the gradient but for a share; one that was a view of the flat gradient becomes a tensor of its own."""
        if self.part is None and self.commons is None:
            self.strewn.clear()
        if self.part is not None and self.gradient is not None:
            self.part = self.part.clone()
        self.gradient = None

    def clear(self) -> None:
        """Forget all gradients."""
        self.gradient = self.part = None
        self.strewn.clear()
        for param in self.params.values():
            param.grad = None
        if self.commons is not None:
            self.commons.is_shown = False
            self.commons.tables.clear()

    def view_of(self, start: int, stop: int) -> Tensor:
        """Return the weights of a range as the optimizer updates them, in a parameter's shape where it is one."""
        return self.layout.shaped(self.view_of_flat(start, stop), start, stop)

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
        """Return the gradient that belongs to :meth:`view_of` the same range; sparse where its optimizer wants that."""
        for slot in self.layout.slots if not self.layout.cut_anywhere else ():
            sparse = self.strewn.sparse(slot.name, slot.shape) if (slot.start, slot.stop) == (start, stop) else None
            if sparse is not None:
                return sparse
        self.add_up(span)
        (stretch,) = self.stretches(start, stop, span, as_rows=False)
        return self.layout.shaped(stretch.parts[0], start, stop)
