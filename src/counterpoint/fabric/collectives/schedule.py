"""Who sends which part of a buffer to whom, and when: the one form in which every all-reduce is written.

A schedule is rounds of moves. In one round a rank sends at most one message and receives at most one, both at the same
time: the single-ported, full-duplex model of the literature, in which a round is a *step*. Every message of a round
carries what stood before that round.

A buffer of any length is cut into ``num_chunks`` chunks as even as can be, so a schedule does not depend on the length;
where a buffer has fewer elements than chunks, some messages are empty. They are sent all the same: numbers of steps and
messages hold for every length.

Source:
    Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, 2005.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import Literal, TypeAlias

TransferOp: TypeAlias = Literal["add", "copy"]


@dataclass(frozen=True, slots=True)
class ChunkTransfer:
    """One message: chunks of the sender's buffer, which the receiver adds to its own or puts in their place."""

    sender: int
    receiver: int
    chunks: range
    op: TransferOp


Round: TypeAlias = tuple[ChunkTransfer, ...]
Rounds: TypeAlias = tuple[Round, ...]
RankRound: TypeAlias = tuple[ChunkTransfer, ...]


@dataclass(frozen=True, slots=True)
class AllReduceSchedule:
    """An all-reduce of ``num_ranks`` members, counted from 0, each with a buffer of ``num_chunks`` chunks."""

    num_ranks: int
    num_chunks: int
    rounds: Rounds

    def __str__(self) -> str:
        """Read one row per member: ``2>1`` sends chunk 2 to 1, ``1+<0`` adds chunk 1 of 0, ``1=<0`` copies it.

        Example:
            >>> from counterpoint.fabric.collectives.algorithms import ring
            >>> print(ring(3))
            0  2>1,1+<2 1>1,0+<2 0>1,2=<2 2>1,1=<2
            1  2+<0,0>2 1+<0,2>2 0=<0,1>2 2=<0,0>2
            2  0+<1,1>0 2+<1,0>0 1=<1,2>0 0=<1,1>0
        """
        everybody = range(self.num_ranks)
        rows = ((rank, rank_schedule(self, tuple(everybody), rank)) for rank in everybody)
        return "\n".join(f"{rank}  " + " ".join(_format_step(step, rank) for step in row.steps) for rank, row in rows)


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """The elements that a schedule works on: part ``part`` of ``num_state_slots`` of a buffer of ``length`` elements."""

    length: int
    part: int = 0
    num_parts: int = 1

    def offset(self, chunk: int, num_chunks: int) -> int:
        """Return the element of the whole buffer at which a chunk begins; the remainder is spread evenly.

        Example:
            >>> [Extent(10).at(chunk, 4) for chunk in range(5)]
            [0, 2, 5, 7, 10]
        """
        return (self.part * num_chunks + chunk) * self.length // (self.num_parts * num_chunks)

    def size(self, chunks: range, num_chunks: int) -> int:
        """Return how many elements the chunks have."""
        return self.offset(chunks.stop, num_chunks) - self.offset(chunks.start, num_chunks)

    def largest(self, num_chunks: int) -> int:
        """Return the size of the largest of so many chunks of a whole buffer; of a part, what none of them exceeds."""
        return -(-self.length // (self.num_parts * num_chunks))

    def subrange(self, part: int, num_parts: int) -> ChunkLayout:
        """Return one of ``num_state_slots`` parts of these elements."""
        return ChunkLayout(self.length, self.part * num_parts + part, self.num_parts * num_parts)


@dataclass(frozen=True, slots=True)
class RankSchedule:
    """What one rank of a fabric does: its part of every round, in an order that cannot deadlock.

    Args:
        rank: of the fabric.
        group: the rank of the fabric that holds each member's buffer; one rank may hold several.
        num_chunks: into which buffers are cut.
        steps: its moves, round by round; rounds without it are left out.
    """

    rank: int
    group: tuple[int, ...]
    num_chunks: int
    steps: tuple[RankRound, ...]


def rank_schedule(schedule: AllReduceSchedule, group: Sequence[int], rank: int) -> RankSchedule:
    """Return the rank's row.

    Within a round the moves have colours such that a rank has no two of one colour, and every rank goes through its
    moves by colour. So all ranks follow one order of all messages, and the first that is not over never waits: there is
    no deadlock, also when a send returns only after its receive. In an exchange the lower rank sends first, in a ring
    every second one.

    Args:
        schedule: the all-reduce.
        group: the rank of the fabric that holds each member's buffer.
        rank: of the fabric.
    """
    steps = (
        tuple(move for move in serialize_round(moves, group) if rank in endpoints(move, group))
        for moves in schedule.rounds
    )
    return RankSchedule(rank, tuple(group), schedule.num_chunks, tuple(step for step in steps if step))


def serialize_round(transfers: Round, group: Sequence[int]) -> list[ChunkTransfer]:
    """Return the moves of a round by colour."""
    colours: list[int] = []
    taken: dict[int, set[int]] = {}
    for move in transfers:
        used = set[int]().union(*(taken.setdefault(rank, set()) for rank in endpoints(move, group)))
        colour = next(colour for colour in range(len(used) + 1) if colour not in used)
        for rank in endpoints(move, group):
            taken[rank].add(colour)
        colours.append(colour)
    return [transfers[index] for index in sorted(range(len(transfers)), key=lambda index: colours[index])]


def endpoints(transfer: ChunkTransfer, group: Sequence[int]) -> tuple[int, int]:
    """Return the ranks of the fabric between which a move goes; twice the same where one rank holds both buffers."""
    return group[transfer.sender], group[transfer.receiver]


def remap(rounds: Iterable[Round], members: Sequence[int], *, scale: int = 1, first: int = 0) -> Rounds:
    """Return the same moves among other members, each chunk as ``scale`` chunks, beginning at chunk ``first``."""

    def moved(move: ChunkTransfer) -> ChunkTransfer:
        chunks = range(first + move.chunks.start * scale, first + move.chunks.stop * scale)
        return replace(move, sender=members[move.sender], receiver=members[move.receiver], chunks=chunks)

    return tuple(tuple(moved(move) for move in moves) for moves in rounds)


def in_parallel(several: Iterable[Rounds]) -> Rounds:
    """Return rounds in which all go on at the same time; no two of them share a member."""
    return tuple(tuple(chain.from_iterable(moves)) for moves in zip_longest(*several, fillvalue=()))


def reverse_as_broadcast(rounds: Rounds) -> Rounds:
    """Return the broadcast that takes every sum of a reduction back the way its parts came."""
    return tuple(
        tuple(ChunkTransfer(move.receiver, move.sender, move.chunks, "copy") for move in moves)
        for moves in reversed(rounds)
    )


def _format_step(step: RankRound, rank: int) -> str:
    signs = {"add": "+<", "copy": "=<"}

    def word(move: ChunkTransfer) -> str:
        chunks = f"{move.chunks.start}" if len(move.chunks) == 1 else f"{move.chunks.start}:{move.chunks.stop}"
        return f"{chunks}>{move.receiver}" if move.sender == rank else f"{chunks}{signs[move.op]}{move.sender}"

    return ",".join(map(word, step))
