r"""Parameters in shared memory: the replicas of one host have one copy of the weights, and read each other's gradients.

Every rank computes with the one copy, writes its gradient where all others can read it, and updates its shard of the
weights with the sum of all gradients. A reduce-scatter is then only a barrier after which the gradients are complete,
and an all-gather one after which the weights are updated::

    rank 0   weights  (shared)        rank 1
        |    +-----------------+        |
        |--> | shard 0 | shard 1| <-----|        each updates its own shard
             +-----------------+
      grad 0 [................] \  read by all   sum over replicas in
      grad 1 [................] /                 the order of ranks

Gradients of small parameters are copied to shared memory together, when a rank's last one is complete; a large one as
soon as it is complete, while it is still in the cache and before the next one needs memory.

Gradients of embedding tables may stay rows (:class:`SparseGradExchange`). A header for each table says how many rows
there are and where they begin. If they do not fit into the shared memory, the header says so, and after the barrier all
replicas get larger memory together and write their rows there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from counterpoint.fabric.fabric import Fabric, Group, Work
from counterpoint.fabric.reductions import reduce_in_order
from counterpoint.fabric.shm.tensor_addresses import Counts, make_counts
from counterpoint.program.instruction import Collective
from counterpoint.rpc.segments import discard_shared_pages
from counterpoint.runtime.params.flat_grads import GradRange, GradStorage, is_large_matrix
from counterpoint.runtime.params.flat_layout import FlatLayout, ParamSlot, is_small
from counterpoint.runtime.params.grad_check import GradCheck
from counterpoint.runtime.params.sparse_grads import (
    RowGrad,
    add_rows,
    cached_sparse_sum,
    clear_rows,
    concat_row_grads,
    is_table,
    row_grad_from_sparse,
)

NO_GRAD, ROW_GRAD, DENSE_GRAD = 0, 1, 2
"""State of a replica's gradient of one table."""

CACHE_LINE_BYTES = 64


def aligned_elements(num_elements: int, dtype: torch.dtype) -> int:
    """Return the smallest length of at least ``num_elements`` that ends at a cache line."""
    step = CACHE_LINE_BYTES // dtype.itemsize
    return -(-num_elements // step) * step


class SharedGrads(GradStorage):
    """Gradients of a unit in shared memory: each replica writes its own and updates its shard with the sum of all.

    Args:
        gradients: one row for each replica.
        layout: of the flat parameters.
        params: the rank's parameters by name.
        exchange: where replicas publish row gradients.
        grad_check: checks gradients that are moved here during a backward.
    """

    is_shared = True

    def __init__(
        self,
        gradients: Tensor,
        layout: FlatLayout,
        params: Mapping[str, nn.Parameter],
        exchange: SparseGradExchange,
        grad_check: GradCheck,
    ) -> None:
        self.layout, self.params, self.exchange, self.grad_check = layout, params, exchange, grad_check
        self.replica_grads = list(gradients[:, : layout.num_elements])
        self.local_grad = self.replica_grads[exchange.replica]
        self.embedding_grads = SharedEmbeddingGrads(self.replica_grads, self.local_grad, exchange)
        self.shard: Tensor | None = None  # the sum of this rank's shard, if a caller has asked for it as a tensor
        self.shard_start, self.shard_stop = layout.shard_bounds(len(gradients))[exchange.replica :][:2]
        self.filled_names: set[str] = set()  # parameters whose slot in the own gradient is valid
        self.tables = exchange.tables
        self.names_with_grad = set()
        self._sparse_sums: dict[str, Tensor] = {}
        self._large_slots = [slot for slot in layout.slots if not is_small(slot, layout)]
        small_slots = [slot for slot in layout.slots if is_small(slot, layout)]
        self._small_params = {slot.name: params[slot.name] for slot in small_slots}
        self._small_names = frozenset(self._small_params)
        self._small_starts = {slot.name: slot.start for slot in small_slots}
        self._small_targets = [self.local_grad[slot.start : slot.stop].view(slot.shape) for slot in small_slots]
        self._collected_starts: tuple[Mapping[str, nn.Parameter], Counts | None] = ({}, None)  # of the last step
        self._hooks = [
            _register_hook(params[slot.name], SharedGradHook(self.collect, slot)) for slot in self._large_slots
        ]

    @property
    def has_shared_rows(self) -> bool:
        """Whether gradients of this step are rows that replicas have published to each other."""
        return self.exchange.has_rows

    def detach(self) -> None:
        """Remove the hooks, so that gradients stay on the parameters."""
        for hook in self._hooks:
            hook.remove()

    def begin_step(self) -> None:
        """Start a step, in which no parameter has a gradient."""
        self.names_with_grad.clear()
        self.embedding_grads.begin_step()

    def target(self, slot: ParamSlot) -> tuple[Tensor, bool]:
        """Return where to write a gradient that bypasses autograd, and whether to add to what is there."""
        has_some = slot.name in self.filled_names
        for names in (self.filled_names, self.names_with_grad, self.embedding_grads.dirty):
            names.add(slot.name)
        return self.local_grad[slot.start : slot.stop].view(slot.shape), has_some

    def add_rows(self, slot: ParamSlot, row_grad: RowGrad) -> None:
        """Add rows to a table's gradient, to be published as rows."""
        self.exchange.add(slot.name, row_grad)
        self.names_with_grad.add(slot.name)

    def sink_slots(self) -> list[ParamSlot]:
        """Return the parameters whose gradients backward writes to :meth:`target`: large matrices, and tables."""
        return [
            slot for slot in self._large_slots if slot.name in self.tables or is_large_matrix(self.params[slot.name])
        ]

    def keep_as_rows(self, slot: ParamSlot, grad: Tensor) -> bool:
        """Keep a sparse gradient as rows; a dense one stays dense."""
        if grad.is_sparse:
            self.add_rows(slot, row_grad_from_sparse(grad))
        return grad.is_sparse

    def collect_all(self) -> None:
        """Move all gradients on parameters here: small ones in one call, unless one is missing, sparse or not new."""
        self.grad_check.check_deferred(self.params)
        slots: Sequence[ParamSlot] = self.layout.slots
        if self.filled_names.isdisjoint(self._small_names) and self._copy_small_grads():
            for param in self._small_params.values():
                param.grad = None
            for names in (self.filled_names, self.names_with_grad, self.embedding_grads.dirty):
                names.update(self._small_names)
            slots = self._large_slots
        for slot in slots:
            self.collect(slot)

    def _copy_small_grads(self) -> bool:
        """Copy all small gradients together; return False if one is missing or sparse, and copy none."""
        collected = self.grad_check.collected
        starts = None if collected is None else self._find_starts(collected.group.params)
        if collected is not None and starts is not None:
            collected.copy_to(self.local_grad, starts)
            self.grad_check.drop_collected()  # whose memory the next step needs
            return True
        grads = [param.grad for param in self._small_params.values()]
        if not grads or any(grad is None or grad.is_sparse for grad in grads):
            return False
        torch._foreach_copy_(self._small_targets, grads)  # type: ignore[arg-type]
        return True

    def _find_starts(self, params: Mapping[str, nn.Parameter]) -> Counts | None:
        """Return where the gradients of parameters start here; None unless they are the small ones."""
        if self._collected_starts[0] is not params:
            is_same = params.keys() == self._small_params.keys() and all(
                params[name] is param for name, param in self._small_params.items()
            )
            self._collected_starts = (
                params,
                make_counts(self._small_starts[name] for name in params) if is_same else None,
            )
        return self._collected_starts[1]

    def start_reduce_scatter(self, fabric: Fabric, instruction: Collective, label: str) -> Work:
        """Complete the own gradient, for the others to read after a barrier."""
        self.collect_all()
        for slot in self.layout.slots if len(self.filled_names) < len(self.params) else ():
            if slot.name not in self.filled_names and slot.name not in self.exchange.tables:
                self.local_grad[slot.start : slot.stop].zero_()
                self.filled_names.add(slot.name)
        self.embedding_grads.merge_rows_into_dense(self.filled_names)
        self.exchange.publish(self.filled_names)
        return fabric.barrier_async(label, instruction.group)

    def finish_reduce_scatter(self, fabric: Fabric, instruction: Collective, label: str) -> None:
        """Read the other replicas' rows; from now on their gradients can be summed where they are needed."""
        if self.exchange.tables:
            self.exchange.read_all(fabric, instruction.group, label)

    def ranges(self, start: int, stop: int, *, as_rows: bool) -> list[GradRange]:
        """Return what the gradient of a range is the sum of: each replica's gradient, or the sum if it exists."""
        if self.shard is None:
            return list(self.embedding_grads.grad_ranges(start, stop, as_rows=as_rows))
        return [GradRange(start, stop, [self.shard[start - self.shard_start : stop - self.shard_start]])]

    def optimizer_grad(self, start: int, stop: int) -> Tensor:
        """Return the gradient of a range as an optimizer gets it; sparse if the optimizer expects that."""
        if not self.layout.may_split_params:
            for slot in self.exchange.tables.values():
                if (slot.start, slot.stop) == (start, stop) and not self.exchange.dense_replicas(slot.name):
                    sparse = cached_sparse_sum(self._sparse_sums, slot, self.exchange.row_grads(slot.name))
                    if sparse is not None:
                        return sparse
        self.reduce_shard()
        (grad_range,) = self.ranges(start, stop, as_rows=False)
        return self.layout.as_param_shape(grad_range.parts[0], start, stop)

    def reduce_shard(self) -> Tensor:
        """Sum this rank's shard of all replicas' gradients into its own, and return it."""
        if self.shard is not None:
            return self.shard
        for start, stop, parts, *_ in self.embedding_grads.grad_ranges(
            self.shard_start, self.shard_stop, as_rows=False
        ):
            local, total = self.local_grad[start:stop], reduce_in_order(parts, "sum") if len(parts) > 1 else parts[0]
            if total.data_ptr() != local.data_ptr():
                local.copy_(total)
        self.shard = self.local_grad[self.shard_start : self.shard_stop]
        return self.shard

    def clear(self) -> None:
        """Drop all gradients."""
        if len(self.filled_names) < len(self.params):  # else all gradients were moved away from the parameters
            for param in self.params.values():
                param.grad = None
        self.shard = None
        self.filled_names.clear()
        self._sparse_sums.clear()
        self.embedding_grads.clear_added_rows()

    def drop_grad_pages(self) -> None:
        """Free the memory of the own gradient; nobody reads it after the updates of a step."""
        discard_shared_pages(self.local_grad.data_ptr(), self.local_grad.numel() * self.local_grad.element_size())


@dataclass(frozen=True, slots=True)
class SharedGradHook:
    """A hook that moves the gradient of a parameter to shared memory; a rank's own, not one of the user's.

    Args:
        collect: moves it.
        slot: of the parameter.
    """

    collect: Callable[[ParamSlot], None]
    slot: ParamSlot

    def __call__(self, param: Tensor) -> None:
        """Move the gradient that has been accumulated."""
        del param
        self.collect(self.slot)


def _register_hook(param: Any, hook: Callable[[Tensor], None]) -> RemovableHandle:  # noqa: ANN401 - torch's stubs leave out this method
    handle: RemovableHandle = param.register_post_accumulate_grad_hook(hook)
    return handle


class SharedEmbeddingGrads:
    """Gradients of all replicas in shared memory, with tables either dense or as rows.

    This replica's shared buffer is zero at tables of which only rows exist. The rows are added there if a caller asks
    for the sum as a tensor, and zeroed again afterwards.

    Args:
        replica_grads: the flat gradient of each replica; valid at a table if the exchange says it is dense.
        local_grad: this replica's.
        exchange: where rows of tables are published.
    """

    def __init__(self, replica_grads: Sequence[Tensor], local_grad: Tensor, exchange: SparseGradExchange) -> None:
        self.replica_grads = replica_grads
        self.local_grad = local_grad
        self.exchange = exchange
        self.dirty: set[str] = set()  # tables at which the own buffer may be nonzero
        self._added_ranges: dict[str, tuple[int, int]] = {}

    def begin_step(self) -> None:
        """Start a step."""
        self.clear_added_rows()
        self.exchange.begin_step()

    def clear_added_rows(self) -> None:
        """Zero the rows that were added to the own buffer."""
        for name, (start, stop) in self._added_ranges.items():
            low = start - self.exchange.tables[name].start
            clear_rows(self.local_grad[start:stop], low, self.exchange.row_grads(name))
        self._added_ranges.clear()

    def merge_rows_into_dense(self, dense: Collection[str]) -> None:
        """Add the own rows of tables that also have a dense gradient to that."""
        for name in [name for name in self.exchange.local if name in dense]:
            slot = self.exchange.tables[name]
            add_rows(self.local_grad[slot.start : slot.stop], 0, self.exchange.local.pop(name), 1.0)
            self.dirty.add(name)

    def grad_ranges(self, start: int, stop: int, *, as_rows: bool) -> Iterator[GradRange]:
        """Yield what a range of the gradient is the sum of, in order.

        Args:
            start: its first element.
            stop: one past its last.
            as_rows: whether rows may stay rows; else they are added up.
        """
        position = start
        for slot in self.exchange.tables.values():  # in the order of the layout
            low, high = max(start, slot.start), min(stop, slot.stop)
            if low >= high or len(self.exchange.dense_replicas(slot.name)) == len(self.replica_grads):
                continue
            if position < low:
                yield self._dense_range(position, low)
            position = high
            yield self._table_range(slot, low, high, as_rows=as_rows)
        if position < stop:
            yield self._dense_range(position, stop)

    def _dense_range(self, start: int, stop: int) -> GradRange:
        return GradRange(start, stop, [row[start:stop] for row in self.replica_grads])

    def _table_range(self, slot: ParamSlot, start: int, stop: int, *, as_rows: bool) -> GradRange:
        row_grads, low = self.exchange.row_grads(slot.name), start - slot.start
        dense = [self.replica_grads[replica][start:stop] for replica in self.exchange.dense_replicas(slot.name)]
        local_grad = self.local_grad[start:stop]
        if not dense and as_rows:
            return GradRange(start, stop, [], row_grads, low)
        if dense and not row_grads:
            return GradRange(start, stop, dense)
        if dense:
            local_grad.copy_(reduce_in_order(dense, "sum") if len(dense) > 1 else dense[0])
            self.dirty.add(slot.name)
        else:
            if slot.name in self.dirty:
                local_grad.zero_()
                self.dirty.discard(slot.name)
            self._added_ranges[slot.name] = (start, stop)
        add_rows(local_grad, low, row_grads, 1.0)
        return GradRange(start, stop, [local_grad])


def table_slots(layout: FlatLayout, sparse: Collection[str]) -> list[ParamSlot]:
    """Return the parameters whose gradients may be published as rows: large tables, and those with sparse gradients."""
    return [
        slot for slot in layout.slots if is_table(slot.shape) and (slot.name in sparse or not is_small(slot, layout))
    ]


class SparseGradExchange:
    """Row gradients of all replicas, as one of them sees them.

    Args:
        headers: shared by all members: :func:`header_elements` numbers for each.
        tables: those that may have row gradients.
        dtype: of their values.
        replica: index of this rank among the replicas.
    """

    def __init__(self, headers: Tensor, tables: Sequence[ParamSlot], dtype: torch.dtype, replica: int) -> None:
        self.headers = headers
        self.tables = {slot.name: slot for slot in tables}
        self.replica = replica
        self.indices = torch.empty(len(headers), 0, dtype=torch.int64)
        self.values = torch.empty(len(headers), 0, dtype=dtype)
        self.local: dict[str, list[RowGrad]] = {}
        self.has_rows = False  # whether any replica has published rows in this step
        self.published: dict[str, list[tuple[int, RowGrad | None]]] = {}
        self._unpublished: list[tuple[str, RowGrad]] = []

    def begin_step(self) -> None:
        """Start a step without published rows."""
        self.local.clear()
        self.has_rows = False
        self.published.clear()
        self._unpublished.clear()

    def add(self, name: str, row_grad: RowGrad) -> None:
        """Add a row gradient to this replica's own of a table."""
        self.local.setdefault(name, []).append(row_grad)

    def publish(self, dense: Collection[str]) -> None:
        """Write this replica's rows for the others to read after the next barrier.

        Args:
            dense: the tables with a dense gradient, into which their rows have been added.
        """
        self._unpublished = [
            (name, concat_row_grads(row_grads)) for name, row_grads in self.local.items() if name not in dense
        ]
        if not self.tables:
            return
        local, table_headers = dict(self._unpublished), []
        first_index = first_value = 0
        for name in self.tables:
            row_grad = local.get(name)
            if row_grad is None:
                table_headers.append(RowGradHeader(DENSE_GRAD if name in dense else NO_GRAD, 0, 0, 0, 1, 0, 0, 0))
                continue
            count, has_value_index = len(row_grad.rows), row_grad.value_index is not None
            table_headers.append(
                RowGradHeader(
                    ROW_GRAD,
                    row_grad.is_sparse,
                    count,
                    has_value_index,
                    row_grad.rows_per_value,
                    first_index,
                    len(row_grad.values),
                    first_value,
                )
            )
            first_index += count * (1 + has_value_index)
            first_value += row_grad.values.numel()
        flat = [first_index, first_value, *(number for header in table_headers for number in header)]
        self.headers[self.replica, : len(flat)] = torch.tensor(flat)
        if first_index <= self.indices.shape[1] and first_value <= self.values.shape[1]:
            self._write()

    def _write(self) -> None:
        indices, values = self.indices[self.replica], self.values[self.replica]
        first_index = first_value = 0
        for _, row_grad in self._unpublished:
            for column in (row_grad.rows, row_grad.value_index):
                if column is not None:
                    indices[first_index : first_index + len(column)] = column
                    first_index += len(column)
            count = row_grad.values.numel()
            values[first_value : first_value + count] = row_grad.values.reshape(-1)
            first_value += count

    def read_all(self, fabric: Fabric, group: Group, label: str) -> None:
        """Read the rows of all replicas, after growing the buffers if they do not fit; all members call it together."""
        header_rows = self.headers.tolist()
        max_indices, max_values = (max(row[field] for row in header_rows) for field in range(PREFIX_FIELDS))
        if max_indices > self.indices.shape[1] or max_values > self.values.shape[1]:
            self.indices = self._grow(self.indices, max_indices, fabric, group, f"rows of {label}")
            self.values = self._grow(self.values, max_values, fabric, group, f"values of {label}")
            self._write()
            fabric.barrier_async(f"rows of {label}", group).wait()
        for index, (name, slot) in enumerate(self.tables.items()):
            start = PREFIX_FIELDS + index * HEADER_FIELDS
            table_headers = [RowGradHeader(*row[start : start + HEADER_FIELDS]) for row in header_rows]
            self.has_rows |= any(header.state == ROW_GRAD for header in table_headers)
            self.published[name] = [
                (header.state, self._read_row_grad(replica, header, slot))
                for replica, header in enumerate(table_headers)
            ]

    def _grow(self, old: Tensor, needed: int, fabric: Fabric, group: Group, label: str) -> Tensor:
        if needed <= old.shape[1]:
            return old
        capacity = -(-needed * 3 // 2 // 64) * 64
        memory = fabric.shared_zeros(label, len(group) * capacity, old.dtype, group)
        assert memory is not None, "these ranks share memory"
        return memory.view(len(group), capacity)

    def _read_row_grad(self, replica: int, header: RowGradHeader, slot: ParamSlot) -> RowGrad | None:
        if header.state != ROW_GRAD:
            return None
        indices, width = self.indices[replica][header.first_index :], slot.shape[1]
        values = self.values[replica][header.first_value : header.first_value + header.num_values * width]
        return RowGrad(
            indices[: header.num_rows],
            values.view(header.num_values, width),
            indices[header.num_rows : 2 * header.num_rows] if header.has_value_index else None,
            header.rows_per_value,
            bool(header.is_sparse),
        )

    def row_grads(self, name: str) -> list[RowGrad]:
        """Return the published row gradients of a table, in the order of the replicas."""
        return [row_grad for _, row_grad in self.published.get(name, []) if row_grad is not None]

    def dense_replicas(self, name: str) -> list[int]:
        """Return the replicas with a dense gradient of the table."""
        return [replica for replica, (state, _) in enumerate(self.published.get(name, [])) if state == DENSE_GRAD]


class RowGradHeader(NamedTuple):
    """What a replica publishes about its gradient of one table; offsets count from the start of its own buffers."""

    state: int
    is_sparse: int
    num_rows: int
    has_value_index: int
    rows_per_value: int
    first_index: int
    num_values: int
    first_value: int


HEADER_FIELDS = len(RowGradHeader._fields)

PREFIX_FIELDS = 2  # before the headers: the numbers of indices and of value elements


def header_elements(num_tables: int) -> int:
    """Return the length of one replica's headers, padded so that the next ones begin at a cache line."""
    return -(-(PREFIX_FIELDS + HEADER_FIELDS * num_tables) // 8) * 8
