"""Rows of a table as modules look them up and as servers count them: each once, ascending.

Bags of rows as sums: fewer numbers than the rows themselves, in both directions.
"""

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
    """Numbers by size.

    Attributes:
        numbers: their places, those of equal ones in their order.
        starts: where in it each different number begins.
    """

    permutation: Int64Array
    group_starts: Int64Array


@dataclass(slots=True)
class UniqueRows:
    """What is looked up, each row once.

    Attributes:
        indices: as they were given.
        rows: those to be fetched, ascending.
        places: for each index its place among the rows; that of padding is behind them.
        has_padding: whether the padding row is looked up.
        order: of the indices; None where they have the padding row.
    """

    indices: Tensor
    rows: Tensor
    positions: Tensor
    has_padding: bool
    order: SortedIds | None = None


def unique_sorted(ids: Int64Array) -> tuple[SortedIds, Int64Array, Int64Array]:
    """Return the order of numbers, the different ones ascending, and for each number its place among these.

    Example:
        >>> order, rows, places = looked_up(np.array([7, 3, 5, 3]))
        >>> order.numbers.tolist(), order.starts.tolist()
        ([1, 3, 2, 0], [0, 2, 3])
        >>> rows.tolist(), places.tolist()
        ([3, 5, 7], [2, 0, 1, 0])
    """
    library, count = native().library, ids.size
    if library is not None and ids.flags.c_contiguous:
        found, scratch = np.empty((4, count), dtype=np.int64), np.empty(2 * count, dtype=np.uint64)
        num_rows = library.cp_distinct(ids.ctypes.data, count, found.ctypes.data, scratch.ctypes.data)
        if num_rows >= 0:
            order, starts, rows, places = found
            return SortedIds(order, starts[:num_rows]), rows[:num_rows], places
    order = ids.argsort(kind="stable")
    ascending = ids[order]
    is_first = np.ones(count, dtype=bool)
    np.not_equal(ascending[1:], ascending[:-1], out=is_first[1:])
    places = np.empty(count, dtype=np.int64)
    places[order] = is_first.cumsum() - 1
    return SortedIds(order, np.flatnonzero(is_first)), ascending[is_first], places


def find_unique_rows(key: str, indices: Tensor, num_rows: int, padding: int | None) -> UniqueRows:
    """Return each row of what is looked up once.

    Args:
        key: the table.
        indices: what is looked up.
        num_rows: of the table.
        padding: the row that stands for nothing.

    Raises:
        DataError: there is no such row.

    Example:
        >>> found = distinct("table", torch.tensor([7, 0, 3, 7]), 10, 0)
        >>> found.rows.tolist(), found.places.tolist()
        ([3, 7], [1, 2, 0, 1])
    """
    numbers: Int64Array = indices.numpy().reshape(-1).astype(np.int64, copy=False)
    order, different, inverse = unique_sorted(numbers)
    rows, places = torch.from_numpy(different), torch.from_numpy(inverse).view(indices.shape)
    if len(rows) and not (int(rows[0]) >= 0 and int(rows[-1]) < num_rows):
        raise DataError(f"rows {int(rows[0])} to {int(rows[-1])} of {key} are looked up, which has {num_rows}")
    at = len(rows) if padding is None else int(torch.searchsorted(rows, padding))
    if at == len(rows) or int(rows[at]) != padding:
        return UniqueRows(indices, rows, places, has_padding=False, order=order)
    places = torch.where(places == at, len(rows) - 1, places - (places > at).to(places.dtype))
    return UniqueRows(indices, torch.cat([rows[:at], rows[at + 1 :]]), places, has_padding=True)


def merge_row_gradients(
    gradients: Sequence[tuple[Tensor, Tensor]], width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the sum of gradients of rows, each row once and ascending.

    Example:
        >>> both = [(torch.tensor([1, 4]), torch.ones(2, 1)), (torch.tensor([0, 4]), torch.ones(2, 1))]
        >>> merged(both, 1, torch.float32)
        (tensor([0, 1, 4]), tensor([[1.],
                [1.],
                [2.]]))
    """
    if len(gradients) == 1:
        return gradients[0]
    rows = torch.cat([torch.empty(0, dtype=torch.int64), *(rows for rows, _ in gradients)])
    rows, places = torch.unique(rows, return_inverse=True)
    total = torch.zeros(len(rows), width, dtype=dtype)
    if gradients:
        total.index_add_(0, places, torch.cat([values for _, values in gradients]))
    return rows, total


def positions_in(rows: Tensor, others: Tensor) -> Tensor:
    """Return the places of rows that are among others; both ascend, each row once.

    Example:
        >>> among(torch.tensor([1, 4, 6]), torch.tensor([0, 4, 5]))
        tensor([1])
    """
    wanted, known = rows.numpy(), others.numpy()
    if not len(known):
        return torch.empty(0, dtype=torch.int64)
    is_known = known[known.searchsorted(wanted).clip(max=len(known) - 1)] == wanted
    return torch.from_numpy(np.flatnonzero(is_known))


def densify_gradient(gradient: Tensor) -> Tensor:
    """Return the gradient of rows, each once, that autograd has left as it is or as one entry for each look-up.

    The latter and a sum take a third of the time of torch's dense gradient of bags.
    """
    if not gradient.is_sparse:
        return gradient
    found = gradient.detach()
    return found.new_zeros(found.shape, layout=torch.strided).index_add_(0, found._indices()[0], found._values())  # noqa: SLF001


def validate_table_module(key: str, module: Any) -> None:  # noqa: ANN401 - checked
    """Check that rows of a module can be kept elsewhere.

    Raises:
        PlanError: they cannot.
    """
    if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
        raise PlanError(
            f"{key} is a weight of {type(module).__name__}, of which rows are not looked up; only nn.Embedding and "
            "nn.EmbeddingBag can be tables"
        )
    if module.max_norm is not None:
        raise PlanError(f"{key} has max_norm={module.max_norm}, which changes rows as they are read; leave it out")


@dataclass(frozen=True, slots=True, eq=False)
class PooledLookup:
    """What a module makes of rows that are looked up.

    Attributes:
        there: sums of the rows, one for each bag: what is pulled.
        back: sums of the bags, one for each row: what is pushed, being the rows' gradients.
        divisor: the rows of a bag where their mean is meant; else 1.
    """

    pull_pooling: RowPooling
    push_pooling: RowPooling
    divisor: int

    def equals(self, other: PooledLookup | None) -> bool:
        """Tell whether the same rows go to the same bags."""
        if self is other or other is None:
            return other is not None
        pairs = (
            (self.pull_pooling.indices, other.pull_pooling.indices),
            (self.pull_pooling.offsets, other.pull_pooling.offsets),
        )
        return all(torch.equal(one, another) for one, another in pairs)

    def output(self, sums: Tensor) -> Tensor:
        """Return what the module returns."""
        return sums / self.divisor


def make_pooled_lookup(unique: UniqueRows, module: nn.EmbeddingBag, num_shards: int) -> PooledLookup | None:
    """Return the bags of a look-up ``(bags, rows of each)``; None where rows are fewer, or a bag is no sum of them.

    Args:
        wanted: what is looked up.
        module: whose look-up it is.
        num_shards: of the job; each adds up its own rows.

    Example:
        >>> from counterpoint.elastic.row_ids import distinct
        >>> wanted = distinct("table", torch.tensor([[7, 3, 5], [3, 3, 9]]), 10, None)
        >>> bags = bags_of(wanted, nn.EmbeddingBag(10, 2, mode="sum"), 1)
        >>> bags.there.members.tolist(), bags.there.starts.tolist()
        ([2, 0, 1, 0, 0, 3], [0, 3])
        >>> bags.back.members.tolist(), bags.back.starts.tolist()
        ([0, 1, 1, 0, 0, 1], [0, 3, 4, 5])
    """
    order, indices = unique.order, unique.indices
    if order is None or indices.dim() != 2 or module.mode == "max" or module.scale_grad_by_freq:
        return None
    num_bags, each = indices.shape
    if num_bags * num_shards >= len(unique.rows):
        return None
    there = RowPooling(
        unique.positions.view(-1).to(torch.int32), torch.arange(0, num_bags * each, each, dtype=torch.int32)
    )
    back = RowPooling(_to_int32(order.permutation // each), _to_int32(order.group_starts))
    return PooledLookup(there, back, each if module.mode == "mean" else 1)


def _to_int32(numbers: Int64Array) -> Tensor:
    return torch.from_numpy(numbers.astype(np.int32))
