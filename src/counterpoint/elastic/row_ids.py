"""Row ids of embedding lookups as servers need them: unique and sorted, or pooled per bag."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from counterpoint.errors import DataError, PlanError
from counterpoint.fabric.shm.native import native
from counterpoint.ps.row_pooling import RowPooling

Int64Array: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True, eq=False)
class SortedIds:
    """A stable sort of ids.

    Attributes:
        permutation: positions in sorted order, equal ids in their original order.
        group_starts: where each distinct id begins in it.
    """

    permutation: Int64Array
    group_starts: Int64Array


@dataclass(slots=True)
class UniqueRows:
    """The distinct rows of a lookup.

    Attributes:
        indices: as they were given.
        rows: ids to fetch, ascending.
        positions: for each index, the position of its row; padding has the position after the last row.
        has_padding: whether the padding row is looked up.
        order: sort of the indices; None if they contain the padding row.
    """

    indices: Tensor
    rows: Tensor
    positions: Tensor
    has_padding: bool
    order: SortedIds | None = None


def unique_sorted(ids: Int64Array) -> tuple[SortedIds, Int64Array, Int64Array]:
    """Return the sort of the ids, the distinct ids ascending, and for each id its position among these.

    Example:
        >>> order, rows, positions = unique_sorted(np.array([7, 3, 5, 3]))
        >>> order.permutation.tolist(), order.group_starts.tolist()
        ([1, 3, 2, 0], [0, 2, 3])
        >>> rows.tolist(), positions.tolist()
        ([3, 5, 7], [2, 0, 1, 0])
    """
    library, count = native().library, ids.size
    if library is not None and ids.flags.c_contiguous:
        outputs, scratch = np.empty((4, count), dtype=np.int64), np.empty(2 * count, dtype=np.uint64)
        num_rows = library.cp_unique(ids.ctypes.data, count, outputs.ctypes.data, scratch.ctypes.data)
        if num_rows >= 0:
            order, starts, rows, positions = outputs
            return SortedIds(order, starts[:num_rows]), rows[:num_rows], positions
    order = ids.argsort(kind="stable")
    ascending = ids[order]
    is_first = np.ones(count, dtype=bool)
    np.not_equal(ascending[1:], ascending[:-1], out=is_first[1:])
    positions = np.empty(count, dtype=np.int64)
    positions[order] = is_first.cumsum() - 1
    return SortedIds(order, np.flatnonzero(is_first)), ascending[is_first], positions


def find_unique_rows(key: str, indices: Tensor, num_rows: int, padding: int | None) -> UniqueRows:
    """Return the distinct rows of a lookup.

    Args:
        key: name of the table.
        indices: of the lookup.
        num_rows: of the table.
        padding: row that is not looked up, as ``padding_idx``.

    Raises:
        DataError: an index is out of range.

    Example:
        >>> unique = find_unique_rows("table", torch.tensor([7, 0, 3, 7]), 10, 0)
        >>> unique.rows.tolist(), unique.positions.tolist()
        ([3, 7], [1, 2, 0, 1])
    """
    ids: Int64Array = indices.numpy().reshape(-1).astype(np.int64, copy=False)
    order, distinct_ids, inverse = unique_sorted(ids)
    rows, positions = torch.from_numpy(distinct_ids), torch.from_numpy(inverse).view(indices.shape)
    if len(rows) and not (int(rows[0]) >= 0 and int(rows[-1]) < num_rows):
        raise DataError(f"rows {int(rows[0])} to {int(rows[-1])} of {key} are looked up, which has {num_rows}")
    padding_position = len(rows) if padding is None else int(torch.searchsorted(rows, padding))
    if padding_position == len(rows) or int(rows[padding_position]) != padding:
        return UniqueRows(indices, rows, positions, has_padding=False, order=order)
    positions = torch.where(
        positions == padding_position, len(rows) - 1, positions - (positions > padding_position).to(positions.dtype)
    )
    return UniqueRows(
        indices, torch.cat([rows[:padding_position], rows[padding_position + 1 :]]), positions, has_padding=True
    )


def merge_row_gradients(
    gradients: Sequence[tuple[Tensor, Tensor]], width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the sum of row gradients, with unique ascending rows.

    Example:
        >>> both = [(torch.tensor([1, 4]), torch.ones(2, 1)), (torch.tensor([0, 4]), torch.ones(2, 1))]
        >>> merge_row_gradients(both, 1, torch.float32)
        (tensor([0, 1, 4]), tensor([[1.],
                [1.],
                [2.]]))
    """
    if len(gradients) == 1:
        return gradients[0]
    rows = torch.cat([torch.empty(0, dtype=torch.int64), *(rows for rows, _ in gradients)])
    rows, positions = torch.unique(rows, return_inverse=True)
    total = torch.zeros(len(rows), width, dtype=dtype)
    if gradients:
        total.index_add_(0, positions, torch.cat([values for _, values in gradients]))
    return rows, total


def positions_in(rows: Tensor, others: Tensor) -> Tensor:
    """Return the positions of rows that are among others; both strictly ascending.

    Example:
        >>> positions_in(torch.tensor([1, 4, 6]), torch.tensor([0, 4, 5]))
        tensor([1])
    """
    row_ids, other_ids = rows.numpy(), others.numpy()
    if not len(other_ids):
        return torch.empty(0, dtype=torch.int64)
    is_member = other_ids[other_ids.searchsorted(row_ids).clip(max=len(other_ids) - 1)] == row_ids
    return torch.from_numpy(np.flatnonzero(is_member))


def densify_gradient(gradient: Tensor) -> Tensor:
    """Return a row gradient as a dense tensor; autograd may have left one sparse entry per lookup.

    Summing those entries takes a third of the time of torch's dense gradient of bags.
    """
    if not gradient.is_sparse:
        return gradient
    sparse = gradient.detach()
    return sparse.new_zeros(sparse.shape, layout=torch.strided).index_add_(0, sparse._indices()[0], sparse._values())  # noqa: SLF001


def validate_table_module(key: str, module: Any) -> None:  # noqa: ANN401 - checked
    """Raise PlanError unless the rows of a module can be held by servers."""
    if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
        raise PlanError(
            f"{key} is a weight of {type(module).__name__}, which does not look up rows; only nn.Embedding and "
            "nn.EmbeddingBag can be tables"
        )
    if module.max_norm is not None:
        raise PlanError(f"{key} has max_norm={module.max_norm}, which changes rows on reading; remove it")


@dataclass(frozen=True, slots=True, eq=False)
class PooledLookup:
    """An embedding bag lookup that exchanges sums instead of rows.

    Attributes:
        pull_pooling: sums of rows, one per bag, which are pulled.
        push_pooling: sums of bag gradients, one per row, which are pushed.
        divisor: rows per bag for mode ``mean``; else 1.
    """

    pull_pooling: RowPooling
    push_pooling: RowPooling
    divisor: int

    def equals(self, other: PooledLookup | None) -> bool:
        """Tell whether the same rows are in the same bags."""
        if self is other or other is None:
            return other is not None
        pairs = (
            (self.pull_pooling.indices, other.pull_pooling.indices),
            (self.pull_pooling.offsets, other.pull_pooling.offsets),
        )
        return all(torch.equal(own, others) for own, others in pairs)

    def output(self, pooled: Tensor) -> Tensor:
        """Return the output of the module."""
        return pooled / self.divisor


def make_pooled_lookup(unique: UniqueRows, module: nn.EmbeddingBag, num_shards: int) -> PooledLookup | None:
    """Return a pooled lookup ``(bags, rows per bag)``; None if it saves no traffic, or a bag is not a sum of rows.

    Args:
        unique: rows of the lookup.
        module: that looks them up.
        num_shards: of the job; each sums its own rows.

    Example:
        >>> unique = find_unique_rows("table", torch.tensor([[7, 3, 5], [3, 3, 9]]), 10, None)
        >>> pooled = make_pooled_lookup(unique, nn.EmbeddingBag(10, 2, mode="sum"), 1)
        >>> pooled.pull_pooling.indices.tolist(), pooled.pull_pooling.offsets.tolist()
        ([2, 0, 1, 0, 0, 3], [0, 3])
        >>> pooled.push_pooling.indices.tolist(), pooled.push_pooling.offsets.tolist()
        ([0, 1, 1, 0, 0, 1], [0, 3, 4, 5])
    """
    order, indices = unique.order, unique.indices
    if order is None or indices.dim() != 2 or module.mode == "max" or module.scale_grad_by_freq:
        return None
    num_bags, rows_per_bag = indices.shape
    if num_bags * num_shards >= len(unique.rows):
        return None
    pull_pooling = RowPooling(
        unique.positions.view(-1).to(torch.int32),
        torch.arange(0, num_bags * rows_per_bag, rows_per_bag, dtype=torch.int32),
    )
    push_pooling = RowPooling(_to_int32(order.permutation // rows_per_bag), _to_int32(order.group_starts))
    return PooledLookup(pull_pooling, push_pooling, rows_per_bag if module.mode == "mean" else 1)


def _to_int32(array: Int64Array) -> Tensor:
    return torch.from_numpy(array.astype(np.int32))
