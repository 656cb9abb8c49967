"""Which words of other ranks a word waits for: the same whatever the clock says.

Messages of one value between two ranks arrive in the order in which they were sent, and the members of a group
call its collectives in one order, so that who meets whom can be read off the rows without running them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from counterpoint.program.execution_order import GroupInterner
from counterpoint.program.instruction import (
    ApplyPushes,
    Collective,
    Commit,
    Instruction,
    Pull,
    Push,
    Recv,
    Send,
    TensorRef,
)
from counterpoint.program.program import Instructions

Location: TypeAlias = tuple[int, int]
"""A rank, and the index of a word in its row."""
TypeIndices: TypeAlias = defaultdict[type[Instruction], list[int]]
"""The indices of the words of each kind in one row."""


@dataclass(slots=True)
class CommMatches:
    """Who meets whom.

    Args:
        source: for each receive the send that it takes; for each push the serve that answers it, for each pull the
            serve that it waits for; for each wait its own start.
        seat: for each push and pull its place in the serve's order of workers and units.
        call: for each collective, start and commit the number of the call; its members share it.
        members: the places of each call.
    """

    producer: dict[Location, Location] = field(default_factory=dict)
    slot: dict[Location, int] = field(default_factory=dict)
    collective_id: dict[Location, int] = field(default_factory=dict)
    participants: list[list[Location]] = field(default_factory=list)


def match_communication(rows: Sequence[Instructions], type_indices: Sequence[TypeIndices] | None = None) -> CommMatches:
    """Return who meets whom in rows that keep the laws 1 to 3; ``kinds`` are those of the rows, if they are at hand."""
    found = CommMatches()
    type_indices = type_indices or [index_by_type(row) for row in rows]
    _match_messages(rows, type_indices, found)
    _match_collectives(rows, type_indices, found)
    _match_servers(rows, type_indices, found)
    return found


def index_by_type(row: Instructions) -> TypeIndices:
    """Return at which indices a row has words of each kind: most words meet nobody, and are looked at only once."""
    places: TypeIndices = defaultdict(list)
    for index, word in enumerate(row):
        places[type(word)].append(index)
    return places


def _match_messages(rows: Sequence[Instructions], type_indices: Sequence[TypeIndices], found: CommMatches) -> None:
    sent: defaultdict[tuple[TensorRef, int, int], deque[int]] = defaultdict(deque)
    for rank, row in enumerate(rows):
        for index in type_indices[rank][Send]:
            word = row[index]
            assert isinstance(word, Send), "found by its kind"
            sent[word.tensor, rank, word.peer].append(index)
    for rank, row in enumerate(rows):
        for index in type_indices[rank][Recv]:
            word = row[index]
            assert isinstance(word, Recv), "found by its kind"
            found.producer[rank, index] = (word.peer, sent[word.tensor, word.peer, rank].popleft())


def _match_collectives(rows: Sequence[Instructions], type_indices: Sequence[TypeIndices], found: CommMatches) -> None:
    groups = GroupInterner()
    calls: defaultdict[int, list[int]] = defaultdict(list)  # of each group
    members, call = found.participants, found.collective_id
    for rank, row in enumerate(rows):
        made: defaultdict[int, int] = defaultdict(int)
        started: dict[tuple[int, str, TensorRef], int] = {}
        for index in sorted(type_indices[rank][Collective] + type_indices[rank][Commit]):
            word = row[index]
            assert isinstance(word, Collective | Commit), "found by its kind"
            group = groups.intern(word.group)
            if isinstance(word, Collective) and word.phase:
                if word.phase == "wait":
                    found.producer[rank, index] = (rank, started[group, word.op, word.tensor])
                    continue
                started[group, word.op, word.tensor] = index
            numbers, nth = calls[group], made[group]
            if nth == len(numbers):
                numbers.append(len(members))
                members.append([])
            made[group] = nth + 1
            number, place = numbers[nth], (rank, index)
            members[number].append(place)
            call[place] = number


def _match_servers(rows: Sequence[Instructions], type_indices: Sequence[TypeIndices], found: CommMatches) -> None:
    seats: defaultdict[tuple[int, int, tuple[int, ...]], deque[tuple[int, int]]] = defaultdict(deque)
    for rank, row in enumerate(rows):
        for index in type_indices[rank][ApplyPushes]:
            word = row[index]
            assert isinstance(word, ApplyPushes), "found by its kind"
            pairs = [(worker, unit) for worker in word.workers for unit in word.units]
            for seat, (worker, unit) in enumerate(pairs):
                seats[rank, worker, unit].append((index, seat))
    if not seats:
        return
    taken: defaultdict[tuple[int, int, tuple[int, ...], type[Instruction]], int] = defaultdict(int)
    for rank, row in enumerate(rows):
        for index in sorted(type_indices[rank][Push] + type_indices[rank][Pull]):
            word = row[index]
            assert isinstance(word, Push | Pull), "found by its kind"
            key = (word.peer, rank, word.tensor.blocks)
            serve, seat = seats[key][taken[*key, type(word)]]
            taken[*key, type(word)] += 1
            found.producer[rank, index] = (word.peer, serve)
            found.slot[rank, index] = seat
