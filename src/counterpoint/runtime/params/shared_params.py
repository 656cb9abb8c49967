"""Where replicas of one host show each other rows of gradients: numbers and values in memory that all of them read.

A note for each table says how many rows there are and where they begin. What does not fit is only noted; when all have
met, all see that, get larger memory together, and write there.

What replicas of one host have shown of a gradient, as a sum: ranges of each of them, or rows of tables.

The own memory for the gradient of a table is zeros in the own share, as long as there are only rows: these are added
where they belong when somebody asks for the sum as a tensor, and set to zero again afterwards.

Memory that the replicas of one host have in common: one copy of the weights, and the gradient of each of them.

Every rank computes with the one copy, writes its own gradient where all others can read it, and updates its share of
the weights with what all have written. Nothing is copied from rank to rank: a share of gradients is an announcement
that they are complete, and a join of weights one that they have been updated.

The gradients of small parameters are moved there all at once, when a rank's last one is complete; a large one as soon
as it is complete, while it is still in the cache and before the next one needs memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from counterpoint.fabric.fabric import Fabric, Group
from counterpoint.fabric.local_collective import reduce_in_order
from counterpoint.fabric.shm.segments import discard_shared_pages
from counterpoint.runtime.params.flat_layout import FlatLayout, ParamSlot, is_small
from counterpoint.runtime.params.sparse_grads import RowGrad, add_rows, clear_rows, concat_row_grads, is_table

NO_GRAD, ROW_GRAD, DENSE_GRAD = 0, 1, 2
"""What a replica has for a table: no gradient, one of rows, or one of the table's size."""


class RowGradHeader(NamedTuple):
    """What a replica says of its gradient of one table; offsets count from where its own numbers begin."""

    state: int
    is_sparse: int
    num_rows: int
    has_value_index: int
    rows_per_value: int
    first_index: int
    num_values: int
    first_value: int


HEADER_FIELDS = len(RowGradHeader._fields)
PREFIX_FIELDS = 2  # before the notes: how many numbers, and how many elements of values


def header_elements(num_tables: int) -> int:
    """Return how many numbers the notes of one replica are, so that the next ones begin with a cache line."""
    return -(-(PREFIX_FIELDS + HEADER_FIELDS * num_tables) // 8) * 8


class SparseGradExchange:
    """The rows of all replicas, as one of them sees them.

    Args:
        notes: the same memory on all members: one row of :func:`header_elements` for each.
        tables: those of which there may be rows.
        dtype: of their values.
        place: the own one among the replicas.
    """

    def __init__(self, headers: Tensor, tables: Sequence[ParamSlot], dtype: torch.dtype, replica: int) -> None:
        self.headers = headers
        self.tables = {slot.name: slot for slot in tables}
        self.replica = replica
        self.indices = torch.empty(len(headers), 0, dtype=torch.int64)
        self.values = torch.empty(len(headers), 0, dtype=dtype)
        self.local: dict[str, list[RowGrad]] = {}
        self.published: dict[str, list[tuple[int, RowGrad | None]]] = {}
        self._unpublished: list[tuple[str, RowGrad]] = []

    def begin_step(self) -> None:
        """Start a step: nobody has shown anything."""
        self.local.clear()
        self.published.clear()
        self._unpublished.clear()

    def add(self, name: str, row_grad: RowGrad) -> None:
        """The own gradient of a table has these rows, too."""
        self.local.setdefault(name, []).append(row_grad)

    def publish(self, dense: Collection[str]) -> None:
        """Write what this replica has, for the others to see after they have met.

        Args:
            dense: the tables of which there is a gradient of the table's size, which has its rows in it.
        """
        self._unpublished = [
            (name, concat_row_grads(pieces)) for name, pieces in self.local.items() if name not in dense
        ]
        if not self.tables:
            return
        own, notes = dict(self._unpublished), []
        first_number = first_value = 0
        for name in self.tables:
            piece = own.get(name)
            if piece is None:
                notes.append(RowGradHeader(DENSE_GRAD if name in dense else NO_GRAD, 0, 0, 0, 1, 0, 0, 0))
                continue
            count, has_places = len(piece.rows), piece.value_index is not None
            notes.append(
                RowGradHeader(
                    ROW_GRAD,
                    piece.is_sparse,
                    count,
                    has_places,
                    piece.rows_per_value,
                    first_number,
                    len(piece.values),
                    first_value,
                )
            )
            first_number += count * (1 + has_places)
            first_value += piece.values.numel()
        flat = [first_number, first_value, *(number for note in notes for number in note)]
        self.headers[self.replica, : len(flat)] = torch.tensor(flat)
        if first_number <= self.indices.shape[1] and first_value <= self.values.shape[1]:
            self._write()

    def _write(self) -> None:
        numbers, values = self.indices[self.replica], self.values[self.replica]
        first_number = first_value = 0
        for _, piece in self._unpublished:
            for column in (piece.rows, piece.value_index):
                if column is not None:
                    numbers[first_number : first_number + len(column)] = column
                    first_number += len(column)
            count = piece.values.numel()
            values[first_value : first_value + count] = piece.values.reshape(-1)
            first_value += count

    def read_all(self, fabric: Fabric, group: Group, label: str) -> None:
        """Read what all have shown; where it does not fit, get larger memory first. All members come here together."""
        found = self.headers.tolist()
        most_numbers, most_values = (max(row[at] for row in found) for at in range(PREFIX_FIELDS))
        if most_numbers > self.indices.shape[1] or most_values > self.values.shape[1]:
            self.indices = self._grow(self.indices, most_numbers, fabric, group, f"rows of {label}")
            self.values = self._grow(self.values, most_values, fabric, group, f"values of {label}")
            self._write()
            fabric.barrier_async(f"rows of {label}", group).wait()
        for index, (name, slot) in enumerate(self.tables.items()):
            start = PREFIX_FIELDS + index * HEADER_FIELDS
            notes = [RowGradHeader(*row[start : start + HEADER_FIELDS]) for row in found]
            self.published[name] = [(note.state, self._read_row_grad(at, note, slot)) for at, note in enumerate(notes)]

    def _grow(self, old: Tensor, needed: int, fabric: Fabric, group: Group, label: str) -> Tensor:
        if needed <= old.shape[1]:
            return old
        capacity = -(-needed * 3 // 2 // 64) * 64
        memory = fabric.shared_zeros(label, len(group) * capacity, old.dtype, group)
        assert memory is not None, "these ranks have memory in common"
        return memory.view(len(group), capacity)

    def _read_row_grad(self, replica: int, header: RowGradHeader, slot: ParamSlot) -> RowGrad | None:
        if header.state != ROW_GRAD:
            return None
        numbers, width = self.indices[replica][header.first_index :], slot.shape[1]
        values = self.values[replica][header.first_value : header.first_value + header.num_values * width]
        return RowGrad(
            numbers[: header.num_rows],
            values.view(header.num_values, width),
            numbers[header.num_rows : 2 * header.num_rows] if header.has_value_index else None,
            header.rows_per_value,
            bool(header.is_sparse),
        )

    def row_grads(self, name: str) -> list[RowGrad]:
        """Return the rows of a table that replicas have shown, in their order."""
        return [piece for _, piece in self.published.get(name, []) if piece is not None]

    def dense_replicas(self, name: str) -> list[int]:
        """Return the replicas that have a gradient of the table's size."""
        return [place for place, (state, _) in enumerate(self.published.get(name, [])) if state == DENSE_GRAD]


class GradRange(NamedTuple):
    """A range of an arena, and what adds up to its gradient: tensors of its length, or rows of a table.

    Args:
        start: its first element.
        stop: one past its last.
        parts: to be added up in this order.
        pieces: rows to be added up, where there are no parts.
        low: where the range begins in its table.
    """

    start: int
    stop: int
    parts: list[Tensor]
    row_grads: Sequence[RowGrad] = ()
    table_offset: int = 0


class SharedEmbeddingGrads:
    """The gradients of all replicas, shown in memory in common.

    Args:
        rows: the flat gradient of each replica; that of a table is up to date where the board says so.
        own: this replica's.
        board: where rows of tables are shown.
    """

    def __init__(self, replica_grads: Sequence[Tensor], local_grad: Tensor, exchange: SparseGradExchange) -> None:
        self.replica_grads = replica_grads
        self.local_grad = local_grad
        self.exchange = exchange
        self.dirty: set[str] = set()  # the tables whose own memory may hold something
        self._added_ranges: dict[str, tuple[int, int]] = {}

    def begin_step(self) -> None:
        """Start a step."""
        self.clear_added_rows()
        self.exchange.begin_step()

    def clear_added_rows(self) -> None:
        """What rows have been added are zeros again."""
        for name, (start, stop) in self._added_ranges.items():
            low = start - self.exchange.tables[name].start
            clear_rows(self.local_grad[start:stop], low, self.exchange.row_grads(name))
        self._added_ranges.clear()

    def mark_all_dirty(self) -> None:
        """Something else is going to be written to the own memory."""
        self.dirty.update(self.exchange.tables)
        self._added_ranges.clear()

    def merge_rows_into_dense(self, dense: Collection[str]) -> None:
        """Add the own rows of tables of which there is a gradient of the table's size, too, to that."""
        for name in [name for name in self.exchange.local if name in dense]:
            slot = self.exchange.tables[name]
            add_rows(self.local_grad[slot.start : slot.stop], 0, self.exchange.local.pop(name), 1.0)
            self.dirty.add(name)

    def grad_ranges(self, start: int, stop: int, *, as_rows: bool) -> Iterator[GradRange]:
        """Yield what adds up to a range of the own share, in order.

        Args:
            start: its first element.
            stop: one past its last.
            as_rows: whether rows may stay rows; else they are added up.
        """
        begun = start
        for slot in self.exchange.tables.values():  # in the order of the layout
            low, high = max(start, slot.start), min(stop, slot.stop)
            if low >= high or len(self.exchange.dense_replicas(slot.name)) == len(self.replica_grads):
                continue
            if begun < low:
                yield self._dense_range(begun, low)
            begun = high
            yield self._table_range(slot, low, high, as_rows=as_rows)
        if begun < stop:
            yield self._dense_range(begun, stop)

    def _dense_range(self, start: int, stop: int) -> GradRange:
        return GradRange(start, stop, [row[start:stop] for row in self.replica_grads])

    def _table_range(self, slot: ParamSlot, start: int, stop: int, *, as_rows: bool) -> GradRange:
        pieces, low = self.exchange.row_grads(slot.name), start - slot.start
        dense = [self.replica_grads[place][start:stop] for place in self.exchange.dense_replicas(slot.name)]
        mine = self.local_grad[start:stop]
        if not dense and as_rows:
            return GradRange(start, stop, [], pieces, low)
        if dense and not pieces:
            return GradRange(start, stop, dense)
        if dense:
            mine.copy_(reduce_in_order(dense, "sum") if len(dense) > 1 else dense[0])
            self.dirty.add(slot.name)
        else:
            if slot.name in self.dirty:
                mine.zero_()
                self.dirty.discard(slot.name)
            self._added_ranges[slot.name] = (start, stop)
        add_rows(mine, low, pieces, 1.0)
        return GradRange(start, stop, [mine])

    def as_row_grads(self) -> dict[str, list[RowGrad]]:
        """Return what has been shown of every table as rows, that of a gradient of the table's size, too."""
        found = {}
        for name, slot in self.exchange.tables.items():
            dense = [self.replica_grads[place][slot.start : slot.stop] for place in self.exchange.dense_replicas(name)]
            whole = [RowGrad(torch.arange(slot.shape[0]), gradient.view(slot.shape)) for gradient in dense]
            found[name] = [*self.exchange.row_grads(name), *whole]
        return found


CACHE_LINE_BYTES = 64


def table_slots(layout: FlatLayout, sparse: Collection[str]) -> list[ParamSlot]:
    """Return the parameters whose gradients may be shown as rows: those that are large, or sparse as the model says."""
    return [
        slot for slot in layout.slots if is_table(slot.shape) and (slot.name in sparse or not is_small(slot, layout))
    ]


def aligned_elements(num_elements: int, dtype: torch.dtype) -> int:
    """Return how long a row for so many elements is, so that the next one begins at the start of a cache line."""
    step = CACHE_LINE_BYTES // dtype.itemsize
    return -(-num_elements // step) * step


class SharedParams:
    """One arena's memory in common, as one rank sees it.

    Args:
        weights: of all replicas; flat.
        gradients: a row for each replica's gradient.
        layout: what lies in a row.
        place: which replica's is the own one.
        board: where they show rows of gradients.
    """

    def __init__(
        self, weights: Tensor, gradients: Tensor, layout: FlatLayout, replica: int, exchange: SparseGradExchange
    ) -> None:
        self.weights = weights
        self.replica_grads = list(gradients[:, : layout.num_elements])
        self.local_grad = self.replica_grads[replica]
        self.embedding_grads = SharedEmbeddingGrads(self.replica_grads, self.local_grad, exchange)
        self.is_published = False
        self.large_slots: list[ParamSlot] = []
        self._small_params: list[tuple[nn.Parameter, Tensor]] = []
        self.small_names: frozenset[str] = frozenset()
        self._hooks: list[RemovableHandle] = []

    def install_hooks(
        self, layout: FlatLayout, params: Mapping[str, nn.Parameter], collect_grad: Callable[[ParamSlot], None]
    ) -> None:
        """Large gradients come here by ``move`` as soon as they are complete, small ones by :meth:`gather`."""
        for slot in layout.slots:
            if is_small(slot, layout):
                self._small_params.append((params[slot.name], self.local_grad[slot.start : slot.stop].view(slot.shape)))
            else:
                self.large_slots.append(slot)
                param: Any = params[slot.name]  # torch's stubs leave out the type of this method
                self._hooks.append(
                    param.register_post_accumulate_grad_hook(partial(_collect_in_hook, collect_grad, slot))
                )
        large = {slot.name for slot in self.large_slots}
        self.small_names = frozenset(slot.name for slot in layout.slots if slot.name not in large)

    def collect_small_grads(self) -> frozenset[str]:
        """Move all small gradients here at once and return their names; none where one is missing or sparse."""
        fresh = [param.grad for param, _ in self._small_params]
        if any(grad is None or grad.is_sparse for grad in fresh):
            return frozenset()
        torch._foreach_copy_([place for _, place in self._small_params], fresh)  # type: ignore[arg-type]
        for param, _ in self._small_params:
            param.grad = None
        return self.small_names

    def drop_grad_pages(self) -> None:
        """The own row takes no memory any more; nobody reads it after the updates of a step."""
        discard_shared_pages(self.local_grad.data_ptr(), self.local_grad.numel() * self.local_grad.element_size())

    def detach(self) -> None:
        """Gradients stay on the parameters again."""
        for hook in self._hooks:
            hook.remove()


def _collect_in_hook(collect_grad: Callable[[ParamSlot], None], slot: ParamSlot, _: Tensor) -> None:
    collect_grad(slot)
