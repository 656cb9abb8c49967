"""Schedules of all-reduce algorithms: which rank sends which part of its buffer to whom, in which round.

A schedule is a list of rounds of transfers. In one round a rank sends at most one message and receives at most one,
simultaneously: the single-ported, full-duplex model of the literature, in which a round is a *step*. Every message
carries the sender's values from before the round.

A buffer is divided into ``num_chunks`` nearly equal chunks, so a schedule is independent of the buffer's length. If
there are fewer elements than chunks, some messages are empty, but they are sent: numbers of steps and messages hold for
every length.

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
    """One message: chunks of the sender's buffer, which the receiver adds to its own or copies."""

    sender: int
    receiver: int
    chunks: range
    op: TransferOp


Round: TypeAlias = tuple[ChunkTransfer, ...]
Rounds: TypeAlias = tuple[Round, ...]
RankRound: TypeAlias = tuple[ChunkTransfer, ...]


@dataclass(frozen=True, slots=True)
class AllReduceSchedule:
    """An all-reduce of ``num_ranks`` members, each with a buffer of ``num_chunks`` chunks."""

    num_ranks: int
    num_chunks: int
    rounds: Rounds

    def __str__(self) -> str:
        """Format one line per member: ``2>1`` sends chunk 2 to 1, ``1+<0`` adds chunk 1 of 0, ``1=<0`` copies it.

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
    """Part ``part`` of ``num_parts`` of a buffer of ``length`` elements, and its division into chunks."""

    length: int
    part: int = 0
    num_parts: int = 1

    def offset(self, chunk: int, num_chunks: int) -> int:
        """Return the offset of a chunk in the whole buffer; the remainder is distributed evenly.

        Example:
            >>> [ChunkLayout(10).offset(chunk, 4) for chunk in range(5)]
            [0, 2, 5, 7, 10]
        """
        return (self.part * num_chunks + chunk) * self.length // (self.num_parts * num_chunks)

    def size(self, chunks: range, num_chunks: int) -> int:
        """Return the number of elements of the chunks."""
        return self.offset(chunks.stop, num_chunks) - self.offset(chunks.start, num_chunks)

    def largest(self, num_chunks: int) -> int:
        """Return the size of the largest chunk; for a part of a buffer, an upper bound."""
        return -(-self.length // (self.num_parts * num_chunks))

    def subrange(self, part: int, num_parts: int) -> ChunkLayout:
        """Return one of ``num_parts`` parts of these elements."""
        return ChunkLayout(self.length, self.part * num_parts + part, self.num_parts * num_parts)


@dataclass(frozen=True, slots=True)
class RankSchedule:
    """One rank's transfers, in a deadlock-free order.

    Args:
        rank: of the fabric.
        group: the rank that holds each member's buffer; one rank may hold several.
        num_chunks: of a buffer.
        steps: its transfers, round by round, without rounds that it takes no part in.
    """

    rank: int
    group: tuple[int, ...]
    num_chunks: int
    steps: tuple[RankRound, ...]


def rank_schedule(schedule: AllReduceSchedule, group: Sequence[int], rank: int) -> RankSchedule:
    """Return the rank's part of a schedule.

    Within a round, transfers have colors such that a rank has no two of one color, and every rank executes its
    transfers by color. So all ranks follow one global order of messages, whose first incomplete one never waits: no
    deadlock, even if a send blocks until its receive. In an exchange the lower rank sends first; in a ring every second
    one does.

    Args:
        schedule: the all-reduce.
        group: the rank that holds each member's buffer.
        rank: of the fabric.
    """
    steps = (
        tuple(move for move in serialize_round(moves, group) if rank in endpoints(move, group))
        for moves in schedule.rounds
    )
    return RankSchedule(rank, tuple(group), schedule.num_chunks, tuple(step for step in steps if step))


def serialize_round(transfers: Round, group: Sequence[int]) -> list[ChunkTransfer]:
    """Return the transfers of a round, ordered by color."""
    colors: list[int] = []
    colors_of_rank: dict[int, set[int]] = {}
    for move in transfers:
        used = set[int]().union(*(colors_of_rank.setdefault(rank, set()) for rank in endpoints(move, group)))
        color = next(color for color in range(len(used) + 1) if color not in used)
        for rank in endpoints(move, group):
            colors_of_rank[rank].add(color)
        colors.append(color)
    return [transfers[index] for index in sorted(range(len(transfers)), key=lambda index: colors[index])]


def endpoints(transfer: ChunkTransfer, group: Sequence[int]) -> tuple[int, int]:
    """Return the ranks of sender and receiver, which are equal if one rank holds both buffers."""
    return group[transfer.sender], group[transfer.receiver]


def remap(rounds: Iterable[Round], members: Sequence[int], *, scale: int = 1, first: int = 0) -> Rounds:
    """Return the transfers among other members, each chunk as ``scale`` chunks, starting at chunk ``first``."""

    def remap_transfer(move: ChunkTransfer) -> ChunkTransfer:
        chunks = range(first + move.chunks.start * scale, first + move.chunks.stop * scale)
        return replace(move, sender=members[move.sender], receiver=members[move.receiver], chunks=chunks)

    return tuple(tuple(remap_transfer(move) for move in moves) for moves in rounds)


def in_parallel(schedules: Iterable[Rounds]) -> Rounds:
    """Merge schedules, which share no member, round by round."""
    return tuple(tuple(chain.from_iterable(moves)) for moves in zip_longest(*schedules, fillvalue=()))


def reverse_as_broadcast(rounds: Rounds) -> Rounds:
    """Return the broadcast that sends every sum of a reduction back along its path."""
    return tuple(
        tuple(ChunkTransfer(move.receiver, move.sender, move.chunks, "copy") for move in moves)
        for moves in reversed(rounds)
    )


def _format_step(step: RankRound, rank: int) -> str:
    symbols = {"add": "+<", "copy": "=<"}

    def format_transfer(move: ChunkTransfer) -> str:
        chunks = f"{move.chunks.start}" if len(move.chunks) == 1 else f"{move.chunks.start}:{move.chunks.stop}"
        return f"{chunks}>{move.receiver}" if move.sender == rank else f"{chunks}{symbols[move.op]}{move.sender}"

    return ",".join(map(format_transfer, step))
