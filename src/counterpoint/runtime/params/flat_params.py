"""Gradients that move from their parameters into a flat one together: few calls for many small parameters.

Where a unit lives on one rank: weights and gradients in flat buffers, parameters as views of them.

A collective works on the flat buffer, a share is a range of it, and an optimizer that treats numbers apart sees
one tensor instead of many. A unit whose gradient no other rank needs has no gradient buffer: autograd's own
tensors are used as they are. Where replicas have memory in common, their arenas live there together
(:mod:`counterpoint.runtime.params.shared_params`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSet, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from counterpoint.fabric.fabric import Fabric, Group
from counterpoint.fabric.local_collective import reduce_in_order
from counterpoint.runtime.params.compressed_collectives import ErrorFeedback
from counterpoint.runtime.params.flat_layout import WHOLE, FlatLayout, ParamSlot, ShardSpan, is_small
from counterpoint.runtime.params.shared_params import GradRange, SharedParams
from counterpoint.runtime.params.sparse_grads import RowGrad, SparseGrads, row_grad_from_sparse


def copy_small_grads(
    slots: Iterable[ParamSlot], params: Mapping[str, nn.Parameter], flat: Tensor, name_sets: Iterable[MutableSet[str]]
) -> None:
    """The gradients of these parameters are in their places in the flat one and no longer on the parameters.

    Those that follow one another are copied in one call. What is no dense tensor, or has a history, stays where it is.

    Args:
        slots: of parameters that have nothing in the flat gradient yet.
        params: all parameters, by name.
        flat: the flat gradient.
        held: sets of names, to which those of the parameters are added whose gradient has moved.

    Example:
        >>> one, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
        >>> one.grad, other.grad, flat = torch.ones(2), torch.full((1,), 2.0), torch.zeros(3)
        >>> slots = [Slot("one", (2,), 0, 0), Slot("other", (1,), 2, 0)]
        >>> move_together(slots, {"one": one, "other": other}, flat, [names := set()])
        >>> flat, sorted(names), one.grad
        (tensor([1., 1., 2.]), ['one', 'other'], None)
    """
    for run in _contiguous_runs(
        sorted((slot for slot in slots if _is_dense_grad(params[slot.name].grad)), key=_slot_start)
    ):
        there = flat[run[0].start : run[-1].stop]
        fresh = [params[slot.name].grad for slot in run]
        torch.cat([gradient.reshape(-1) for gradient in fresh if gradient is not None], out=there)
        for slot in run:
            params[slot.name].grad = None
            for names in name_sets:
                names.add(slot.name)


def _slot_start(slot: ParamSlot) -> int:
    return slot.start


def _is_dense_grad(grad: Tensor | None) -> bool:
    return grad is not None and grad.layout == torch.strided and not grad.requires_grad


def _contiguous_runs(slots: Iterable[ParamSlot]) -> Iterator[list[ParamSlot]]:
    """Yield slots that lie back to back, given all in their order."""
    run: list[ParamSlot] = []
    for slot in slots:
        if run and run[-1].stop != slot.start:
            yield run
            run = []
        run.append(slot)
    if run:
        yield run


Allocate: TypeAlias = Callable[[int, torch.dtype], Tensor]


def allocate_flat(num_elements: int, dtype: torch.dtype) -> Tensor:
    """Return a flat tensor of this process's own memory."""
    return torch.empty(num_elements, dtype=dtype)


class FlatParams:
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
        layout: FlatLayout,
        params: Mapping[str, nn.Parameter],
        local_shard: ShardSpan,
        allocate: Allocate = allocate_flat,
        sparse_names: frozenset[str] = frozenset(),
    ) -> None:
        self.layout, self.allocate = layout, allocate
        self.params = {slot.name: params[slot.name] for slot in layout.slots}
        self.is_unsharded = True
        self.weights = torch.cat([self.params[slot.name].detach().reshape(-1) for slot in layout.slots])
        self.rebind_views(self.weights)
        self.shard_bounds = layout.element_range(local_shard)
        self.grad: Tensor | None = None
        self.grad_shard: Tensor | None = None
        self.delayed_grad: Tensor | None = None  # a gradient that was set aside, to be applied a step later
        self.local_shard: Tensor | None = None
        self.shared: SharedParams | None = None
        self.sparse_names = sparse_names
        self.sparse_grads = SparseGrads(layout, sparse_names)
        self.error_feedbacks: dict[
            Group, ErrorFeedback
        ] = {}  # what codes have not sent, by the group that sums in them
        self.filled_names: set[str] = set()  # the parameters whose place in the flat gradient holds theirs
        self.names_with_grad: set[str] = set()  # those on which autograd has put a gradient in this step
        if local_shard != WHOLE:
            self.local_shard = self.weights[self.shard_bounds[0] : self.shard_bounds[1]].clone()
            self.reshard_weights()

    def rebind_views(self, weights: Tensor) -> None:
        """Let the parameters be views of these weights."""
        self.weights = weights
        for slot in self.layout.slots:
            self.params[slot.name].data = weights[slot.start : slot.stop].view(slot.shape)

    def attach_shared(self, shared: SharedParams) -> None:
        """Live in memory that the replicas have in common; what it holds are the weights of all of them."""
        self.clear_grads()
        self.shared = shared
        self.sparse_grads = SparseGrads(self.layout, frozenset() if self.layout.may_split_params else self.sparse_names)
        self.rebind_views(shared.weights)
        shared.install_hooks(self.layout, self.params, self.collect_grad)

    def detach_shared(self) -> SharedParams | None:
        """Live in memory of one's own again, with the weights as they are; return what is left, if anything is."""
        left = self.shared
        if left is not None:
            self.rebind_views(self.weights.clone())
            left.detach()
            self.shared = None
            self.sparse_grads = SparseGrads(self.layout, self.sparse_names)
            self.clear_grads()
        return left

    def begin_step(self) -> None:
        """Start a step, in which no parameter has got a gradient."""
        self.names_with_grad.clear()
        if self.shared is not None:
            self.shared.embedding_grads.begin_step()

    def unshard_weights(self) -> None:
        """Give the full buffer its memory back and put the kept share into it; the rest is unspecified."""
        if self.is_unsharded or self.local_shard is None:
            return
        self.weights.untyped_storage().resize_(self.layout.num_elements * self.weights.element_size())
        self.weights.data[self.shard_bounds[0] : self.shard_bounds[1]].copy_(self.local_shard)
        self.is_unsharded = True

    def reshard_weights(self) -> None:
        """Free the full buffer; the kept share stays."""
        if self.local_shard is not None and self.is_unsharded:
            self.weights.untyped_storage().resize_(0)
            self.is_unsharded = False

    def grad_buffer(self) -> Tensor:
        """Return the flat gradient; where it is new, what is in it is unspecified."""
        if self.grad is None:
            self.filled_names.clear()
            if self.shared is not None:
                self.grad = self.shared.local_grad
            else:
                count, on_host = self.layout.num_elements, self.weights.device.type == "cpu"
                self.grad = self.allocate(count, self.layout.dtype) if on_host else self.weights.new_empty(count)
        return self.grad

    def collect_grad(self, slot: ParamSlot) -> None:
        """Put the gradient that autograd has put on a parameter where it belongs in the flat one, if there is any."""
        param = self.params[slot.name]
        fresh = param.grad
        if fresh is None:
            return
        param.grad = None
        if fresh.is_sparse and self.shared is not None and slot.name in self.shared.embedding_grads.exchange.tables:
            self.add_row_grad(slot, row_grad_from_sparse(fresh))
            return
        if self.shared is None and slot.name in self.sparse_grads.slots:
            self.sparse_grads.add(slot.name, fresh)
            self.names_with_grad.add(slot.name)
            return
        view, has_some = self.grad_target(slot)
        (view.add_ if has_some else view.copy_)(fresh.to_dense() if fresh.is_sparse else fresh)

    def add_row_grad(self, slot: ParamSlot, row_grad: RowGrad) -> None:
        """Note that a table's gradient has these rows, too; only where replicas can show them to each other."""
        assert self.shared is not None, "there is memory in common"
        self.shared.embedding_grads.exchange.add(slot.name, row_grad)
        self.names_with_grad.add(slot.name)

    def grad_target(self, slot: ParamSlot) -> tuple[Tensor, bool]:
        """Return where a gradient is written that autograd will not hand over, and whether it adds to what is there."""
        has_some = self.grad is not None and slot.name in self.filled_names
        view = self.grad_buffer()[slot.start : slot.stop].view(slot.shape)
        if self.shared is not None:
            self.shared.embedding_grads.dirty.add(slot.name)
        self.filled_names.add(slot.name)
        self.names_with_grad.add(slot.name)
        return view, has_some

    def collect_flat_grad(self) -> Tensor:
        """Return the flat gradient, after moving into it what autograd has put on the parameters.

        What is in the places of tables with sparse gradients is unspecified.
        """
        self.collect_grads()
        whole = self.grad_buffer()
        for slot in self.layout.slots:
            if slot.name not in self.filled_names and (
                self.shared is not None or slot.name not in self.sparse_grads.slots
            ):
                whole[slot.start : slot.stop].zero_()
                self.filled_names.add(slot.name)
        if self.shared is not None:
            self.shared.embedding_grads.merge_rows_into_dense(self.filled_names)
        return whole

    def collect_grads(self) -> None:
        """Move into the flat gradient what autograd has put on the parameters; the rest of it is unspecified."""
        self.grad_buffer()
        slots: Sequence[ParamSlot] = self.layout.slots
        if self.shared is not None and not self.filled_names.issuperset(gathered := self.shared.small_names):
            gathered = self.shared.collect_small_grads() if self.filled_names.isdisjoint(gathered) else frozenset()
            for names in (self.filled_names, self.names_with_grad, self.shared.embedding_grads.dirty):
                names.update(gathered)
            slots = self.shared.large_slots if gathered else slots
        self.collect_many_grads(slots)

    def collect_many_grads(self, slots: Sequence[ParamSlot]) -> None:
        """Do as :meth:`move` for each: small ones together, large ones one by one, so that each is freed at once."""
        if self.shared is None:
            flat, passed = self.grad_buffer(), self.filled_names.union(self.sparse_grads.slots)
            fresh = [slot for slot in slots if is_small(slot, self.layout) and slot.name not in passed]
            copy_small_grads(fresh, self.params, flat, (self.filled_names, self.names_with_grad))
        for slot in slots:
            self.collect_grad(slot)

    def publish_grad(self) -> None:
        """This replica's gradient is where the others can read it, as soon as all have met."""
        assert self.shared is not None, "there is memory in common"
        self.collect_grads()
        tables, flat = self.shared.embedding_grads, self.grad_buffer()
        for slot in self.layout.slots if len(self.filled_names) < len(self.params) else ():
            if slot.name not in self.filled_names and slot.name not in tables.exchange.tables:
                flat[slot.start : slot.stop].zero_()
                self.filled_names.add(slot.name)
        tables.merge_rows_into_dense(self.filled_names)
        tables.exchange.publish(self.filled_names)

    def swap_grad_buffers(self) -> None:
        """Exchange the gradient with the one that was set aside, if there is one."""
        self.sparse_grads.require_dense()
        self.grad, self.delayed_grad = self.delayed_grad, self.collect_flat_grad()
        self.filled_names = set(self.params) if self.grad is not None else set()

    def ensure_delayed_grad(self) -> Tensor:
        """Return the gradient that was set aside; zeros where that was forgotten."""
        if self.delayed_grad is None:
            self.delayed_grad = self.allocate(self.layout.num_elements, self.layout.dtype).zero_()
        return self.delayed_grad

    def pack_grad(self) -> list[Tensor]:
        """Return the gradient as tensors to be sent; :meth:`receive` is its opposite."""
        whole = self.collect_flat_grad()
        if not self.sparse_grads.slots:
            return [whole]
        ranges = [whole[low:high] for low, high in self.sparse_grads.dense_ranges(0, self.layout.num_elements)]
        return [torch.cat(ranges) if ranges else whole[:0], *self.sparse_grads.pack()]

    def add_packed_grad(self, tensors: Iterator[Tensor]) -> None:
        """Add a gradient that has come from elsewhere; its tensors may be used as memory."""
        gradient = next(tensors)
        if self.sparse_grads.slots:
            whole, begun = self.collect_flat_grad(), 0
            for low, high in self.sparse_grads.dense_ranges(0, self.layout.num_elements):
                whole[low:high] += gradient[begun : begun + high - low]
                begun += high - low
            self.sparse_grads.add_packed(tensors)
        elif self.grad is None and self.shared is None:
            self.grad, self.filled_names = gradient, set(self.params)
        else:
            self.collect_flat_grad().add_(gradient)

    def error_feedback_for(self, group: Group) -> ErrorFeedback:
        """Return what a code keeps here for sums over a group."""
        return self.error_feedbacks.setdefault(group, ErrorFeedback())

    def params_without_grad(self) -> list[str]:
        """Return the parameters on which autograd has put no gradient in this step, folded or not."""
        return [name for name, param in self.params.items() if name not in self.names_with_grad and param.grad is None]

    def accumulate_shard(self, start: int, stop: int) -> None:
        """Add a range of the summed gradient to this rank's share and forget the flat gradient."""
        assert self.grad is not None, "a share needs a gradient"
        mine = self.grad[start:stop]
        self.grad_shard = mine if self.grad_shard is None else self.grad_shard.add_(mine)
        if self.grad_shard is not mine:
            self.grad = None

    def read_published(self, fabric: Fabric, group: Group, label: str) -> None:
        """All replicas see each other's gradients, of which this rank will add up its share where it is needed."""
        assert self.shared is not None, "there is memory in common"
        if self.shared.embedding_grads.exchange.tables:
            self.shared.embedding_grads.exchange.read_all(fabric, group, label)
            if not self.layout.may_split_params:
                self.sparse_grads.reduced = self.shared.embedding_grads.as_row_grads()
        self.shared.is_published = True

    def grad_ranges(self, start: int, stop: int, span: ShardSpan, *, as_rows: bool) -> list[GradRange]:
        """Return what adds up to the gradient of a range: each replica's, or the sum where it has been made.

        Args:
            start: the first element.
            stop: one past the last.
            span: the part that this rank updates.
            as_rows: whether rows of tables may be left as such.
        """
        if self.shared is not None and self.shared.is_published and self.grad_shard is None:
            return list(self.shared.embedding_grads.grad_ranges(start, stop, as_rows=as_rows))
        low = self.layout.element_range(span)[0] if self.grad_shard is not None else 0
        whole = self.collect_flat_grad() if self.grad_shard is None else self.grad_shard
        if self.shared is None:
            self.sparse_grads.add_to(whole, low)
        return [GradRange(start, stop, [whole[start - low : stop - low]])]

    def reduce_shard(self, span: ShardSpan) -> None:
        """Make the sum of this rank's share, if the replicas' gradients have only been shown so far."""
        if self.shared is not None and self.shared.is_published and self.grad_shard is None:
            start, stop = self.layout.element_range(span)
            for stretch in self.shared.embedding_grads.grad_ranges(start, stop, as_rows=False):
                mine, parts = self.shared.local_grad[stretch.start : stretch.stop], stretch.parts
                total = reduce_in_order(parts, "sum") if len(parts) > 1 else parts[0]
                if total.data_ptr() != mine.data_ptr():
                    mine.copy_(total)
            self.grad_shard = self.shared.local_grad[start:stop]

    def reducible_grad(self, span: ShardSpan) -> Tensor:
        """Return what is to be added up with other ranks': the sum of this rank's share, or the whole gradient."""
        self.reduce_shard(span)
        if self.shared is not None:
            self.shared.embedding_grads.mark_all_dirty()
        return self.collect_flat_grad() if self.grad_shard is None else self.grad_shard

    def free_grad(self) -> None:
        """Free the gradient but for a share; one that was a view of the flat gradient becomes a tensor of its own."""
        if self.grad_shard is None and self.shared is None:
            self.sparse_grads.clear()
        if self.grad_shard is not None and self.grad is not None:
            self.grad_shard = self.grad_shard.clone()
        self.grad = None

    def clear_grads(self) -> None:
        """Forget all gradients."""
        self.grad = self.grad_shard = None
        self.sparse_grads.clear()
        for param in self.params.values():
            param.grad = None
        if self.shared is not None:
            self.shared.is_published = False
            self.shared.embedding_grads.clear_added_rows()

    def optimizer_view(self, start: int, stop: int) -> Tensor:
        """Return the weights of a range as the optimizer updates them, in a parameter's shape where it is one."""
        return self.layout.as_param_shape(self.flat_view(start, stop), start, stop)

    def flat_view(self, start: int, stop: int) -> Tensor:
        """Return the weights of a range that this rank keeps, as one flat view."""
        source, low = (self.weights, 0) if self.local_shard is None else (self.local_shard, self.shard_bounds[0])
        return source[start - low : stop - low]

    def write_param(self, name: str, values: Tensor) -> None:
        """Write a parameter's values into what of it lies here."""
        slot = next(slot for slot in self.layout.slots if slot.name == name)
        flat = values.reshape(-1)
        if self.local_shard is None:
            self.weights.data[slot.start : slot.stop].copy_(flat)
            return
        start, stop = max(slot.start, self.shard_bounds[0]), min(slot.stop, self.shard_bounds[1])
        if start < stop:
            self.local_shard[start - self.shard_bounds[0] : stop - self.shard_bounds[0]].copy_(
                flat[start - slot.start : stop - slot.start]
            )

    def optimizer_grad(self, start: int, stop: int, span: ShardSpan) -> Tensor:
        """Return the gradient that belongs to :meth:`view_of` the same range; sparse where its optimizer wants that."""
        for slot in self.layout.slots if not self.layout.may_split_params else ():
            sparse = (
                self.sparse_grads.sparse_tensor(slot.name, slot.shape)
                if (slot.start, slot.stop) == (start, stop)
                else None
            )
            if sparse is not None:
                return sparse
        self.reduce_shard(span)
        (stretch,) = self.grad_ranges(start, stop, span, as_rows=False)
        return self.layout.as_param_shape(stretch.parts[0], start, stop)
