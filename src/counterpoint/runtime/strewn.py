"""Rows of sparse gradients on one rank: its own, those that came from others, and how they travel.

Which tables have sparse gradients is known from the model, so that all ranks exchange rows of the same ones in the same
order, whether or not they have looked up any in this step. Everything else of an arena is exchanged as flat ranges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from counterpoint.errors import DataError
from counterpoint.fabric.fabric import Fabric, Group, Work
from counterpoint.runtime.layout import Layout
from counterpoint.runtime.rows import Piece, add_rows, coalesced, is_table, joined

Found: TypeAlias = dict[str, list[Piece]]


def tables_of(model: nn.Module) -> dict[str, bool]:
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


class Strewn:
    """The rows of one arena's sparse gradients.

    Args:
        layout: of the arena.
        names: the parameters of the model with sparse gradients.
    """

    def __init__(self, layout: Layout, names: frozenset[str]) -> None:
        self.dtype = layout.dtype
        self.slots = {slot.name: slot for slot in layout.slots if slot.name in names and is_table(slot.shape)}
        self.fresh: Found = {}  # not exchanged yet
        self.rows: Found = {}
        self.is_added = False  # whether they are in the flat gradient, too
        self._sparse: dict[str, Tensor] = {}

    def require_none(self) -> None:
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
        self.fresh.clear()
        self.rows.clear()
        self._sparse.clear()
        self.is_added = False

    def take(self, name: str, gradient: Tensor) -> None:
        """A table has got this gradient from autograd, sparse or not."""
        if gradient.is_sparse:
            piece = Piece(gradient._indices()[0].contiguous(), gradient._values().contiguous(), is_sparse=True)  # noqa: SLF001
        else:
            piece = Piece(torch.arange(len(gradient)), gradient.contiguous())
        self.fresh.setdefault(name, []).append(piece)

    def dense_ranges(self, low: int, high: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges from ``low`` to ``high`` in which no such table lies."""
        for slot in self.slots.values():
            if low < min(slot.start, high):
                yield low, min(slot.start, high)
            low = max(low, slot.stop)
        if low < high:
            yield low, high

    def gather(self, fabric: Fabric, group: Group, label: str, *, has_share: bool) -> None:
        """Bring the rows of all members together; all of them call it.

        Args:
            fabric: the way to the others.
            group: the members.
            label: whose gradients these are.
            has_share: whether what has been brought together before is to be brought together with more members.
        """
        source = self.rows if has_share else self.fresh
        for name, slot in self.slots.items():
            rows, values = self._flat(source.pop(name, []), slot.shape)
            counts = fabric.gather_values(f"{label} rows of {name}", len(rows), group)
            bounds = [0]
            for count in counts:
                assert isinstance(count, int), "what every member says"
                bounds.append(bounds[-1] + count)
            width = slot.shape[1]
            rows = gathered(fabric, rows, bounds, group, f"{label} rows of {name}")
            flat = [bound * width for bound in bounds]
            values = gathered(fabric, values.reshape(-1), flat, group, f"{label} values of {name}").view(-1, width)
            self.rows.setdefault(name, []).append(Piece(rows, values, is_sparse=True))

    def _flat(self, pieces: Sequence[Piece], shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        if not pieces:
            return torch.empty(0, dtype=torch.int64), torch.empty(0, shape[1], dtype=self.dtype)
        return joined(pieces).expanded()

    @property
    def num_tensors(self) -> int:
        """How many tensors a message of the rows has."""
        return 2 * len(self.slots)

    def message(self) -> list[Tensor]:
        """Return the rows as tensors, to be sent; :meth:`receive` is its opposite."""
        return [tensor for name, slot in self.slots.items() for tensor in self._flat(self.pieces(name), slot.shape)]

    def receive(self, tensors: Iterator[Tensor]) -> None:
        """Add rows that have come from another rank."""
        for name in self.slots:
            rows, values = next(tensors), next(tensors)
            if len(rows):
                self.fresh.setdefault(name, []).append(Piece(rows, values, is_sparse=True))

    def add_to(self, flat: Tensor, low: int) -> None:
        """Put the gradients of the tables into a flat gradient that begins at ``low``; once in a step."""
        if self.is_added:
            return
        self.is_added = True
        for name, slot in self.slots.items():
            start, stop = max(slot.start, low), min(slot.stop, low + len(flat))
            if start < stop:
                view = flat[start - low : stop - low].zero_()
                add_rows(view, start - slot.start, self.pieces(name), 1.0)

    def pieces(self, name: str) -> list[Piece]:
        """Return all rows of a table."""
        return [*self.rows.get(name, []), *self.fresh.get(name, [])]

    def sparse(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        """Return a table's gradient as a sparse tensor, the same one in a step; None where it has none of its own."""
        pieces = self.pieces(name)
        if not pieces or not all(piece.is_sparse for piece in pieces):
            return None
        if name not in self._sparse:
            self._sparse[name] = coalesced(pieces, shape, self.dtype)
        return self._sparse[name]


def gathered(fabric: Fabric, own: Tensor, bounds: Sequence[int], group: Group, label: str) -> Tensor:
    """Return the tensors of all members, back to back; ``bounds`` says where each of them lies."""
    whole, place = own.new_empty(bounds[-1]), group.index(fabric.rank)
    whole[bounds[place] : bounds[place + 1]] = own
    if bounds[-1]:
        fabric.all_gather(label, whole, bounds, group).wait()
    return whole


class Several(Work):
    """Collectives that are complete when all of them are."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for one after the other."""
        for work in self._works:
            work.wait()
