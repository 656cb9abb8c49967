"""What each word of a row takes, on its rank's processor and on its links, while nothing else is in its way."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from counterpoint.model.spec import Unit
from counterpoint.program.instruction import (
    Backward,
    Collective,
    Commit,
    Compute,
    Forward,
    Group,
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
from counterpoint.program.one_copy import groups_with_one_copy
from counterpoint.program.program import Words
from counterpoint.program.runs import goes_on
from counterpoint.simulator.costs import Costs
from counterpoint.simulator.hands import IDLE_HAND, Hand
from counterpoint.simulator.moves import row_moves
from counterpoint.simulator.network import Message
from counterpoint.simulator.places import has_cards
from counterpoint.simulator.score import WHOLE, hand_of
from counterpoint.world.cluster import Cluster

NONE = Fraction(0)

ALIKE = Cluster()
"""Ranks that are alike, none in the way of another."""


@dataclass(frozen=True, slots=True)
class Times:
    """What each word of a row takes, by where.

    Args:
        seconds: on its processor or its link.
        crossings: of that on links that ranks share; empty where they share none.
        hands: on the rank's own processor.
        least_s: what all of it takes at least, whatever others do: each processor and each link does one at a time.
    """

    seconds: Sequence[float]
    crossings: Sequence[float]
    hands: Sequence[Hand]
    least_s: float


def time_row(row: Words, costs: Costs, *, rank: int = 0, cluster: Cluster = ALIKE) -> Times:
    """Return what the words of a row take.

    A gradient that was shared out is summed and applied in part. Adjacent words that are one call begin it once. What a
    block's backward makes for a microbatch is added to what others before it have left, until an update has used it.

    What a rank waits for it takes when it is there: a started collective where it is waited for. A rank that updates
    nothing has what a step costs beside its calls with its commit.

    Args:
        row: whose words.
        costs: of words.
        rank: whose row it is.
        cluster: how fast the rank computes, and what it shares with others.
    """
    timer = _Timer(row, costs, rank, cluster)
    passes = row_moves(row, timer.has_one_copy)
    before: Instruction | None = None
    times = []
    for word, moved in zip(row, passes, strict=True):
        times.append(timer.take(word, before, moved))
        before = word
    seconds, crossings, hands = map(list, zip(*times, strict=True)) if times else ([], [], [])
    return Times(seconds, crossings if timer.has_cards else [], hands, _least_s(row, times, cluster))


def _least_s(row: Words, times: Sequence[_Taken], cluster: Cluster) -> float:
    """Return what a rank needs for its words one by one, or for those on a link: on hosts it has two of them."""
    own_s = inside_s = across_s = 0.0
    for word, (seconds, crossing_s, hand) in zip(row, times, strict=True):
        own_s += hand.seconds
        if isinstance(word, Compute | Update):
            continue
        if crossing_s:
            across_s += seconds
        else:
            inside_s += seconds
    return max(own_s, across_s, inside_s / 2 if cluster.levels else inside_s)


_Taken = tuple[float, float, Hand]
"""Seconds of a word, of these those on links that ranks share, and what it asks of its rank's processor."""

_NOTHING: _Taken = (0.0, 0.0, IDLE_HAND)


class _Timer:
    """Goes along a row; words that are equal but for their microbatches are looked at once."""

    def __init__(self, row: Words, costs: Costs, rank: int, cluster: Cluster) -> None:
        self.costs, self.rank, self.cluster = costs, rank, cluster
        self.speed, self.has_cards = cluster.speed(rank), has_cards(cluster)
        self.updates = any(isinstance(word, Update) for word in row)
        self.together = groups_with_one_copy(row)
        self.on_one_host: dict[Group, bool] = {}
        self.parts: dict[Unit, Fraction] = {}  # of gradients that were shared out
        self.held: set[int] = set()  # blocks of which there is a gradient
        self.known: dict[Hashable, _Taken] = {}

    def has_one_copy(self, word: Collective) -> bool:
        """Tell whether the members of a collective have its value in common memory."""
        group = word.group
        if self.together.get(word.value.blocks) != group:
            return False
        if group not in self.on_one_host:
            self.on_one_host[group] = len(set(map(self.cluster.host, group))) == 1
        return self.on_one_host[group]

    def take(self, word: Instruction, before: Instruction | None, passes: float) -> _Taken:
        """Note a word that goes over its rank's memory so many times, and return what it takes."""
        match word:
            case Forward() | Recompute() | Backward() | Update():
                return self.compute(word, begins=before is None or not goes_on(before, word))
            case Collective():
                return self.collect(word, passes)
            case Send() | Push() | Recv() | Pull():
                code = "" if isinstance(word, Pull) else word.code
                key = (type(word), word.value.name, word.value.blocks, word.peer, code, passes)
                return self.known[key] if key in self.known else self.keep(key, self.talk(word, passes))
            case Commit():
                own_s = 0.0 if self.updates else self.costs.call_s(word)
                return self.linked(word, WHOLE, Hand(self.costs.hand_s(word, WHOLE, self.rank) + own_s))
            case Release():
                own_s = passes * self.costs.pass_s(word)
                return (0.0, 0.0, Hand(own_s, over_s=own_s)) if passes else _NOTHING
            case Serve() | Swap():
                return _NOTHING

    def compute(self, word: Forward | Recompute | Backward | Update, *, begins: bool) -> _Taken:
        """Return what a word takes that computes, and that begins a call or goes on with one."""
        part, adds, over_s = WHOLE, False, 0.0
        if isinstance(word, Update):
            self.held.difference_update(word.unit)
            part = self.parts.get(word.unit, WHOLE)
            key: Hashable = (Update, word.unit, part.denominator, part.numerator, begins)
        elif isinstance(word, Backward):
            if word.part != "input":
                adds = word.block in self.held
                self.held.add(word.block)
            key = (Backward, word.block, word.part, adds, begins)
        else:
            key = (type(word), word.block, begins)
        if key in self.known:
            return self.known[key]
        seconds = self.costs.compute_s(word, part)
        if isinstance(word, Update):
            over_s = seconds - self.costs.compute_s(word, NONE)
        seconds += self.costs.call_s(word) if begins else 0.0
        if isinstance(word, Backward) and adds:
            seconds += self.costs.add_s(word.block)
        hand = Hand(seconds / self.speed, over_s=over_s / self.speed)
        return self.keep(key, (hand.seconds, 0.0, hand))

    def collect(self, word: Collective, passes: float) -> _Taken:
        """Return what a collective takes: started, it is on the link, and in hand where it is waited for."""
        value, part = word.value, WHOLE
        if value.name == "grad":
            part = self.parts.get(value.blocks, WHOLE) if word.verb == "all_reduce" else WHOLE
        if word.verb == "reduce_scatter" and word.phase != "wait":
            self.parts[value.blocks] = Fraction(1, len(word.group))
        parted = part.denominator, part.numerator
        key = (word.verb, word.code, value.name, value.blocks, word.group, word.phase, parted, passes)
        if key in self.known:
            return self.known[key]
        hand = IDLE_HAND
        if word.phase != "start":
            has_one_copy = self.has_one_copy(word)
            own_s = self.costs.hand_s(word, part, self.rank, has_one_copy=has_one_copy)
            meet_s = self.costs.hand_s(word, NONE, self.rank, has_one_copy=has_one_copy)
            moved_s = passes * self.costs.pass_s(word)
            hand = Hand(own_s + moved_s, over_s=own_s - meet_s + moved_s)
        return self.keep(key, (0.0, 0.0, hand) if word.phase == "wait" else self.linked(word, part, hand))

    def talk(self, word: Message, passes: float) -> _Taken:
        """Return what a message takes where it is said, or heard."""
        hand = hand_of(word, self.costs, self.rank, own_s=passes * self.costs.pass_s(word))
        return self.linked(word, WHOLE, hand) if isinstance(word, Send | Push) else (0.0, 0.0, hand)

    def linked(self, word: Send | Push | Collective | Commit, part: Fraction, hand: Hand) -> _Taken:
        """Return what a word takes that is on a link."""
        crossing_s = self.costs.crossing_s(word, part, self.rank) if self.has_cards else 0.0
        return self.costs.link_s(word, part, self.rank), crossing_s, hand

    def keep(self, key: Hashable, taken: _Taken) -> _Taken:
        """Return what a word takes, and remember it for those like it."""
        self.known[key] = taken
        return taken
