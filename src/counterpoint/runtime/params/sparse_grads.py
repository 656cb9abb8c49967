"""Gradients of tables as rows: of a table only those rows are named that somebody has looked up.

A table of a million rows of which a batch looks up some thousands has a gradient of zeros but for these. As a tensor of
the table's size it would have to be made, filled, added up and read; as rows it is as large as what was looked up.

Rows of sparse gradients on one rank: its own, those that came from others, and how they travel.

Which tables have sparse gradients is known from the model, so that all ranks exchange rows of the same ones in the same
order, whether or not they have looked up any in this step. Everything else of an arena is exchanged as flat ranges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ctypes import byref
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from counterpoint.errors import DataError
from counterpoint.fabric.fabric import Fabric, Group, Work
from counterpoint.fabric.shm.native import DTYPES, SparseRowsArgs, SparseRowsPart, native
from counterpoint.runtime.params.flat_layout import FlatLayout


@dataclass(frozen=True, slots=True)
class RowGrad:
    """What is added to some rows of a table.

    Args:
        rows: their numbers; the same one may occur again, and one below 0 is passed over.
        values: what they get, ``(any, width)``.
        at: for each of the rows which of the values it gets; None where as many in turn as ``each`` says get the same.
        each: see ``at``.
        is_sparse: whether the model asked for a sparse gradient.
    """

    rows: Tensor
    values: Tensor
    value_index: Tensor | None = None
    rows_per_value: int = 1
    is_sparse: bool = False

    def expand_value_index(self) -> Tensor:
        """Return for each of the rows which of the values it gets."""
        return torch.arange(len(self.rows)) // self.rows_per_value if self.value_index is None else self.value_index

    def expand(self) -> tuple[Tensor, Tensor]:
        """Return the rows that are not passed over, and one value for each."""
        kept = self.rows >= 0
        return self.rows[kept], self.values[self.expand_value_index()[kept]]


def row_grad_from_sparse(gradient: Tensor) -> RowGrad:
    """Return a sparse gradient of a table as rows.

    Example:
        >>> gradient = torch.sparse_coo_tensor([[2, 0]], [[1.0, 2.0], [3.0, 4.0]], (4, 2), check_invariants=True)
        >>> piece_of(gradient).rows.tolist()
        [2, 0]
    """
    return RowGrad(gradient._indices()[0].contiguous(), gradient._values().contiguous(), is_sparse=True)  # noqa: SLF001


def is_table(shape: Sequence[int]) -> bool:
    """Tell whether a parameter of this shape has rows."""
    return len(shape) == 2 and shape[1] > 0


def concat_row_grads(row_grads: Sequence[RowGrad]) -> RowGrad:
    """Return what all pieces add, in their order."""
    if len(row_grads) == 1:
        return row_grads[0]
    starts = [0]
    for piece in row_grads:
        starts.append(starts[-1] + len(piece.values))
    return RowGrad(
        torch.cat([piece.rows for piece in row_grads]),
        torch.cat([piece.values for piece in row_grads]),
        torch.cat([piece.expand_value_index() + start for piece, start in zip(row_grads, starts, strict=False)]),
        is_sparse=all(piece.is_sparse for piece in row_grads),
    )


def add_rows(into: Tensor, low: int, row_grads: Sequence[RowGrad], factor: float) -> None:
    """Add values times a factor to rows of a table, one piece after the other.

    Args:
        into: the table's elements from ``low``, flat; what lies outside is passed over.
        low: the first element.
        pieces: what is added.
        factor: what values are multiplied with.
    """
    if not _call_native(into, low, row_grads, factor, is_clearing=False):
        for piece in row_grads:
            places, values = _elements_of(into, low, piece)
            into.index_add_(0, places, values, alpha=factor)


def clear_rows(into: Tensor, low: int, row_grads: Sequence[RowGrad]) -> None:
    """Set the rows that pieces name to zero; see :func:`add_rows`."""
    if not _call_native(into, low, row_grads, 0.0, is_clearing=True):
        for piece in row_grads:
            into[_elements_of(into, low, piece)[0]] = 0


def coalesce_row_grads(row_grads: Sequence[RowGrad], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the sum of all pieces as a sparse tensor, in which every row occurs once."""
    found = [piece.expand() for piece in row_grads]
    rows = torch.cat([rows for rows, _ in found]) if found else torch.empty(0, dtype=torch.int64)
    values = torch.cat([values for _, values in found]) if found else torch.empty(0, shape[1], dtype=dtype)
    return torch.sparse_coo_tensor(rows[None], values, shape, check_invariants=False).coalesce()


def _call_native(into: Tensor, low: int, row_grads: Sequence[RowGrad], factor: float, *, is_clearing: bool) -> bool:
    library = native().library
    if library is None or into.dtype not in {torch.float32, torch.float64} or not into.is_cpu:
        return False
    if not row_grads or not into.numel():
        return True
    parts = (SparseRowsPart * len(row_grads))()
    for part, piece in zip(parts, row_grads, strict=True):
        part.rows, part.values, part.count = piece.rows.data_ptr(), piece.values.data_ptr(), len(piece.rows)
        part.at, part.each = None if piece.value_index is None else piece.value_index.data_ptr(), piece.rows_per_value
    request = SparseRowsArgs(
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
    library.cp_add_rows(byref(request))
    return True


def _elements_of(into: Tensor, low: int, row_grad: RowGrad) -> tuple[Tensor, Tensor]:
    """Return where in ``into`` what lies there gets its values, and these."""
    rows, values = row_grad.expand()
    width = row_grad.values.shape[1]
    places = rows[:, None] * width + torch.arange(width) - low
    inside = (places >= 0) & (places < into.numel())
    return places[inside], values[inside]


RowGradsByName: TypeAlias = dict[str, list[RowGrad]]


def find_embedding_tables(model: nn.Module) -> dict[str, bool]:
    """Return the trainable tables of a model, and which of them ask for sparse gradients.

    Example:
        >>> tables_of(nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Embedding(4, 2), nn.Linear(2, 2)))
        {'0.weight': True, '1.weight': False}
    """
    names = {id(param): name for name, param in model.named_parameters() if param.requires_grad}
    found: dict[str, bool] = {}
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and id(module.weight) in names:
            name = names[id(module.weight)]
            found[name] = found.get(name, False) or module.sparse
    return found


class SparseGrads:
    """The rows of one arena's sparse gradients.

    Args:
        layout: of the arena.
        names: the parameters of the model with sparse gradients.
    """

    def __init__(self, layout: FlatLayout, names: frozenset[str]) -> None:
        self.dtype = layout.dtype
        self.slots = {slot.name: slot for slot in layout.slots if slot.name in names and is_table(slot.shape)}
        self.local: RowGradsByName = {}  # not exchanged yet
        self.reduced: RowGradsByName = {}
        self.is_in_flat_grad = False  # whether they are in the flat gradient, too
        self._sparse_tensors: dict[str, Tensor] = {}

    def require_dense(self) -> None:
        """Check that all gradients are dense, so that they can be set aside.

        Raises:
            DataError: some are sparse.
        """
        if self.slots:
            raise DataError(
                f"the gradient of {next(iter(self.slots))} is sparse and cannot be set aside for a step; build the "
                "embedding with sparse=False, or leave staleness=1 out of the plan"
            )

    def clear(self) -> None:
        """There are none."""
        self.local.clear()
        self.reduced.clear()
        self._sparse_tensors.clear()
        self.is_in_flat_grad = False

    def add(self, name: str, grad: Tensor) -> None:
        """A table has got this gradient from autograd, sparse or not."""
        if grad.is_sparse:
            piece = RowGrad(grad._indices()[0].contiguous(), grad._values().contiguous(), is_sparse=True)  # noqa: SLF001
        else:
            piece = RowGrad(torch.arange(len(grad)), grad.contiguous())
        self.local.setdefault(name, []).append(piece)

    def dense_ranges(self, low: int, high: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges from ``low`` to ``high`` in which no such table lies."""
        for slot in self.slots.values():
            if low < min(slot.start, high):
                yield low, min(slot.start, high)
            low = max(low, slot.stop)
        if low < high:
            yield low, high

    def all_gather(self, fabric: Fabric, group: Group, label: str, *, reduced_already: bool) -> None:
        """Bring the rows of all members together; all of them call it.

        Args:
            fabric: the way to the others.
            group: the members.
            label: whose gradients these are.
            has_share: whether what has been brought together before is to be brought together with more members.
        """
        source = self.reduced if reduced_already else self.local
        for name, slot in self.slots.items():
            rows, values = self._flatten(source.pop(name, []), slot.shape)
            counts = fabric.gather_values(f"{label} rows of {name}", len(rows), group)
            bounds = [0]
            for count in counts:
                assert isinstance(count, int), "what every member says"
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
            return torch.empty(0, dtype=torch.int64), torch.empty(0, shape[1], dtype=self.dtype)
        return concat_row_grads(row_grads).expand()

    @property
    def num_tensors(self) -> int:
        """How many tensors a message of the rows has."""
        return 2 * len(self.slots)

    def pack(self) -> list[Tensor]:
        """Return the rows as tensors, to be sent; :meth:`receive` is its opposite."""
        return [
            tensor for name, slot in self.slots.items() for tensor in self._flatten(self.row_grads(name), slot.shape)
        ]

    def add_packed(self, tensors: Iterator[Tensor]) -> None:
        """Add rows that have come from another rank."""
        for name in self.slots:
            rows, values = next(tensors), next(tensors)
            if len(rows):
                self.local.setdefault(name, []).append(RowGrad(rows, values, is_sparse=True))

    def add_to(self, flat: Tensor, low: int) -> None:
        """Put the gradients of the tables into a flat gradient that begins at ``low``; once in a step."""
        if self.is_in_flat_grad:
            return
        self.is_in_flat_grad = True
        for name, slot in self.slots.items():
            start, stop = max(slot.start, low), min(slot.stop, low + len(flat))
            if start < stop:
                view = flat[start - low : stop - low].zero_()
                add_rows(view, start - slot.start, self.row_grads(name), 1.0)

    def row_grads(self, name: str) -> list[RowGrad]:
        """Return all rows of a table."""
        return [*self.reduced.get(name, []), *self.local.get(name, [])]

    def sparse_tensor(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        """Return a table's gradient as a sparse tensor, the same one in a step; None where it has none of its own."""
        pieces = self.row_grads(name)
        if not pieces or not all(piece.is_sparse for piece in pieces):
            return None
        if name not in self._sparse_tensors:
            self._sparse_tensors[name] = coalesce_row_grads(pieces, shape, self.dtype)
        return self._sparse_tensors[name]


def all_gather_ranges(fabric: Fabric, local: Tensor, bounds: Sequence[int], group: Group, label: str) -> Tensor:
    """Return the tensors of all members, back to back; ``bounds`` says where each of them lies."""
    whole, place = local.new_empty(bounds[-1]), group.index(fabric.rank)
    whole[bounds[place] : bounds[place + 1]] = local
    if bounds[-1]:
        fabric.all_gather(label, whole, bounds, group).wait()
    return whole


class CombinedWork(Work):
    """Collectives that are complete when all of them are."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for one after the other."""
        for work in self._works:
            work.wait()
