"""Gradients of tables as rows: of a table only those rows are named that somebody has looked up.

A table of a million rows of which a batch looks up some thousands has a gradient of zeros but for these. As a tensor of
the table's size it would have to be made, filled, added up and read; as rows it is as large as what was looked up.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass

import torch
from torch import Tensor

from counterpoint.fabric.shm.native import DTYPES, RowPart, Rows, native


@dataclass(frozen=True, slots=True)
class Piece:
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
    at: Tensor | None = None
    each: int = 1
    is_sparse: bool = False

    def places(self) -> Tensor:
        """Return for each of the rows which of the values it gets."""
        return torch.arange(len(self.rows)) // self.each if self.at is None else self.at

    def expanded(self) -> tuple[Tensor, Tensor]:
        """Return the rows that are not passed over, and one value for each."""
        kept = self.rows >= 0
        return self.rows[kept], self.values[self.places()[kept]]


def piece_of(gradient: Tensor) -> Piece:
    """Return a sparse gradient of a table as rows.

    Example:
        >>> gradient = torch.sparse_coo_tensor([[2, 0]], [[1.0, 2.0], [3.0, 4.0]], (4, 2), check_invariants=True)
        >>> piece_of(gradient).rows.tolist()
        [2, 0]
    """
    return Piece(gradient._indices()[0].contiguous(), gradient._values().contiguous(), is_sparse=True)  # noqa: SLF001


def is_table(shape: Sequence[int]) -> bool:
    """Tell whether a parameter of this shape has rows."""
    return len(shape) == 2 and shape[1] > 0


def joined(pieces: Sequence[Piece]) -> Piece:
    """Return what all pieces add, in their order."""
    if len(pieces) == 1:
        return pieces[0]
    starts = [0]
    for piece in pieces:
        starts.append(starts[-1] + len(piece.values))
    return Piece(
        torch.cat([piece.rows for piece in pieces]),
        torch.cat([piece.values for piece in pieces]),
        torch.cat([piece.places() + start for piece, start in zip(pieces, starts, strict=False)]),
        is_sparse=all(piece.is_sparse for piece in pieces),
    )


def add_rows(into: Tensor, low: int, pieces: Sequence[Piece], factor: float) -> None:
    """Add values times a factor to rows of a table, one piece after the other.

    Args:
        into: the table's elements from ``low``, flat; what lies outside is passed over.
        low: the first element.
        pieces: what is added.
        factor: what values are multiplied with.
    """
    if not _natively(into, low, pieces, factor, is_clearing=False):
        for piece in pieces:
            places, values = _elements(into, low, piece)
            into.index_add_(0, places, values, alpha=factor)


def clear_rows(into: Tensor, low: int, pieces: Sequence[Piece]) -> None:
    """Set the rows that pieces name to zero; see :func:`add_rows`."""
    if not _natively(into, low, pieces, 0.0, is_clearing=True):
        for piece in pieces:
            into[_elements(into, low, piece)[0]] = 0


def coalesced(pieces: Sequence[Piece], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the sum of all pieces as a sparse tensor, in which every row occurs once."""
    found = [piece.expanded() for piece in pieces]
    rows = torch.cat([rows for rows, _ in found]) if found else torch.empty(0, dtype=torch.int64)
    values = torch.cat([values for _, values in found]) if found else torch.empty(0, shape[1], dtype=dtype)
    return torch.sparse_coo_tensor(rows[None], values, shape, check_invariants=False).coalesce()


def _natively(into: Tensor, low: int, pieces: Sequence[Piece], factor: float, *, is_clearing: bool) -> bool:
    library = native().library
    if library is None or into.dtype not in {torch.float32, torch.float64} or not into.is_cpu:
        return False
    if not pieces or not into.numel():
        return True
    parts = (RowPart * len(pieces))()
    for part, piece in zip(parts, pieces, strict=True):
        part.rows, part.values, part.count = piece.rows.data_ptr(), piece.values.data_ptr(), len(piece.rows)
        part.at, part.each = None if piece.at is None else piece.at.data_ptr(), piece.each
    request = Rows(
        dtype=DTYPES[into.dtype],
        num_parts=len(pieces),
        is_clearing=int(is_clearing),
        parts=parts,
        into=into.data_ptr(),
        width=pieces[0].values.shape[1],
        low=low,
        high=low + into.numel(),
        factor=factor,
    )
    library.cp_add_rows(byref(request))
    return True


def _elements(into: Tensor, low: int, piece: Piece) -> tuple[Tensor, Tensor]:
    """Return where in ``into`` what lies there gets its values, and these."""
    rows, values = piece.expanded()
    width = piece.values.shape[1]
    places = rows[:, None] * width + torch.arange(width) - low
    inside = (places >= 0) & (places < into.numel())
    return places[inside], values[inside]
