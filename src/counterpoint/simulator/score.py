"""What the clock plays: the words of those who speak, what each costs, and what it crosses on its way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

from counterpoint.program import trace
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
    grad,
    weight,
)
from counterpoint.program.partners import Partners, Place
from counterpoint.program.program import Words
from counterpoint.simulator.costs import Costs
from counterpoint.simulator.hands import Hand
from counterpoint.simulator.network import Message
from counterpoint.simulator.places import Lane, Places
from counterpoint.simulator.sharing import Use

Key: TypeAlias = tuple[object, ...]
"""What a word may wait for: the place of a send, the places of a call, or an answer."""


STREAM_SHARE = 0.5
"""Of a message larger than the pipe that it goes through, one end puts a piece in while the other one waits for it."""

WHOLE = Fraction(1)


@dataclass(frozen=True, slots=True)
class Transfer:
    """Something that wants links of its members for a while.

    Args:
        key: what it is.
        members: whose links, and for which words.
        seconds: how long it takes if nobody is in its way.
        way: which of a rank's ways out it takes, see :data:`counterpoint.simulator.places.Lane`.
        crossing_s: of the seconds, how many it takes on links that others may cross at the same time.
        uses: these links.
    """

    key: Key
    members: tuple[Place, ...]
    seconds: float
    way: int = 0
    crossing_s: float = 0.0
    uses: tuple[Use, ...] = ()

    @property
    def lanes(self) -> list[Lane]:
        """The ways that are its own while it is under way."""
        return [(rank, self.way) for rank, _ in self.members]


@dataclass(frozen=True, slots=True)
class Score:
    """What is played: rows, who meets whom, which rank speaks for which, and what each word costs.

    Args:
        rows: the flat rows of all ranks.
        partners: who meets whom in them.
        speaker: for each rank the one that speaks for its class.
        seconds: for each speaker the seconds of each of its words, on the processor or on the link.
        crossings: likewise, of these the seconds on links that ranks share; empty where they share none.
        hands: likewise, for how long they keep the rank's own processor busy.
        costs: for what a server does with each push.
        places: where the ranks are.
    """

    rows: Sequence[Words]
    partners: Partners
    speaker: Sequence[int]
    seconds: Mapping[int, Sequence[float]]
    crossings: Mapping[int, Sequence[float]]
    hands: Mapping[int, Sequence[Hand]]
    costs: Costs
    places: Places

    def word(self, place: Place) -> Instruction:
        """Return the word at a place."""
        return self.rows[place[0]][place[1]]

    def hand(self, rank: int, index: int) -> Hand:
        """Return what a speaker's word asks of its processor."""
        return self.hands[rank][index]

    def message(self, rank: int, index: int) -> Transfer:
        """Return what a send or a push of a speaker puts on the link."""
        place, seconds = (rank, index), self.seconds[rank][index]
        if not self.places.cluster.levels:
            return Transfer(place, (place,), seconds)
        word = self.rows[rank][index]
        assert isinstance(word, Send | Push), "nothing else is a message"
        return self._between(place, place, (rank, word.peer), (seconds, self._crossing(place)))

    def call(self, number: int, places: tuple[Place, ...]) -> Transfer:
        """Return what a collective puts on the links of its members; ``places`` are those of their speakers."""
        rank, index = max(places, key=lambda place: self.seconds[place[0]][place[1]])
        seconds, crossing_s = self.seconds[rank][index], self._crossing((rank, index))
        if not self.places.cluster.levels:
            return Transfer(places, places, seconds)
        members = self.partners.members[number]
        uses = self.places.call(members) if crossing_s else ()
        ranks = tuple([one for one, _ in members])
        return Transfer(places, places, seconds, self.places.outwards(ranks), crossing_s, uses)

    def answer(self, server: Place, seat: int) -> tuple[Hand, Transfer]:
        """Return what it takes a server to apply the push with a seat in its order, and its answer."""
        rank, index = server
        word = self.rows[rank][index]
        assert isinstance(word, Serve), "nothing else answers"
        unit, worker = word.units[seat % len(word.units)], word.workers[seat // len(word.units)]
        update_s, answer_s = self.costs.serve_s(unit, rank, worker)
        if word.answers:  # while it puts in what is large, the worker takes it out: together they compute all the time
            update_s += self.costs.hand_s(Send(weight(unit), worker), WHOLE, rank)
        hand = hand_of(Recv(grad(unit), worker), self.costs, rank, WHOLE, update_s)
        crossing_s = 0.0
        if self.places.has_cards:
            crossing_s = self.costs.crossing_s(Send(weight(unit), worker), WHOLE, rank)
        transfer = self._between(("answer", *server, seat), server, (rank, worker), (answer_s, crossing_s))
        own_s = hand.seconds / self.places.cluster.speed(rank)
        return Hand(own_s, share=hand.share, over_s=own_s), transfer

    def _crossing(self, place: Place) -> float:
        return self.crossings[place[0]][place[1]] if self.crossings else 0.0

    def _between(self, key: Key, place: Place, ends: tuple[int, int], times: tuple[float, float]) -> Transfer:
        seconds, crossing_s = times
        if not self.places.cluster.levels:
            return Transfer(key, (place,), seconds)
        uses = self.places.message(*ends) if crossing_s else ()
        return Transfer(key, (place,), seconds, self.places.outwards(ends), crossing_s, uses)


def hand_of(word: Message, costs: Costs, rank: int, part: Fraction = WHOLE, own_s: float = 0.0) -> Hand:
    """Return what a message asks of a processor, with some seconds in which it does something else for it.

    Args:
        word: that says or hears the message.
        costs: of words.
        rank: whose word it is.
        part: of the value that is at hand.
        own_s: for how long it computes beside.
    """
    seconds, is_streamed = costs.hand_s(word, part, rank), costs.is_streamed(word, rank)
    if not is_streamed or not seconds:
        return Hand(seconds + own_s, is_streamed)
    return Hand(seconds + own_s, is_streamed, (STREAM_SHARE * seconds + own_s) / (seconds + own_s))


def lane_of(word: Instruction) -> trace.Lane:
    """Return where the time goes that a word keeps its rank's processor busy."""
    match word:
        case Forward() | Recompute() | Backward() | Update() | Serve():
            return "compute"
        case Send() | Push() | Release() | Swap():
            return "link"
        case Recv() | Pull() | Commit() | Collective():
            return "wait"


def goes_on_beside(word: Instruction) -> bool:
    """Tell whether a rank does its next word while this one is on the link."""
    return isinstance(word, Send | Push) or (isinstance(word, Collective) and word.phase == "start")
