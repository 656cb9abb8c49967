"""What codes have not sent yet, in checkpoints: every rank's own, so that only the same plan can go on with it.

Names in a checkpoint: ``residual@1:0+4/0@0,1`` for what rank 1 has not sent of the first arena of unit 0+4 to the group
0,1, or by itself to the other of these two, and ``columns@1:0+4/0@0,1:NAME`` for the factor that ``powersgd`` goes on
with for one of its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from counterpoint.checkpoint.piece import Piece, whole
from counterpoint.fabric.fabric import Group
from counterpoint.model.spec import Unit
from counterpoint.program.codes import find_code
from counterpoint.program.instruction import (
    Backward,
    Collective,
    Commit,
    Forward,
    Instruction,
    Pull,
    Push,
    Recompute,
    Recv,
    Release,
    Send,
    Serve,
    Swap,
    Update,
)
from counterpoint.program.text import format_group, format_unit
from counterpoint.runtime.arena import Arena
from counterpoint.runtime.build import Rank
from counterpoint.runtime.exchange import way_to
from counterpoint.runtime.state import Book

KINDS = ("residual", "columns")


def place_of(rank: int, unit: Unit, index: int, group: Group) -> str:
    """Return how the place of one arena's residual is written."""
    return f"{rank}:{format_unit(unit)}/{index}@{format_group(group)}"


def unsent_pieces(rank: Rank) -> Iterator[Piece]:
    """Yield what this rank writes into a checkpoint."""
    for place, arena, group in _places(rank):
        left = arena.left.get(group)
        if left is None or left.residual is None:
            continue
        yield whole(f"residual@{place}", left.residual)
        for name, columns in left.columns.items():
            yield whole(f"columns@{place}:{name}", columns.contiguous())


def is_unsent(name: str) -> bool:
    """Tell whether an entry of a checkpoint is about what a code has not sent."""
    return name.split("@")[0] in KINDS


def places_in(book: Book) -> set[str]:
    """Return the places of all residuals that the plan's ranks have."""
    return {
        place_of(rank, unit, index, group)
        for rank, word in book.parts.program.words()
        for unit, group in _left_by(rank, word)
        for index, _ in enumerate(book.layouts(unit))
    }


def _left_by(rank: int, word: Instruction) -> Iterator[tuple[Unit, Group]]:
    """Yield the unit of which a word leaves something unsent, and to whom; nothing for most words."""
    match word:
        case Collective(_, value, group, code=code) if code and find_code(code).kind.keeps:
            yield value.blocks, group
        case Send(value, peer, code) | Push(value, peer, code) if code:
            yield value.blocks, way_to(peer, rank)
        case Forward() | Recompute() | Backward() | Collective() | Send() | Push() | Recv() | Pull() | Serve():
            pass
        case Commit() | Update() | Swap() | Release():
            pass


def restore_unsent(rank: Rank, names: Iterable[str], read: Callable[[str], Tensor]) -> None:
    """Put what a checkpoint has of this rank's residuals where it was; the names are those that may be used."""
    for store in rank.interpreter.store.units.values():
        for arena in store.arenas:
            arena.left.clear()
    known = {name for name in names if is_unsent(name)}
    for place, arena, group in _places(rank):
        if f"residual@{place}" not in known:
            continue
        left = arena.leftovers(group)
        left.residual = read(f"residual@{place}").clone()
        for slot in arena.layout.slots:
            if f"columns@{place}:{slot.name}" in known:
                left.columns[slot.name] = read(f"columns@{place}:{slot.name}").clone()


def _places(rank: Rank) -> Iterator[tuple[str, Arena, Group]]:
    """Yield where this rank's row may leave something behind: the place, the arena, the group."""
    interpreter = rank.interpreter
    me = interpreter.fabric.rank
    for unit, group in dict.fromkeys(found for word in interpreter.script.words for found in _left_by(me, word)):
        for index, arena in enumerate(interpreter.store.units[unit].arenas):
            yield place_of(me, unit, index, group), arena, group
