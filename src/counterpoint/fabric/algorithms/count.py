"""What a schedule costs, read off it: steps, messages, bytes and additions of every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from counterpoint.fabric.algorithms.schedule import Extent, Move, Schedule, ends


@dataclass(frozen=True, slots=True)
class Counts:
    """What one rank does.

    Args:
        num_steps: rounds in which it sends or receives.
        num_messages: those it sends.
        sent_bytes: in them, without frames.
        reduced_bytes: that it adds to its own.
    """

    num_steps: int = 0
    num_messages: int = 0
    sent_bytes: int = 0
    reduced_bytes: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.num_steps + other.num_steps,
            self.num_messages + other.num_messages,
            self.sent_bytes + other.sent_bytes,
            self.reduced_bytes + other.reduced_bytes,
        )


def count(
    schedule: Schedule, extent: Extent, *, element_bytes: int = 1, group: Sequence[int] | None = None
) -> dict[int, Counts]:
    """Return what each rank of the group does to reduce buffers of so many elements.

    Args:
        schedule: the all-reduce.
        extent: the elements.
        element_bytes: size of one of them.
        group: the rank that holds each member's buffer; by default member ``i`` is rank ``i``.
    """
    group = tuple(group or range(schedule.num_ranks))
    totals = dict.fromkeys(group, Counts())
    for moves in schedule.rounds:
        for rank in {rank for move in moves if travels(move, group) for rank in ends(move, group)}:
            totals[rank] += Counts(num_steps=1)
        for move in moves:
            size = extent.size(move.chunks, schedule.num_chunks) * element_bytes
            for rank in set(ends(move, group)):
                totals[rank] += share_of(move, group, rank, size)
    return totals


def share_of(move: Move, group: Sequence[int], rank: int, num_bytes: int) -> Counts:
    """Return what one move means to a rank, but for the step."""
    sender, receiver = ends(move, group)
    sends = sender == rank != receiver
    adds = receiver == rank and move.verb == "add"
    return Counts(0, int(sends), num_bytes if sends else 0, num_bytes if adds else 0)


def num_steps(schedule: Schedule, group: Sequence[int] | None = None) -> int:
    """Return in how many rounds anything goes from one rank to another."""
    group = tuple(group or range(schedule.num_ranks))
    return sum(any(travels(move, group) for move in moves) for moves in schedule.rounds)


def travels(move: Move, group: Sequence[int]) -> bool:
    """Whether it goes from one rank to another, and not between buffers of one rank."""
    sender, receiver = ends(move, group)
    return sender != receiver
