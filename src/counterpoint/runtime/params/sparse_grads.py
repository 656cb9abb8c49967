"""Gradients of embedding tables as rows: the rows that were looked up, and what is added to each.

A batch looks up some thousands of a table's million rows, so its dense gradient is nearly all zeros. As rows, the
gradient is as large as what was looked up, and is made, exchanged and added up at that size.

Which tables have sparse gradients is known from the model, so all ranks exchange rows of the same tables in the same
order, whether or not they looked up any in this step. Everything else is exchanged as ranges of the flat gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ctypes import byref
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from counterpoint.errors import DataError
from counterpoint.fabric.fabric import Fabric, Group
from counterpoint.fabric.shm.native import DTYPES, SparseRowsArgs, SparseRowsPart, native
from counterpoint.runtime.params.flat_layout import FlatLayout, ParamSlot


class SparseGrads:
    """Sparse gradients of one unit's tables: this rank's own rows, and rows gathered from other ranks.

    Args:
        layout: of the unit's flat parameters.
        names: the parameters of the model with sparse gradients.
        device: of the gradients.
    """

    def __init__(self, layout: FlatLayout, names: frozenset[str], device: torch.device) -> None:
        self.dtype, self.device = layout.dtype, device
        self.slots = {slot.name: slot for slot in layout.slots if slot.name in names and is_table(slot.shape)}
        self.local: RowGradsByName = {}  # not gathered yet
        self.reduced: RowGradsByName = {}
        self.is_in_flat_grad = False  # whether add_to has added them
        self._sparse_sums: dict[str, Tensor] = {}

    def require_dense(self) -> None:
        """Raise unless all gradients are dense, so that they can be delayed.

        Raises:
            DataError: some are sparse.
        """
        if self.slots:
            raise DataError(
                f"the gradient of {next(iter(self.slots))} is sparse and cannot be delayed by a step; build the "
                "embedding with sparse=False, or drop staleness=1 from the plan"
            )

    def clear(self) -> None:
        """Drop all rows."""
        self.local.clear()
        self.reduced.clear()
        self._sparse_sums.clear()
        self.is_in_flat_grad = False

    def add(self, name: str, grad: Tensor) -> None:
        """Add a table's gradient from autograd, sparse or dense."""
        if grad.is_sparse:
            row_grad = row_grad_from_sparse(grad)
        else:
            row_grad = RowGrad(torch.arange(len(grad), device=grad.device), grad.contiguous())
        self.local.setdefault(name, []).append(row_grad)

    def dense_ranges(self, low: int, high: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges from ``low`` to ``high`` outside of all tables with sparse gradients."""
        for slot in self.slots.values():
            if low < min(slot.start, high):
                yield low, min(slot.start, high)
            low = max(low, slot.stop)
        if low < high:
            yield low, high

    def all_gather(self, fabric: Fabric, group: Group, label: str, *, reduced_already: bool) -> None:
        """Gather the rows of all members; all of them call it.

        Args:
            fabric: this rank's connection to the others.
            group: the members.
            label: whose gradients these are.
            reduced_already: whether the rows are those of an earlier gather, now gathered over more members.
        """
        source = self.reduced if reduced_already else self.local
        for name, slot in self.slots.items():
            rows, values = self._flatten(source.pop(name, []), slot.shape)
            counts = fabric.gather_values(f"{label} rows of {name}", len(rows), group)
            bounds = [0]
            for count in counts:
                assert isinstance(count, int), "every member sent its number of rows"
                bounds.append(bounds[-1] + count)
            width = slot.shape[1]
            rows = all_gather_ranges(fabric, rows, bounds, group, f"{label} rows of {name}")
            flat = [bound * width for bound in bounds]
            values = all_gather_ranges(fabric, values.reshape(-1), flat, group, f"{label} values of {name}").view(
                -1, width
            )
            self.reduced.setdefault(name, []).append(RowGrad(rows, values, is_sparse=True))

    def _flatten(self, row_grads: Sequence[RowGrad], shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        if not row_grads:
            return (
                torch.empty(0, dtype=torch.int64, device=self.device),
                torch.empty(0, shape[1], dtype=self.dtype, device=self.device),
            )
        return concat_row_grads(row_grads).expand()

    @property
    def num_tensors(self) -> int:
        """Number of tensors in :meth:`pack`."""
        return 2 * len(self.slots)

    def pack(self) -> list[Tensor]:
        """Return the rows as tensors to be sent; :meth:`add_packed` is its inverse."""
        return [
            tensor for name, slot in self.slots.items() for tensor in self._flatten(self.row_grads(name), slot.shape)
        ]

    def add_packed(self, tensors: Iterator[Tensor]) -> None:
        """Add rows that another rank has packed."""
        for name in self.slots:
            rows, values = next(tensors), next(tensors)
            if len(rows):
                self.local.setdefault(name, []).append(RowGrad(rows, values, is_sparse=True))

    def add_to(self, flat: Tensor, low: int) -> None:
        """Add the tables' gradients to a flat gradient that begins at element ``low``; only once per step."""
        if self.is_in_flat_grad:
            return
        self.is_in_flat_grad = True
        for name, slot in self.slots.items():
            start, stop = max(slot.start, low), min(slot.stop, low + len(flat))
            if start < stop:
                view = flat[start - low : stop - low].zero_()
                add_rows(view, start - slot.start, self.row_grads(name), 1.0)

    def row_grads(self, name: str) -> list[RowGrad]:
        """Return all row gradients of a table."""
        return [*self.reduced.get(name, []), *self.local.get(name, [])]

    def sparse_tensor_at(self, start: int, stop: int) -> Tensor | None:
        """Return the gradient of the table at a range as a sparse tensor; None if it has none, or a dense one."""
        slot = next((slot for slot in self.slots.values() if (slot.start, slot.stop) == (start, stop)), None)
        return None if slot is None else cached_sparse_sum(self._sparse_sums, slot, self.row_grads(slot.name))


@dataclass(frozen=True, slots=True)
class RowGrad:
    """Values to be added to some rows of a table.

    Args:
        rows: row indices; they may repeat, and negative ones are ignored.
        values: ``(num_values, width)``.
        value_index: for each row the index of its value; None if value ``i // rows_per_value`` belongs to row ``i``.
        rows_per_value: consecutive rows that get the same value, if there is no ``value_index``.
        is_sparse: whether the model asked for a sparse gradient.
    """

    rows: Tensor
    values: Tensor
    value_index: Tensor | None = None
    rows_per_value: int = 1
    is_sparse: bool = False

    def expand_value_index(self) -> Tensor:
        """Return for each row the index of its value."""
        if self.value_index is not None:
            return self.value_index
        return torch.arange(len(self.rows), device=self.rows.device) // self.rows_per_value

    def expand(self) -> tuple[Tensor, Tensor]:
        """Return the rows that are not ignored, and one value for each."""
        is_used = self.rows >= 0
        return self.rows[is_used], self.values[self.expand_value_index()[is_used]]


RowGradsByName: TypeAlias = dict[str, list[RowGrad]]


def row_grad_from_sparse(gradient: Tensor) -> RowGrad:
    """Return a sparse gradient of a table as rows.

    Example:
        >>> gradient = torch.sparse_coo_tensor([[2, 0]], [[1.0, 2.0], [3.0, 4.0]], (4, 2), check_invariants=True)
        >>> row_grad_from_sparse(gradient).rows.tolist()
        [2, 0]
    """
    return RowGrad(gradient._indices()[0].contiguous(), gradient._values().contiguous(), is_sparse=True)  # noqa: SLF001


def is_table(shape: Sequence[int]) -> bool:
    """Return whether a parameter of this shape has rows."""
    return len(shape) == 2 and shape[1] > 0


def concat_row_grads(row_grads: Sequence[RowGrad]) -> RowGrad:
    """Concatenate row gradients, in their order."""
    if len(row_grads) == 1:
        return row_grads[0]
    starts = [0]
    for row_grad in row_grads:
        starts.append(starts[-1] + len(row_grad.values))
    return RowGrad(
        torch.cat([row_grad.rows for row_grad in row_grads]),
        torch.cat([row_grad.values for row_grad in row_grads]),
        torch.cat([row_grad.expand_value_index() + start for row_grad, start in zip(row_grads, starts, strict=False)]),
        is_sparse=all(row_grad.is_sparse for row_grad in row_grads),
    )


def add_rows(into: Tensor, low: int, row_grads: Sequence[RowGrad], factor: float) -> None:
    """Add values times a factor to rows of a table, in the order of the row gradients.

    Args:
        into: the table's elements from ``low``, flat; rows outside are ignored.
        low: the first element.
        row_grads: what is added.
        factor: what values are multiplied with.
    """
    if not _call_native(into, low, row_grads, factor, is_clearing=False):
        for row_grad in row_grads:
            positions, values = _elements_of(into, low, row_grad)
            into.index_add_(0, positions, values, alpha=factor)


def clear_rows(into: Tensor, low: int, row_grads: Sequence[RowGrad]) -> None:
    """Zero the rows that row gradients name; see :func:`add_rows`."""
    if not _call_native(into, low, row_grads, 0.0, is_clearing=True):
        for row_grad in row_grads:
            into[_elements_of(into, low, row_grad)[0]] = 0


def coalesce_row_grads(row_grads: Sequence[RowGrad], shape: tuple[int, ...]) -> Tensor:
    """Return the sum of one or more row gradients as a sparse tensor in which every row occurs once."""
    expanded = [row_grad.expand() for row_grad in row_grads]
    rows = torch.cat([rows for rows, _ in expanded])
    values = torch.cat([values for _, values in expanded])
    return torch.sparse_coo_tensor(rows[None], values, shape, check_invariants=False).coalesce()


def _call_native(into: Tensor, low: int, row_grads: Sequence[RowGrad], factor: float, *, is_clearing: bool) -> bool:
    library = native().library
    if library is None or into.dtype not in {torch.float32, torch.float64} or not into.is_cpu:
        return False
    if not row_grads or not into.numel():
        return True
    parts = (SparseRowsPart * len(row_grads))()
    for part, row_grad in zip(parts, row_grads, strict=True):
        part.rows, part.values, part.count = row_grad.rows.data_ptr(), row_grad.values.data_ptr(), len(row_grad.rows)
        part.at, part.each = (
            None if row_grad.value_index is None else row_grad.value_index.data_ptr(),
            row_grad.rows_per_value,
        )
    args = SparseRowsArgs(
        dtype=DTYPES[into.dtype],
        num_parts=len(row_grads),
        is_clearing=int(is_clearing),
        parts=parts,
        into=into.data_ptr(),
        width=row_grads[0].values.shape[1],
        low=low,
        high=low + into.numel(),
        factor=factor,
    )
    library.cp_add_rows(byref(args))
    return True


def _elements_of(into: Tensor, low: int, row_grad: RowGrad) -> tuple[Tensor, Tensor]:
    """Return the positions in ``into`` that a row gradient adds to, and the values."""
    rows, values = row_grad.expand()
    width = row_grad.values.shape[1]
    positions = rows[:, None] * width + torch.arange(width, device=rows.device) - low
    inside = (positions >= 0) & (positions < into.numel())
    return positions[inside], values[inside]


def cached_sparse_sum(cache: dict[str, Tensor], slot: ParamSlot, row_grads: Sequence[RowGrad]) -> Tensor | None:
    """Return the sum of a table's row gradients as a sparse tensor; None if there are none, or not all are sparse.

    It is the same tensor until the cache is cleared, so that changes such as clipping reach the update.
    """
    if not row_grads or not all(row_grad.is_sparse for row_grad in row_grads):
        return None
    if slot.name not in cache:
        cache[slot.name] = coalesce_row_grads(row_grads, slot.shape)
    return cache[slot.name]


def all_gather_ranges(fabric: Fabric, local: Tensor, bounds: Sequence[int], group: Group, label: str) -> Tensor:
    """Return the tensors of all members concatenated; ``bounds`` are where each of them begins and ends."""
    gathered, position = local.new_empty(bounds[-1]), group.index(fabric.rank)
    gathered[bounds[position] : bounds[position + 1]] = local
    if bounds[-1]:
        fabric.all_gather(label, gathered, bounds, group).wait()
    return gathered
