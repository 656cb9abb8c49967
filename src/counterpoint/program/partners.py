"""Which words of other ranks a word waits for: the same whatever the clock says.

Messages of one value between two ranks arrive in the order in which they were sent, and the members of a group
call its collectives in one order, so that who meets whom can be read off the rows without running them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from counterpoint.program.instruction import Collective, Commit, Instruction, Pull, Push, Recv, Send, Serve, Value
from counterpoint.program.program import Words
from counterpoint.program.walk import Groups

Place: TypeAlias = tuple[int, int]
"""A rank, and the index of a word in its row."""
Kinds: TypeAlias = defaultdict[type[Instruction], list[int]]
"""The indices of the words of each kind in one row."""


@dataclass(slots=True)
class Partners:
    """Who meets whom.

    Args:
        source: for each receive the send that it takes; for each push the serve that answers it, for each pull the
            serve that it waits for; for each wait its own start.
        seat: for each push and pull its place in the serve's order of workers and units.
        call: for each collective, start and commit the number of the call; its members share it.
        members: the places of each call.
    """

    source: dict[Place, Place] = field(default_factory=dict)
    seat: dict[Place, int] = field(default_factory=dict)
    call: dict[Place, int] = field(default_factory=dict)
    members: list[list[Place]] = field(default_factory=list)


def find_partners(rows: Sequence[Words], kinds: Sequence[Kinds] | None = None) -> Partners:
    """Return who meets whom in rows that keep the laws 1 to 3; ``kinds`` are those of the rows, if they are at hand."""
    found = Partners()
    kinds = kinds or [by_kind(row) for row in rows]
    _pair_messages(rows, kinds, found)
    _join_calls(rows, kinds, found)
    _seat_workers(rows, kinds, found)
    return found


def by_kind(row: Words) -> Kinds:
    """Return at which indices a row has words of each kind: most words meet nobody, and are looked at only once."""
    places: Kinds = defaultdict(list)
    for index, word in enumerate(row):
        places[type(word)].append(index)
    return places


def _pair_messages(rows: Sequence[Words], kinds: Sequence[Kinds], found: Partners) -> None:
    sent: defaultdict[tuple[Value, int, int], deque[int]] = defaultdict(deque)
    for rank, row in enumerate(rows):
        for index in kinds[rank][Send]:
            word = row[index]
            assert isinstance(word, Send), "found by its kind"
            sent[word.value, rank, word.peer].append(index)
    for rank, row in enumerate(rows):
        for index in kinds[rank][Recv]:
            word = row[index]
            assert isinstance(word, Recv), "found by its kind"
            found.source[rank, index] = (word.peer, sent[word.value, word.peer, rank].popleft())


def _join_calls(rows: Sequence[Words], kinds: Sequence[Kinds], found: Partners) -> None:
    groups = Groups()
    calls: defaultdict[int, list[int]] = defaultdict(list)  # of each group
    members, call = found.members, found.call
    for rank, row in enumerate(rows):
        made: defaultdict[int, int] = defaultdict(int)
        started: dict[tuple[int, str, Value], int] = {}
        for index in sorted(kinds[rank][Collective] + kinds[rank][Commit]):
            word = row[index]
            assert isinstance(word, Collective | Commit), "found by its kind"
            group = groups.number(word.group)
            if isinstance(word, Collective) and word.phase:
                if word.phase == "wait":
                    found.source[rank, index] = (rank, started[group, word.verb, word.value])
                    continue
                started[group, word.verb, word.value] = index
            numbers, nth = calls[group], made[group]
            if nth == len(numbers):
                numbers.append(len(members))
                members.append([])
            made[group] = nth + 1
            number, place = numbers[nth], (rank, index)
            members[number].append(place)
            call[place] = number


def _seat_workers(rows: Sequence[Words], kinds: Sequence[Kinds], found: Partners) -> None:
    seats: defaultdict[tuple[int, int, tuple[int, ...]], deque[tuple[int, int]]] = defaultdict(deque)
    for rank, row in enumerate(rows):
        for index in kinds[rank][Serve]:
            word = row[index]
            assert isinstance(word, Serve), "found by its kind"
            pairs = [(worker, unit) for worker in word.workers for unit in word.units]
            for seat, (worker, unit) in enumerate(pairs):
                seats[rank, worker, unit].append((index, seat))
    if not seats:
        return
    taken: defaultdict[tuple[int, int, tuple[int, ...], type[Instruction]], int] = defaultdict(int)
    for rank, row in enumerate(rows):
        for index in sorted(kinds[rank][Push] + kinds[rank][Pull]):
            word = row[index]
            assert isinstance(word, Push | Pull), "found by its kind"
            key = (word.peer, rank, word.value.blocks)
            serve, seat = seats[key][taken[*key, type(word)]]
            taken[*key, type(word)] += 1
            found.source[rank, index] = (word.peer, serve)
            found.seat[rank, index] = seat
