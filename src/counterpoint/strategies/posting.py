"""When a stage takes what others send it: as late as it can, and no later than it must so that nobody waits for ever.

A send may block until its receive is posted (law 2). A receive right before its use costs no waiting, but where two
stages send to each other, as with several chunks, both may then block. Such a receive is posted earlier: where the
stage stands when the value is sent, if all take equally long; so that it costs no time there either.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from counterpoint.program.instruction import Recv, Send, Value
from counterpoint.strategies.orders.order import Turn

Item: TypeAlias = Turn | Send | Recv
"""What a seat does: a turn, or a message; its peer is a seat, too."""

Hop: TypeAlias = tuple[Value, int]
"""What is sent or received, to or from which seat."""

_Letter: TypeAlias = tuple[Value, int, int]
"""What is sent, from which seat to which."""

TICKS = {"F": 1, "B": 2, "Bi": 1, "Bw": 1}
"""How long turns take on the clock by which receives are posted."""


class Ends(NamedTuple):
    """What a turn takes from other seats, and what it gives them.

    Args:
        taken: for a seat and a turn what it needs first.
        given: for a seat and a turn what it makes.
    """

    taken: Callable[[int, Turn], Sequence[Hop]]
    given: Callable[[int, Turn], Sequence[Hop]]


def with_messages(turns: Sequence[Sequence[Turn]], ends: Ends) -> list[list[Item]]:
    """Return for every seat its turns with the messages between them.

    A value is sent right behind the turn that makes it. Messages from one seat to another are received in the order in
    which they are sent, and no deadlock comes of sends that block.

    Args:
        turns: what each seat does, in order.
        ends: what comes from where, and goes where.
    """
    rows = _received_late(turns, ends)
    board = _Board(rows)
    while True:
        board.play()
        sender = board.first_blocked()
        if sender is None:
            return rows
        board.post_early(sender)


def _received_late(turns: Sequence[Sequence[Turn]], ends: Ends) -> list[list[Item]]:
    """Put receives right before the turns that need them, with what the same sender has sent before."""
    letters: defaultdict[tuple[int, int], list[Value]] = defaultdict(list)
    for seat, row in enumerate(turns):
        for value, peer in (hop for turn in row for hop in ends.given(seat, turn)):
            letters[seat, peer].append(value)
    rows: list[list[Item]] = []
    for seat, row in enumerate(turns):
        waiting = {sender: list(reversed(found)) for (sender, to), found in letters.items() if to == seat}
        items: list[Item] = []
        there: set[Hop] = set()
        for turn in row:
            for needed in ends.taken(seat, turn):
                sender = needed[1]
                while needed not in there:
                    value = waiting[sender].pop()
                    items.append(Recv(value, sender))
                    there.add((value, sender))
            items.append(turn)
            items += (Send(*made) for made in ends.given(seat, turn))
        rows.append(items)
    return rows


class _Board:
    """How far every seat has come when sends block, and when all would happen if they did not."""

    def __init__(self, rows: list[list[Item]]) -> None:
        self.rows = rows
        self.cursor = [0] * len(rows)
        self.posted: set[_Letter] = set()
        self.sent_at, self.starts = _times(rows)

    def play(self) -> None:
        """Move every seat as far as it can go."""
        moved = True
        while moved:
            moved = False
            for seat, row in enumerate(self.rows):
                while self.cursor[seat] < len(row) and self.may_pass(seat, row[self.cursor[seat]]):
                    self.cursor[seat] += 1
                    moved = True

    def may_pass(self, seat: int, item: Item) -> bool:
        """Tell whether a seat can do its next item; one that is sent is posted."""
        match item:
            case Send(value, peer):
                at = self.cursor[peer]
                if Recv(value, seat) not in self.rows[peer][at : self.end_of_batch(peer, at)]:
                    return False
                self.posted.add((value, seat, peer))
                return True
            case Recv(value, peer):
                return (value, peer, seat) in self.posted
            case Turn():
                return True

    def end_of_batch(self, seat: int, at: int) -> int:
        """Return where the messages that stand side by side from an index on end."""
        row = self.rows[seat]
        while at < len(row) and not isinstance(row[at], Turn):
            at += 1
        return at

    def first_blocked(self) -> int | None:
        """Return the seat whose send blocks and would come first; None when all have come to their end."""
        blocked = []
        for seat, row in enumerate(self.rows):
            head = row[self.cursor[seat]] if self.cursor[seat] < len(row) else None
            if isinstance(head, Send):
                blocked.append((self.sent_at[head.value, seat, head.peer], seat))
        return min(blocked)[1] if blocked else None

    def post_early(self, sender: int) -> None:
        """Move the receive of what a seat sends up to where its peer stands at that time."""
        send = self.rows[sender][self.cursor[sender]]
        assert isinstance(send, Send), "it blocks"
        recv = Recv(send.value, sender)
        row, starts = self.rows[send.peer], self.starts[send.peer]
        at = self.end_of_batch(send.peer, self.cursor[send.peer])
        while starts[row[at]] < self.sent_at[send.value, sender, send.peer]:
            at = self.end_of_batch(send.peer, at + 1)
        row.remove(recv)
        row.insert(at, recv)


def _times(rows: Sequence[Sequence[Item]]) -> tuple[dict[_Letter, int], list[dict[Item, int]]]:
    """Return when every value is sent, and when every turn starts, if nothing but turns takes time."""
    now, cursor = [0] * len(rows), [0] * len(rows)
    sent_at: dict[_Letter, int] = {}
    starts: list[dict[Item, int]] = [{} for _ in rows]
    moved = True
    while moved:
        moved = False
        for seat, row in enumerate(rows):
            while cursor[seat] < len(row):
                match row[cursor[seat]]:
                    case Recv(value, peer):
                        if (value, peer, seat) not in sent_at:
                            break
                        now[seat] = max(now[seat], sent_at[value, peer, seat])
                    case Send(value, peer):
                        sent_at[value, seat, peer] = now[seat]
                    case Turn() as turn:
                        starts[seat][turn] = now[seat]
                        now[seat] += TICKS[turn.kind]
                cursor[seat] += 1
                moved = True
    return sent_at, starts
