"""Gradients that were set aside, in checkpoints: every replica has its own until they are summed in the next step.

Names in a checkpoint: ``late:<parameter>~1/4``, after the slice of a sliced parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from counterpoint.checkpoint.piece import Piece
from counterpoint.program.instruction import Collective
from counterpoint.runtime.build import Rank, slice_of, slices_of
from counterpoint.runtime.state import Book


@dataclass(frozen=True, slots=True)
class Aside:
    """The gradient of a unit that a rank sets aside.

    Args:
        unit: of what.
        replica: whose it is, of those that are summed.
        num_replicas: how many are summed.
        is_first: whether no lower rank has the same.
    """

    unit: tuple[int, ...]
    replica: int
    num_replicas: int
    is_first: bool


def asides_of(book: Book, rank: int) -> list[Aside]:
    """Return what a rank sets aside in every step."""
    program, spec = book.parts.program, book.parts.spec
    sliced = {unit for unit, names in spec.units.items() if not slices_of(spec).keys().isdisjoint(names)}
    found, seen = [], set()
    for at, row in enumerate(program.rows[: rank + 1]):
        for word in row.body:
            if isinstance(word, Collective) and word.value.name == "delayed_grad" and word.phase == "start":
                replica = word.group.index(at)
                key = (word.value.blocks, replica, row.slice_index if word.value.blocks in sliced else 0)
                if at == rank:
                    found.append(Aside(word.value.blocks, replica, len(word.group), key not in seen))
                seen.add(key)
    return found


def late_pieces(book: Book, rank: Rank) -> Iterator[Piece]:
    """Yield what this rank writes into a checkpoint of the gradients that it has set aside."""
    me = rank.interpreter.fabric.rank
    row, sliced = book.parts.program.rows[me], slices_of(book.parts.spec)
    for aside in asides_of(book, me):
        if not aside.is_first:
            continue
        for arena in rank.interpreter.store.units[aside.unit].arenas:
            flat = arena.set_aside()
            for slot in arena.layout.slots:
                at = f"@{row.slice_index}/{sliced[slot.name][1]}" if slot.name in sliced else ""
                name = f"late:{slot.name}{at}~{aside.replica}/{aside.num_replicas}"
                yield Piece(name, flat[slot.start : slot.stop].contiguous(), slot.shape, 0)


def restore_late(book: Book, rank: Rank, saved_replicas: int, read: Callable[[str, int], Tensor]) -> None:
    """Set aside what was saved; where as many replicas are not there now, the first one gets the sum.

    Args:
        book: who answers for what.
        rank: this rank.
        saved_replicas: how many gradients of each parameter were saved.
        read: returns a replica's gradient of a parameter, in full.
    """
    me = rank.interpreter.fabric.rank
    row, sliced = book.parts.program.rows[me], slices_of(book.parts.spec)
    for aside in asides_of(book, me):
        mine = [aside.replica] if aside.num_replicas == saved_replicas else range(saved_replicas)
        for arena in rank.interpreter.store.units[aside.unit].arenas:
            arena.late = None
            flat = arena.set_aside()
            if aside.num_replicas != saved_replicas and aside.replica > 0:
                continue
            for slot in arena.layout.slots:
                full = torch.stack([read(slot.name, replica) for replica in mine]).sum(0)
                local = slice_of(full, sliced.get(slot.name), (row.slice_index, row.num_slices))
                flat[slot.start : slot.stop].copy_(local.reshape(-1))
