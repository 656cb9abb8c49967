"""Flat storage of one unit's parameters: weights and gradients in contiguous buffers, parameters as views of them.

A collective works on a flat buffer, a shard is a range of it, and an elementwise optimizer updates one tensor instead
of many. A unit whose gradient no other rank needs has no flat gradient: autograd's own tensors are used.

::

    layout     | embed.weight | fc.weight      | fc.bias |     slots, one dtype                        (1)
    weights    [..............|................|.........]     parameters are views of it              (2)
    grad       [..............|................|.........]     filled slot by slot: filled_names       (3)
                      ^ shard_bounds ^
    local_shard       [..............]                         kept while weights are freed (ZeRO-3)   (4)
    grad_shard        [..............]                         this rank's sum over the replicas       (5)
    delayed_grad  another whole grad, swapped in one step later                                        (6)
    shared     (2) and (3) in memory of all replicas of a host: counterpoint.runtime.params.shared_params
    sparse_grads   rows of tables that have no place in (3): counterpoint.runtime.params.sparse_grads

Autograd puts gradients on the parameters; :meth:`FlatParams.collect_grad` moves one into (3), and
:meth:`FlatParams.collect_flat_grad` completes it. :meth:`FlatParams.unshard_weights` and
:meth:`FlatParams.reshard_weights` allocate and free (2) next to (4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSet, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from counterpoint.fabric.fabric import Fabric, Group
from counterpoint.fabric.reductions import reduce_in_order
from counterpoint.runtime.params.flat_layout import WHOLE, FlatLayout, ParamSlot, ShardSpan, is_small
from counterpoint.runtime.params.shared_params import GradRange, SharedParams
from counterpoint.runtime.params.sparse_grads import RowGrad, SparseGrads, row_grad_from_sparse


def copy_small_grads(
    slots: Iterable[ParamSlot], params: Mapping[str, nn.Parameter], flat: Tensor, name_sets: Iterable[MutableSet[str]]
) -> None:
    """Copy gradients from parameters into a flat one, and clear them on the parameters.

    Contiguous slots are copied in one call. A gradient that is not a dense tensor, or has a graph, stays where it is.

    Args:
        slots: of parameters without a collected gradient.
        params: all parameters, by name.
        flat: the flat gradient.
        name_sets: sets to which the names of the copied parameters are added.

    Example:
        >>> one, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
        >>> one.grad, other.grad, flat = torch.ones(2), torch.full((1,), 2.0), torch.zeros(3)
        >>> slots = [ParamSlot("one", (2,), 0, 0), ParamSlot("other", (1,), 2, 0)]
        >>> copy_small_grads(slots, {"one": one, "other": other}, flat, [names := set()])
        >>> flat, sorted(names), one.grad
        (tensor([1., 1., 2.]), ['one', 'other'], None)
    """
    for run in _contiguous_runs(
        sorted((slot for slot in slots if _is_dense_grad(params[slot.name].grad)), key=_slot_start)
    ):
        target = flat[run[0].start : run[-1].stop]
        grads = [params[slot.name].grad for slot in run]
        torch.cat([gradient.reshape(-1) for gradient in grads if gradient is not None], out=target)
        for slot in run:
            params[slot.name].grad = None
            for names in name_sets:
                names.add(slot.name)


def _slot_start(slot: ParamSlot) -> int:
    return slot.start


def _is_dense_grad(grad: Tensor | None) -> bool:
    return grad is not None and grad.layout == torch.strided and not grad.requires_grad


def _contiguous_runs(slots: Iterable[ParamSlot]) -> Iterator[list[ParamSlot]]:
    """Yield runs of contiguous slots, given all in order."""
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
    """Return an uninitialized flat tensor in this process's own memory."""
    return torch.empty(num_elements, dtype=dtype)


class ErrorFeedback:
    """State of one codec between steps, for one unit's flat parameters and one group."""

    def __init__(self) -> None:
        self.residual: Tensor | None = None
        self.q_factors: dict[str, Tensor] = {}  # by parameter: the factor that powersgd starts the next step with
        self.gather_buffer: Tensor | None = None  # reused in every step
        self._next_residual: Tensor | None = None
        self._next_q_factors: dict[str, Tensor] = {}
        self._is_pending = False

    def add_residual(self, grad: Tensor, sparse_grads: SparseGrads) -> Tensor:
        """Return gradient plus residual; the caller subtracts what it sends, and the rest is the next residual."""
        self._is_pending, self._next_q_factors = True, {}
        if self._next_residual is None:
            self._next_residual = torch.empty_like(grad)
        if self.residual is None:
            self._next_residual.copy_(grad)
        else:
            torch.add(grad, self.residual, out=self._next_residual)
        for slot in sparse_grads.slots.values():
            self._next_residual[slot.start : slot.stop].zero_()
        return self._next_residual

    def set_next_q_factor(self, name: str, q_factor: Tensor) -> None:
        """Set the factor of a parameter that the next step starts with."""
        self._next_q_factors[name] = q_factor

    def commit(self, *, applied: bool) -> None:
        """Make the next residual current if the step is applied; else keep the old one."""
        if self._is_pending and applied:
            self.residual, self._next_residual = self._next_residual, self.residual
            self.q_factors.update(self._next_q_factors)
        self._is_pending = False


class FlatParams:
    """The parameters of one unit and dtype, contiguous in one buffer.

    Args:
        layout: the position of each.
        params: the rank's parameters by name; they become views of the buffer.
        local_shard: the part whose weights are kept while the full buffer is freed.
        allocate: allocates gradients; the fabric's own memory need not be copied by collectives.
        sparse_names: the parameters of the model with sparse gradients.
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
        self.rebind_views(self.weights)  # (2)
        self.shard_bounds = layout.element_range(local_shard)
        self.grad: Tensor | None = None  # (3)
        self.grad_shard: Tensor | None = None  # (5)
        self.delayed_grad: Tensor | None = None  # (6), applied one step later
        self.local_shard: Tensor | None = None  # (4)
        self.shared: SharedParams | None = None
        self.sparse_names = sparse_names
        self.sparse_grads = SparseGrads(layout, sparse_names, self.weights.device)
        self.error_feedbacks: dict[Group, ErrorFeedback] = {}  # of compressed reductions over each group
        self.filled_names: set[str] = set()  # parameters whose slot in the flat gradient is valid
        self.names_with_grad: set[str] = set()  # parameters with a gradient from autograd in this step
        if local_shard != WHOLE:
            self.local_shard = self.weights[self.shard_bounds[0] : self.shard_bounds[1]].clone()
            self.reshard_weights()

    def rebind_views(self, weights: Tensor) -> None:
        """Make the parameters views of these weights."""
        self.weights = weights
        for slot in self.layout.slots:
            self.params[slot.name].data = weights[slot.start : slot.stop].view(slot.shape)

    def attach_shared(self, shared: SharedParams) -> None:
        """Move weights and gradients to memory that the replicas share; its weights are the same on all of them."""
        self.clear_grads()
        self.shared = shared
        names = frozenset[str]() if self.layout.may_split_params else self.sparse_names
        self.sparse_grads = SparseGrads(self.layout, names, shared.weights.device)
        self.rebind_views(shared.weights)
        shared.install_hooks(self.layout, self.params, self.collect_grad)

    def detach_shared(self) -> SharedParams | None:
        """Move the weights back to this rank's own memory; return the shared memory, if there was any."""
        shared = self.shared
        if shared is not None:
            self.rebind_views(self.weights.clone())
            shared.detach()
            self.shared = None
            self.sparse_grads = SparseGrads(self.layout, self.sparse_names, self.weights.device)
            self.clear_grads()
        return shared

    def begin_step(self) -> None:
        """Start a step, in which no parameter has a gradient."""
        self.names_with_grad.clear()
        if self.shared is not None:
            self.shared.embedding_grads.begin_step()

    def unshard_weights(self) -> None:
        """Allocate the full buffer and copy the local shard into it; the rest is uninitialized."""
        if self.is_unsharded or self.local_shard is None:
            return
        self.weights.untyped_storage().resize_(self.layout.num_elements * self.weights.element_size())
        self.weights.data[self.shard_bounds[0] : self.shard_bounds[1]].copy_(self.local_shard)
        self.is_unsharded = True

    def reshard_weights(self) -> None:
        """Free the full buffer; the local shard stays."""
        if self.local_shard is not None and self.is_unsharded:
            self.weights.untyped_storage().resize_(0)
            self.is_unsharded = False

    def grad_buffer(self) -> Tensor:
        """Return the flat gradient; a new one is uninitialized."""
        if self.grad is None:
            self.filled_names.clear()
            if self.shared is not None:
                self.grad = self.shared.local_grad
            else:
                count, on_host = self.layout.num_elements, self.weights.device.type == "cpu"
                self.grad = self.allocate(count, self.layout.dtype) if on_host else self.weights.new_empty(count)
        return self.grad

    def collect_grad(self, slot: ParamSlot) -> None:
        """Move the gradient that autograd has put on a parameter into the flat one, if there is any."""
        param = self.params[slot.name]
        grad = param.grad
        if grad is None:
            return
        param.grad = None
        if grad.is_sparse and self.shared is not None and slot.name in self.shared.embedding_grads.exchange.tables:
            self.add_row_grad(slot, row_grad_from_sparse(grad))
            return
        if self.shared is None and slot.name in self.sparse_grads.slots:
            self.sparse_grads.add(slot.name, grad)
            self.names_with_grad.add(slot.name)
            return
        view, has_some = self.grad_target(slot)
        (view.add_ if has_some else view.copy_)(grad.to_dense() if grad.is_sparse else grad)

    def add_row_grad(self, slot: ParamSlot, row_grad: RowGrad) -> None:
        """Add rows to a table's gradient; only where replicas can publish rows to each other."""
        assert self.shared is not None, "replicas share memory"
        self.shared.embedding_grads.exchange.add(slot.name, row_grad)
        self.names_with_grad.add(slot.name)

    def grad_target(self, slot: ParamSlot) -> tuple[Tensor, bool]:
        """Return where to write a gradient that bypasses autograd, and whether to add to what is there."""
        has_some = self.grad is not None and slot.name in self.filled_names
        view = self.grad_buffer()[slot.start : slot.stop].view(slot.shape)
        if self.shared is not None:
            self.shared.embedding_grads.dirty.add(slot.name)
        self.filled_names.add(slot.name)
        self.names_with_grad.add(slot.name)
        return view, has_some

    def collect_flat_grad(self) -> Tensor:
        """Return the flat gradient after collecting all gradients; slots without one are zeroed.

        The slots of tables with sparse gradients are undefined.
        """
        self.collect_grads()
        flat_grad = self.grad_buffer()
        for slot in self.layout.slots:
            if slot.name not in self.filled_names and (
                self.shared is not None or slot.name not in self.sparse_grads.slots
            ):
                flat_grad[slot.start : slot.stop].zero_()
                self.filled_names.add(slot.name)
        if self.shared is not None:
            self.shared.embedding_grads.merge_rows_into_dense(self.filled_names)
        return flat_grad

    def collect_grads(self) -> None:
        """Move all gradients on parameters into the flat one; the rest of it is undefined."""
        self.grad_buffer()
        slots: Sequence[ParamSlot] = self.layout.slots
        if self.shared is not None and not self.filled_names.issuperset(collected := self.shared.small_names):
            collected = self.shared.collect_small_grads() if self.filled_names.isdisjoint(collected) else frozenset()
            for names in (self.filled_names, self.names_with_grad, self.shared.embedding_grads.dirty):
                names.update(collected)
            slots = self.shared.large_slots if collected else slots
        self.collect_many_grads(slots)

    def collect_many_grads(self, slots: Sequence[ParamSlot]) -> None:
        """Do :meth:`collect_grad` for each; small ones are copied together, large ones one by one and freed at once."""
        if self.shared is None:
            flat, excluded = self.grad_buffer(), self.filled_names.union(self.sparse_grads.slots)
            small = [slot for slot in slots if is_small(slot, self.layout) and slot.name not in excluded]
            copy_small_grads(small, self.params, flat, (self.filled_names, self.names_with_grad))
        for slot in slots:
            self.collect_grad(slot)

    def publish_grad(self) -> None:
        """Complete this replica's gradient in shared memory, for the others to read after the next barrier."""
        assert self.shared is not None, "replicas share memory"
        self.collect_grads()
        embedding_grads, flat = self.shared.embedding_grads, self.grad_buffer()
        for slot in self.layout.slots if len(self.filled_names) < len(self.params) else ():
            if slot.name not in self.filled_names and slot.name not in embedding_grads.exchange.tables:
                flat[slot.start : slot.stop].zero_()
                self.filled_names.add(slot.name)
        embedding_grads.merge_rows_into_dense(self.filled_names)
        embedding_grads.exchange.publish(self.filled_names)

    def swap_grad_buffers(self) -> None:
        """Exchange the gradient with the delayed one, if there is one."""
        self.sparse_grads.require_dense()
        self.grad, self.delayed_grad = self.delayed_grad, self.collect_flat_grad()
        self.filled_names = set(self.params) if self.grad is not None else set()

    def ensure_delayed_grad(self) -> Tensor:
        """Return the delayed gradient; zeros if it was dropped."""
        if self.delayed_grad is None:
            self.delayed_grad = self.allocate(self.layout.num_elements, self.layout.dtype).zero_()
        return self.delayed_grad

    def pack_grad(self) -> list[Tensor]:
        """Return the gradient as tensors to be sent; :meth:`add_packed_grad` is its inverse."""
        flat_grad = self.collect_flat_grad()
        if not self.sparse_grads.slots:
            return [flat_grad]
        ranges = [flat_grad[low:high] for low, high in self.sparse_grads.dense_ranges(0, self.layout.num_elements)]
        return [torch.cat(ranges) if ranges else flat_grad[:0], *self.sparse_grads.pack()]

    def add_packed_grad(self, tensors: Iterator[Tensor]) -> None:
        """Add a gradient that was sent by another rank; its tensors may be kept as memory."""
        grad = next(tensors)
        if self.sparse_grads.slots:
            flat_grad, position = self.collect_flat_grad(), 0
            for low, high in self.sparse_grads.dense_ranges(0, self.layout.num_elements):
                flat_grad[low:high] += grad[position : position + high - low]
                position += high - low
            self.sparse_grads.add_packed(tensors)
        elif self.grad is None and self.shared is None:
            self.grad, self.filled_names = grad, set(self.params)
        else:
            self.collect_flat_grad().add_(grad)

    def error_feedback_for(self, group: Group) -> ErrorFeedback:
        """Return the error feedback of compressed reductions over a group."""
        return self.error_feedbacks.setdefault(group, ErrorFeedback())

    def params_without_grad(self) -> list[str]:
        """Return the parameters without a gradient from autograd in this step, collected or not."""
        return [name for name, param in self.params.items() if name not in self.names_with_grad and param.grad is None]

    def accumulate_shard(self, start: int, stop: int) -> None:
        """Add a range of the reduced gradient to this rank's shard and drop the flat gradient."""
        assert self.grad is not None, "a reduce-scatter needs a gradient"
        local = self.grad[start:stop]
        self.grad_shard = local if self.grad_shard is None else self.grad_shard.add_(local)
        if self.grad_shard is not local:
            self.grad = None

    def read_published(self, fabric: Fabric, group: Group, label: str) -> None:
        """Read the other replicas' published rows; from now on their gradients can be summed where they are needed."""
        assert self.shared is not None, "replicas share memory"
        if self.shared.embedding_grads.exchange.tables:
            self.shared.embedding_grads.exchange.read_all(fabric, group, label)
            if not self.layout.may_split_params:
                self.sparse_grads.reduced = self.shared.embedding_grads.as_row_grads()
        self.shared.is_published = True

    def grad_ranges(self, start: int, stop: int, span: ShardSpan, *, as_rows: bool) -> list[GradRange]:
        """Return what the gradient of a range is the sum of: each replica's gradient, or the sum if it exists already.

        Args:
            start: the first element.
            stop: one past the last.
            span: the shard that this rank updates.
            as_rows: whether rows of tables may stay rows.
        """
        if self.shared is not None and self.shared.is_published and self.grad_shard is None:
            return list(self.shared.embedding_grads.grad_ranges(start, stop, as_rows=as_rows))
        low = self.layout.element_range(span)[0] if self.grad_shard is not None else 0
        flat_grad = self.collect_flat_grad() if self.grad_shard is None else self.grad_shard
        if self.shared is None:
            self.sparse_grads.add_to(flat_grad, low)
        return [GradRange(start, stop, [flat_grad[start - low : stop - low]])]

    def reduce_shard(self, span: ShardSpan) -> None:
        """Sum this rank's shard, if the replicas' gradients have only been published so far."""
        if self.shared is not None and self.shared.is_published and self.grad_shard is None:
            start, stop = self.layout.element_range(span)
            for grad_range in self.shared.embedding_grads.grad_ranges(start, stop, as_rows=False):
                local, parts = self.shared.local_grad[grad_range.start : grad_range.stop], grad_range.parts
                total = reduce_in_order(parts, "sum") if len(parts) > 1 else parts[0]
                if total.data_ptr() != local.data_ptr():
                    local.copy_(total)
            self.grad_shard = self.shared.local_grad[start:stop]

    def reducible_grad(self, span: ShardSpan) -> Tensor:
        """Return what is to be reduced over further ranks: the summed shard of this rank, or the whole gradient."""
        self.reduce_shard(span)
        if self.shared is not None:
            self.shared.embedding_grads.mark_all_dirty()
        return self.collect_flat_grad() if self.grad_shard is None else self.grad_shard

    def free_grad(self) -> None:
        """Free the gradient except for a shard, which is copied if it was a view of it."""
        if self.grad_shard is None and self.shared is None:
            self.sparse_grads.clear()
        if self.grad_shard is not None and self.grad is not None:
            self.grad_shard = self.grad_shard.clone()
        self.grad = None

    def clear_grads(self) -> None:
        """Drop all gradients except the delayed one."""
        self.grad = self.grad_shard = None
        self.sparse_grads.clear()
        for param in self.params.values():
            param.grad = None
        if self.shared is not None:
            self.shared.is_published = False
            self.shared.embedding_grads.clear_added_rows()

    def optimizer_view(self, start: int, stop: int) -> Tensor:
        """Return the weights of a range as the optimizer updates them, in a parameter's shape if it is exactly one."""
        return self.layout.as_param_shape(self.flat_view(start, stop), start, stop)

    def flat_view(self, start: int, stop: int) -> Tensor:
        """Return the weights of a range that this rank keeps, as one flat view."""
        source, low = (self.weights, 0) if self.local_shard is None else (self.local_shard, self.shard_bounds[0])
        return source[start - low : stop - low]

    def write_param(self, name: str, values: Tensor) -> None:
        """Write a parameter's values into the part of it that is stored here."""
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
        """Return the gradient of the same range as :meth:`optimizer_view`; sparse if its optimizer expects that."""
        for slot in self.layout.slots if not self.layout.may_split_params else ():
            sparse = (
                self.sparse_grads.sparse_tensor(slot.name, slot.shape)
                if (slot.start, slot.stop) == (start, stop)
                else None
            )
            if sparse is not None:
                return sparse
        self.reduce_shard(span)
        (grad_range,) = self.grad_ranges(start, stop, span, as_rows=False)
        return self.layout.as_param_shape(grad_range.parts[0], start, stop)
