"""Gradients of one unit's flat parameters: the protocol of their storage, and the storage in a rank's own memory.

::

    layout     | embed.weight | fc.weight      | fc.bias |     slots, one dtype
    flat       [..............|................|.........]     filled slot by slot: filled_names            (1)
    shard             [..............]                         this rank's part of the sum over replicas    (2)
    rows       of tables with sparse gradients, which have no place in (1): SparseGrads                     (3)

Autograd puts gradients on the parameters. :meth:`FlatGrads.collect` moves one into (1), :meth:`FlatGrads.collect_all`
completes it, and a reduce-scatter leaves (2). The other storage is
:class:`counterpoint.runtime.params.shared_params.SharedGrads`, which the replicas of one host share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSet, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from counterpoint.fabric.cast_reductions import start_cast_all_reduce, start_cast_reduce_scatter
from counterpoint.fabric.fabric import Fabric, Work
from counterpoint.fabric.quantized_collectives import start_quantized_reduce_scatter
from counterpoint.fabric.reductions import LOW_PRECISION
from counterpoint.program.compression import find_codec
from counterpoint.program.instruction import Collective
from counterpoint.rpc.segments import discard_pages
from counterpoint.runtime.optimizer_spec import clip_by_value, scale_grad
from counterpoint.runtime.params.flat_layout import FlatLayout, ParamSlot, is_small
from counterpoint.runtime.params.grad_check import GradCheck, is_dense_matrix
from counterpoint.runtime.params.sparse_grads import RowGrad, SparseGrads, add_rows

MIN_IN_PLACE_BYTES = 2 << 20
"""The size from which writing a matrix's gradient in place saves more than the call of Python that it costs."""


class GradRange(NamedTuple):
    """A range of a flat gradient, and what it is the sum of: tensors of its length, or rows of a table.

    Args:
        start: its first element.
        stop: one past its last.
        parts: tensors to be added up in this order.
        row_grads: rows to be added up, if there are no parts.
        table_offset: where the range begins in its table.
    """

    start: int
    stop: int
    parts: list[Tensor]
    row_grads: Sequence[RowGrad] = ()
    table_offset: int = 0


class GradStorage(Protocol):
    """Where the gradients of one unit's flat parameters are stored, from backward to the update.

    Attributes:
        is_shared: whether the other replicas read the gradients, and the weights, in shared memory.
        params: the parameters by name.
        tables: those whose gradients may be kept as rows.
        names_with_grad: parameters with a gradient from autograd in this step.
        grad_check: checks gradients that are moved here during a backward.
    """

    is_shared: bool
    params: Mapping[str, nn.Parameter]
    tables: Mapping[str, ParamSlot]
    names_with_grad: set[str]
    grad_check: GradCheck

    @property
    def has_shared_rows(self) -> bool:
        """Whether gradients of this step are rows that replicas have published to each other."""
        return False

    def begin_step(self) -> None:
        """Start a step, in which no parameter has a gradient."""

    def target(self, slot: ParamSlot) -> tuple[Tensor, bool]:
        """Return where to write a gradient that bypasses autograd, and whether to add to what is there."""

    def add_rows(self, slot: ParamSlot, row_grad: RowGrad) -> None:
        """Add rows to a table's gradient."""

    def sink_slots(self) -> list[ParamSlot]:
        """Return the parameters whose gradients backward writes to :meth:`target`."""

    def collect(self, slot: ParamSlot) -> None:
        """Move the gradient that autograd has put on a parameter here, if there is any."""
        param = self.params[slot.name]
        grad = param.grad
        if grad is None:
            return
        self.grad_check.check((slot.name,), (grad,))
        param.grad = None
        if slot.name in self.tables and self.keep_as_rows(slot, grad):
            return
        target, has_some = self.target(slot)
        (target.add_ if has_some else target.copy_)(grad.to_dense() if grad.is_sparse else grad)

    def keep_as_rows(self, slot: ParamSlot, grad: Tensor) -> bool:
        """Keep a table's gradient as rows and return true, or return false if it has to be dense."""

    def params_without_grad(self) -> list[str]:
        """Return the parameters without a gradient from autograd in this step, collected or not."""
        if len(self.names_with_grad) == len(self.params):
            return []
        return [name for name, param in self.params.items() if name not in self.names_with_grad and param.grad is None]

    def start_reduce_scatter(self, fabric: Fabric, instruction: Collective, label: str) -> Work:
        """Start to sum the gradients of a group; each member gets its shard of the sum."""

    def finish_reduce_scatter(self, fabric: Fabric, instruction: Collective, label: str) -> None:
        """Store the shard, after the work is complete."""

    def ranges(self, start: int, stop: int, *, as_rows: bool) -> list[GradRange]:
        """Return what the gradient of a range is the sum of; rows of tables may stay rows if ``as_rows``."""

    def optimizer_grad(self, start: int, stop: int) -> Tensor:
        """Return the gradient of a range as an optimizer gets it; sparse if the optimizer expects that."""

    def clear(self) -> None:
        """Drop all gradients."""


class FlatGrads(GradStorage):
    """Gradients in this rank's own memory: a flat one, and rows of tables with sparse gradients.

    Args:
        layout: the position of each.
        params: the parameters by name.
        rows: the gradients of tables with sparse gradients.
        allocate: returns an uninitialized flat gradient.
        grad_check: checks gradients that are moved here during a backward.
    """

    is_shared = False

    def __init__(
        self,
        layout: FlatLayout,
        params: Mapping[str, nn.Parameter],
        rows: SparseGrads,
        allocate: Callable[[], Tensor],
        grad_check: GradCheck | None = None,
    ) -> None:
        self.layout, self.params, self.allocate = layout, params, allocate
        self.grad_check = grad_check or GradCheck()
        self.flat: Tensor | None = None  # (1)
        self.shard: Tensor | None = None  # (2)
        self.shard_start = 0  # its first element
        self.shard_memory: Tensor | None = None  # of (2) in every step, if it stays until the next one
        self.shard_allocator: Callable[[], AbstractContextManager[None]] | None = None  # None if it does not stay
        self.keeps_shard_in_place = (
            False  # whether freeing (1) leaves (2) where it is, and releases the pages around it
        )
        self.rows = rows  # (3)
        self.filled_names: set[str] = set()  # parameters whose slot in the flat gradient is valid
        self.tables = rows.slots
        self.names_with_grad = set()
        self.scale: Tensor | float = 1.0  # of gradients that are narrower than the weights they update
        self.bound: float | None = None  # of their elements

    def begin_step(self) -> None:
        """Start a step, in which no parameter has a gradient."""
        self.names_with_grad.clear()
        self.scale, self.bound = 1.0, None

    def buffer(self) -> Tensor:
        """Return the flat gradient; a new one is uninitialized."""
        if self.flat is None:
            self.filled_names.clear()
            self.flat = self.allocate()
        return self.flat

    def target(self, slot: ParamSlot) -> tuple[Tensor, bool]:
        """Return where to write a gradient that bypasses autograd, and whether to add to what is there."""
        has_some = self.flat is not None and slot.name in self.filled_names
        view = self.buffer()[slot.start : slot.stop].view(slot.shape)
        self.filled_names.add(slot.name)
        self.names_with_grad.add(slot.name)
        return view, has_some

    def add_rows(self, slot: ParamSlot, row_grad: RowGrad) -> None:
        """Add rows to a table's gradient, which is dense here."""
        target, has_some = self.target(slot)
        if not has_some:
            target.zero_()
        add_rows(target.view(-1), 0, [row_grad], 1.0)

    def sink_slots(self) -> list[ParamSlot]:
        """Return the parameters whose gradients backward writes to :meth:`target`."""
        return [
            slot
            for slot in self.layout.slots
            if is_large_matrix(self.params[slot.name]) and slot.name not in self.rows.slots
        ]

    def keep_as_rows(self, slot: ParamSlot, grad: Tensor) -> bool:
        """Keep a table's gradient as rows: it has no place in the flat one."""
        self.rows.add(slot.name, grad)
        self.names_with_grad.add(slot.name)
        return True

    def collect_many(self, slots: Sequence[ParamSlot]) -> None:
        """Do :meth:`collect` for each; small ones are copied together, large ones one by one and freed at once."""
        self.grad_check.check_deferred(slot.name for slot in slots)
        flat, excluded = self.buffer(), self.filled_names.union(self.rows.slots)
        small = [slot for slot in slots if is_small(slot, self.layout) and slot.name not in excluded]
        self.grad_check.check_params({slot.name: self.params[slot.name] for slot in small})
        copy_small_grads(small, self.params, flat, (self.filled_names, self.names_with_grad))
        for slot in slots:
            self.collect(slot)

    def collect_all(self) -> Tensor:
        """Return the flat gradient after collecting all gradients; slots without one are zeroed.

        The slots of tables with sparse gradients are undefined.
        """
        self.collect_many(self.layout.slots)
        flat = self.buffer()
        for slot in self.layout.slots:
            if slot.name not in self.filled_names and slot.name not in self.rows.slots:
                flat[slot.start : slot.stop].zero_()
                self.filled_names.add(slot.name)
        return flat

    def pack(self) -> list[Tensor]:
        """Return the gradient as tensors to be sent; :meth:`add_packed` is its inverse."""
        flat = self.collect_all()
        if not self.rows.slots:
            return [flat]
        ranges = [flat[low:high] for low, high in self.rows.dense_ranges(0, self.layout.num_elements)]
        return [torch.cat(ranges) if ranges else flat[:0], *self.rows.pack()]

    def add_packed(self, tensors: Iterator[Tensor]) -> None:
        """Add a gradient that was sent by another rank; its tensors may be kept as memory."""
        grad = next(tensors)
        if self.rows.slots:
            flat, position = self.collect_all(), 0
            for low, high in self.rows.dense_ranges(0, self.layout.num_elements):
                flat[low:high] += grad[position : position + high - low]
                position += high - low
            self.rows.add_packed(tensors)
        elif self.flat is None:
            self.flat, self.filled_names = grad, set(self.params)
        else:
            self.collect_all().add_(grad)

    def swap(self, other: Tensor | None) -> Tensor:
        """Return the flat gradient, and take another one in its place, or none."""
        self.rows.require_dense()
        flat = self.collect_all()
        self.flat, self.filled_names = other, set() if other is None else set(self.params)
        return flat

    def start_reduce_scatter(self, fabric: Fabric, instruction: Collective, label: str) -> Work:
        """Start to sum the flat gradients of a group; each member gets its shard of the sum."""
        flat = self.collect_all()
        if instruction.codec:
            ranges = self.layout.shard_ranges(len(instruction.group), self.rows.slots)
            codec = find_codec(instruction.codec)
            return start_quantized_reduce_scatter(fabric, label, flat, ranges, instruction.group, codec)
        return self._start_reduce(fabric, instruction, label, flat)

    def start_all_reduce(self, fabric: Fabric, instruction: Collective, label: str) -> Work:
        """Start to sum the shards of a group, or the flat gradients if this rank has no shard."""
        if self.shard is None:
            return self._start_reduce(fabric, instruction, label, self.collect_all())
        return self._start_reduce(fabric, instruction, label, self.shard, self.shard_start)

    def _start_reduce(self, fabric: Fabric, instruction: Collective, label: str, flat: Tensor, low: int = 0) -> Work:
        """Start to reduce a flat gradient that begins at element ``low``, in ranges between tables of (3)."""
        ranges = self.rows.dense_ranges(low, low + len(flat))
        works = [
            self.start_range_reduce(fabric, instruction, label, flat[start - low : stop - low], start)
            for start, stop in ranges
        ]
        return works[0] if len(works) == 1 else CombinedWork(works)

    def gather_rows(self, fabric: Fabric, instruction: Collective, label: str) -> None:
        """Gather the rows of the group's tables with sparse gradients, when the reduction of the rest is complete.

        All members call it together, at the wait of a reduction that was started before: the verifier checks for the
        units of such tables that all members get there.
        """
        if self.rows.slots:
            reduced_already = instruction.op == "all_reduce" and bool(self.rows.reduced)
            self.rows.all_gather(fabric, instruction.group, label, reduced_already=reduced_already)

    def start_range_reduce(self, fabric: Fabric, instruction: Collective, label: str, part: Tensor, start: int) -> Work:
        """Start to reduce a part of the flat gradient that begins at element ``start``, in the reduce dtype.

        An all-reduce of 16 bits is one of a cast, too: a transport's own may send 32 bits.
        """
        group, dtype = instruction.group, self.layout.reduce_dtype or part.dtype
        narrow = part.to(dtype) if dtype in LOW_PRECISION else None  # the part itself, if held in this dtype
        if instruction.op != "reduce_scatter":
            if narrow is None:
                return fabric.all_reduce(label, part, group)
            return start_cast_all_reduce(fabric, label, part, narrow, group)
        stop = start + len(part)
        local_bounds = [min(max(bound, start), stop) - start for bound in self.layout.shard_bounds(len(group))]
        if narrow is None:
            return fabric.reduce_scatter(label, part, local_bounds, group)
        return start_cast_reduce_scatter(fabric, label, part, narrow, local_bounds, group)

    def finish_reduce_scatter(self, fabric: Fabric, instruction: Collective, label: str) -> None:
        """Add this rank's part of the sum to its shard, and gather the rows of tables."""
        self.gather_rows(fabric, instruction, label)
        bounds, position = self.layout.shard_bounds(len(instruction.group)), instruction.group.index(fabric.rank)
        self.accumulate_shard(bounds[position], bounds[position + 1])

    def accumulate_shard(self, start: int, stop: int) -> None:
        """Add a range of the reduced gradient to this rank's shard; the first one becomes the shard, as a view."""
        assert self.flat is not None, "a reduce-scatter needs a gradient"
        reduced = self.flat[start:stop]
        if self.shard is None:
            self.shard, self.shard_start = reduced, start
        else:
            self.shard.add_(reduced)
            if self.keeps_shard_in_place:  # whoever allocates memory may get this again, and keep it
                discard_pages(self.flat.data_ptr(), self.flat.nbytes)
            self.flat = None

    def set_shard(self, start: int, values: Tensor) -> None:
        """Make values, of which the first is element ``start``, this rank's shard of the sum."""
        self.shard, self.shard_start = values, start

    def ranges(self, start: int, stop: int, *, as_rows: bool) -> list[GradRange]:
        """Return the gradient of a range: of the shard, if there is one."""
        flat, low = (self.collect_all(), 0) if self.shard is None else (self.shard, self.shard_start)
        self.rows.add_to(flat, low)
        return [GradRange(start, stop, [self.widen(flat[start - low : stop - low])])]

    def widen(self, part: Tensor) -> Tensor:
        """Return a part of the gradient in the dtype of the weights that it updates, scaled and clipped.

        A gradient in this dtype is returned itself, and was scaled in place; a narrower one would be rounded again.
        """
        if not self.layout.holds_casts:
            return part
        wide = part.to(self.layout.dtype)
        if isinstance(self.scale, Tensor) or self.scale != 1.0:
            scale_grad(wide, self.scale)
        if self.bound is not None:
            clip_by_value(wide, self.bound)
        return wide

    def optimizer_grad(self, start: int, stop: int) -> Tensor:
        """Return the gradient of a range as an optimizer gets it; sparse if the optimizer expects that."""
        sparse = self.rows.sparse_tensor_at(start, stop) if not self.layout.may_split_params else None
        if sparse is not None:
            return sparse
        (grad_range,) = self.ranges(start, stop, as_rows=False)
        return self.layout.as_param_shape(grad_range.parts[0], start, stop)

    def free(self) -> None:
        """Free the gradient except for a shard, which is copied, or stays in place, if it was a view of it."""
        if self.shard is None:
            self.rows.clear()
        elif self.flat is not None:
            if self.keeps_shard_in_place:
                self.shard = free_around(self.flat, self.shard_start, self.shard_start + len(self.shard))
            else:
                self.shard = self.copy_shard(self.shard)
        self.flat = None

    def copy_shard(self, shard: Tensor) -> Tensor:
        """Return a copy of a shard; in the same memory in every step, if it stays until the next one.

        Otherwise shards that stay would lie between the gradients of the other units, which do not, so that these leave
        holes, and a process has more memory than it uses.
        """
        if self.shard_allocator is None:
            return shard.clone()
        if self.shard_memory is None or self.shard_memory.shape != shard.shape:
            with self.shard_allocator():
                self.shard_memory = torch.empty_like(shard)
        return self.shard_memory.copy_(shard)

    def clear(self) -> None:
        """Drop all gradients."""
        self.flat = self.shard = None
        self.scale, self.bound = 1.0, None
        self.rows.clear()
        for param in self.params.values():
            param.grad = None


def free_around(flat: Tensor, start: int, stop: int) -> Tensor:
    """Return a range of a flat tensor in a storage of its own, in the same memory; release the pages around it.

    A copy would need memory while the whole is still there. The address space of the whole stays until the range is
    freed. The caller has the only reference to the whole.

    Args:
        flat: the whole, on the host.
        start: first element of the range.
        stop: one past its last.

    Example:
        >>> flat = torch.arange(4.0)
        >>> part = free_around(flat, 1, 3)
        >>> part, part.untyped_storage().nbytes(), part.data_ptr() == flat[1:].data_ptr()
        (tensor([1., 2.]), 8, True)
    """
    size, address = flat.element_size(), flat.data_ptr()
    first = flat.storage_offset() * size
    storage = flat.untyped_storage()[first + start * size : first + stop * size]
    discard_pages(address, start * size)
    discard_pages(address + stop * size, (len(flat) - stop) * size)
    return torch.empty(0, dtype=flat.dtype).set_(storage, 0, (stop - start,), (1,))


def is_large_matrix(param: nn.Parameter) -> bool:
    """Return whether backward may write a gradient to its memory directly, which saves time if it is large."""
    return param.requires_grad and is_dense_matrix(param, MIN_IN_PLACE_BYTES)


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
        sorted((slot for slot in slots if _is_dense_grad(params[slot.name].grad)), key=attrgetter("start"))
    ):
        target = flat[run[0].start : run[-1].stop]
        grads = [params[slot.name].grad for slot in run]
        torch.cat([gradient.reshape(-1) for gradient in grads if gradient is not None], out=target)
        for slot in run:
            params[slot.name].grad = None
            for names in name_sets:
                names.add(slot.name)


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


class CombinedWork(Work):
    """Several collectives as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for all of them."""
        for work in self._works:
            work.wait()
