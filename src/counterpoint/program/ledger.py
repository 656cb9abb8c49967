"""Run a program on symbols: which samples are in each gradient, which version stands in each weight.

Every backward leaves one mark ``(block, microbatch, slice)`` in its rank's gradient. Sums add marks up, shares
cut the range a rank is responsible for, updates consume marks and make a new version, and each knows the commit
that stood before it. What the ledger sees, the laws judge.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from counterpoint.errors import ProgramError
from counterpoint.program.accounts import (
    WHOLE,
    Brought,
    Decision,
    Entry,
    Mark,
    Marks,
    Span,
    UnitState,
    add_late,
    add_up,
    average,
    brought_by,
    gathered,
    released,
    share_out,
    with_mark,
)
from counterpoint.program.flights import Flights
from counterpoint.program.instruction import (
    OF_UNITS,
    Backward,
    Collective,
    Commit,
    Forward,
    Group,
    Pull,
    Push,
    Recompute,
    Recv,
    Release,
    Send,
    Serve,
    Swap,
    Update,
    Value,
)
from counterpoint.program.program import Program, Words
from counterpoint.program.text import format_instruction, format_unit
from counterpoint.program.units import Unit, first_gathered, units_by_block
from counterpoint.program.walk import Groups, show_places, walk


@dataclass(slots=True)
class Ledger:
    """What came of a program: the updates, what was held at its end, what entered coded sums, what its end dropped."""

    entries: list[Entry] = field(default_factory=list)
    states: dict[tuple[int, Unit], UnitState] = field(default_factory=dict)
    peak_in_flight: list[int] = field(default_factory=list)
    brought: Brought = field(default_factory=dict)
    dropped: dict[Unit, set[Mark]] = field(default_factory=dict)


def keep_ledger(program: Program, rows: Sequence[Words], heads: Sequence[Sequence[int]] | None = None) -> Ledger:
    """Run the flat rows on symbols.

    Args:
        program: whose rows they are.
        rows: the flat rows.
        heads: per rank the blocks at which microbatches in flight are counted; None for the one where most are.

    Raises:
        ProgramError: laws 4 to 7, wherever a word cannot do what it says.
    """
    book = _Book(program, rows, heads)
    for rank, index in walk(rows):
        book.enter(rank, index)
    return Ledger(book.entries, dict(book.states), book.flights.peak, book.brought, dict(book.dropped))


class _Book:
    def __init__(self, program: Program, rows: Sequence[Words], heads: Sequence[Sequence[int]] | None) -> None:
        self.rows = rows
        self.slices = [(row.slice_index, row.num_slices) for row in program.rows]
        self.units_of = units_by_block(rows)
        self.states: defaultdict[tuple[int, Unit], UnitState] = defaultdict(UnitState)
        self.entries: list[Entry] = []
        self.used: dict[tuple[Mark, Unit], int] = {}
        self.flights = Flights(len(rows), heads)
        self.mail: defaultdict[tuple[Value, int, int], list[tuple[Marks, int, frozenset[Group]]]] = defaultdict(list)
        self.groups = Groups()
        self.waiting: defaultdict[tuple[int, Value], list[int]] = defaultdict(list)
        self.pushes: defaultdict[tuple[int, Unit], list[tuple[Decision | None, Marks]]] = defaultdict(list)
        self.served: set[tuple[int, Unit]] = set()
        self.undecided, self.decisions = [set[int]() for _ in rows], list[Decision | None]([None] * len(rows))
        self.deciding: dict[int, Decision] = {}
        self.ages: dict[tuple[int, Unit], tuple[Marks, int]] = {}
        self.brought: Brought = {}
        self.ends = [len(row) - len(given.epilogue) for row, given in zip(rows, program.rows, strict=True)]
        self.dropped: defaultdict[Unit, set[Mark]] = defaultdict(set)
        for rank, row in enumerate(rows):
            for unit, group in first_gathered(row, self.units_of):
                size, at = len(group), group.index(rank)
                state = self.states[rank, unit]
                state.home = state.span = (Fraction(at, size), Fraction(at + 1, size))

    def wrong(self, law: int, rank: int, index: int, fact: str) -> ProgramError:
        """Return the error for a word that breaks a law, with the place shown."""
        text = format_instruction(self.rows[rank][index])
        return ProgramError(f"rank {rank}, {text}: {fact}\n{show_places(self.rows, {rank: index}, 'here')}", law)

    def enter(self, rank: int, index: int) -> None:  # noqa: C901, PLR0912 - one case for each instruction
        """A word has been carried out on symbols; a ProgramError says which law it breaks and where."""
        word = self.rows[rank][index]
        match word:
            case Forward():
                self.forward(rank, index, word)
            case Recompute():
                self.again(rank, index, word)
            case Backward():
                self.backward(rank, index, word)
            case Update(unit):
                self.update(rank, index, unit)
            case Swap(unit):
                self.swap(rank, index, unit)
            case Collective(phase="" | "start"):
                self.gather(rank, index, word)
            case Send(value, peer):
                self.send(rank, value, peer)
            case Recv(value, peer):
                self.receive(rank, value, peer)
            case Push(Value("grad", unit), peer):
                self.pushes[peer, unit].append((self.decisions[rank], self.taken(rank, unit)))
            case Serve(units):
                self.serve(rank, index, units)
            case Pull(value, peer) if (peer, value.blocks) in self.served:
                self.states[rank, value.blocks].versions.append(self.states[peer, value.blocks].versions[-1])
            case Release(value):
                self.release(rank, index, value)
            case Commit():
                self.commit(rank, index, word)
            case Collective() | Push() | Pull():
                pass  # weights that are drawn together are of no version that others have

    def commit(self, rank: int, index: int, word: Commit) -> None:
        """The members of a commit come one after the other; the last one closes it."""
        group = self.groups.number(word.group)
        decision = self.deciding.setdefault(group, Decision(word.group))
        decision.micros |= self.undecided[rank]
        if word.own:
            decision.micros_of[rank] = self.undecided[rank]
            decision.own[rank] = word.own
            earlier = [member for member in word.own if member < rank]
            if rank not in word.own or any(decision.own.get(member) != word.own for member in earlier):
                raise self.wrong(6, rank, index, "those whose samples share one mean must all say the same of it")
        self.undecided[rank] = set()
        self.decisions[rank] = decision
        if rank == word.group[-1]:
            del self.deciding[group]

    def forward(self, rank: int, index: int, word: Forward) -> None:
        """The block has read the weights of its units, and in which versions is noted."""
        if fact := self.flights.begin(rank, word):
            raise self.wrong(4, rank, index, fact)
        for unit in self.units_of[word.block]:
            self.used[(word.block, word.micro, self.slices[rank][0]), unit] = self.read(rank, index, unit, word.version)

    def again(self, rank: int, index: int, word: Recompute) -> None:
        """The block has been computed once more, from the versions that its forward read."""
        if fact := self.flights.again(rank, word):
            raise self.wrong(4, rank, index, fact)
        self.read_as_before(rank, index, word)

    def backward(self, rank: int, index: int, word: Backward) -> None:
        """The gradients of the block's units have its mark, from the versions that its forward read."""
        if fact := self.flights.end(rank, word):
            raise self.wrong(4, rank, index, fact)
        if word.has_input:
            self.read_as_before(rank, index, word)
        if word.has_weight:
            for unit in self.units_of[word.block]:
                state = self.states[rank, unit]
                state.whole = with_mark(state.whole, (word.block, word.micro, self.slices[rank][0]))
                state.has_buffer = True
            self.undecided[rank].add(word.micro)

    def read_as_before(self, rank: int, index: int, word: Recompute | Backward) -> None:
        """A block reads the versions again that its forward has read (law 5)."""
        for unit in self.units_of[word.block]:
            before = self.used[(word.block, word.micro, self.slices[rank][0]), unit]
            if (version := self.read(rank, index, unit, word.version)) != before:
                fact = f"forward used version {before} of weight{format_unit(unit)}"
                reader = "backward" if isinstance(word, Backward) else "recomputation"
                raise self.wrong(5, rank, index, f"{fact}, {reader} {version}; both must use the same")

    def read(self, rank: int, index: int, unit: Unit, version: int) -> int:
        """Return the number of a version, which is kept (law 5) and of which all parts are here (law 7)."""
        state = self.states[rank, unit]
        if state.span != WHOLE:
            low, high = state.span
            raise self.wrong(7, rank, index, f"weight{format_unit(unit)} is here only from {low} to {high} of it")
        if len(state.versions) < 1 - version:
            raise self.wrong(5, rank, index, f"no version {version} of weight{format_unit(unit)} was kept")
        return state.versions[version - 1]

    def update(self, rank: int, index: int, unit: Unit) -> None:
        """The gradient is used up and written down as an entry, and the weight has one version more."""
        state = self.states[rank, unit]
        if state.part is not None and state.whole:
            raise self.wrong(6, rank, index, "one gradient was shared out, another one was not")
        if state.span != state.home:
            raise self.wrong(7, rank, index, f"the gathered weight{format_unit(unit)} has not been released")
        span, marks = state.part if state.part is not None else (WHOLE, state.whole)
        decision = state.decided or self.decisions[rank]
        self.record((rank, index), unit, (span, marks), decision)
        state.part, state.whole, state.has_buffer, state.decided = None, Counter(), False, None
        if decision is not None and rank in decision.own:
            state.drift = frozenset({decision.own[rank]})
        state.span = span
        state.versions.append(state.versions[-1] + 1)

    def record(
        self, place: tuple[int, int], unit: Unit, gradient: tuple[Span, Marks], decision: Decision | None
    ) -> None:
        """One entry more is written down, with how many updates old its oldest mark is."""
        now = self.states[place[0], unit].versions[-1]
        staleness = now - self.oldest(gradient[1], unit, now)
        self.entries.append(Entry(*place, unit, *gradient, staleness, decision))

    def oldest(self, marks: Marks, unit: Unit, now: int) -> int:
        """Return the oldest version that any mark was computed with; found once for marks that ranks share."""
        key = (id(marks), unit)
        if key not in self.ages:  # the marks are kept beside their age, so that no other object gets their id
            self.ages[key] = (marks, min((self.used[mark, unit] for mark in marks), default=now))
        return self.ages[key][1] if marks else now

    def swap(self, rank: int, index: int, unit: Unit) -> None:
        """What comes back was decided on by the last commit, which stood behind its backwards."""
        state = self.states[rank, unit]
        if state.part is not None:
            raise self.wrong(6, rank, index, "a gradient that was shared out cannot be set aside")
        state.whole, state.late = state.late, state.whole
        state.has_buffer, state.has_late = state.has_late, state.has_buffer
        state.decided = self.decisions[rank]

    def taken(self, rank: int, unit: Unit) -> Marks:
        """Return the marks of a gradient, which has none afterwards."""
        state = self.states[rank, unit]
        marks, state.whole, state.has_buffer = state.whole, Counter(), False
        return marks

    def gather(self, rank: int, index: int, word: Collective) -> None:
        """A collective of gradients or weights has taken place once its last member is here."""
        if word.code and (word.verb, word.value.name) != ("all_reduce", "grad"):
            raise self.wrong(6, rank, index, "only sums of gradients have a code")
        if word.value.name in {"y", "dx"}:
            return
        key = (self.groups.number(word.group), word.value)
        arrived = self.waiting[key]
        arrived.append(rank)
        if len(arrived) == len(word.group):
            del self.waiting[key]
            if word.value.name == "weight":
                self.combine_weights(rank, index, word)
            elif word.verb == "reduce_scatter" and word.value.name == "grad":
                self.share(rank, index, word)
            elif word.verb == "all_reduce":
                self.sum(rank, index, word)
            else:
                raise self.wrong(6, rank, index, "gradients are summed or shared out, never gathered or copied")

    def combine_weights(self, rank: int, index: int, word: Collective) -> None:
        """The members have the weights that were copied, averaged or gathered."""
        states = [self.states[member, word.value.blocks] for member in word.group]
        if word.verb == "broadcast":
            for state in states[1:]:
                state.versions.append(states[0].versions[-1])
                state.drift = states[0].drift
            return
        if word.verb not in {"all_reduce_mean", "all_gather"}:
            raise self.wrong(6, rank, index, "weights are gathered, copied or averaged, never summed or shared out")
        law, fact = (6, average(states)) if word.verb == "all_reduce_mean" else gathered(states)
        if fact:
            raise self.wrong(law, rank, index, fact)

    def share(self, rank: int, index: int, word: Collective) -> None:
        """Each member has the sum of its own part of the gradient."""
        fact = share_out([self.states[member, word.value.blocks] for member in word.group])
        if fact:
            raise self.wrong(6, rank, index, fact)

    def sum(self, rank: int, index: int, word: Collective) -> None:
        """All members have the sum of their gradients, whole or of the one part that they share."""
        states = [self.states[member, word.value.blocks] for member in word.group]
        if word.value.name == "delayed_grad":
            add_late(states)
            return
        spans = {state.part[0] if state.part is not None else WHOLE for state in states}
        if len(spans) > 1:
            raise self.wrong(6, rank, index, "the members hold different parts of this gradient")
        if word.code:
            if any(state.part is not None for state in states):
                raise self.wrong(6, rank, index, "this gradient was shared out; only whole ones have a code")
            self.brought[word.group, word.value.blocks] = brought_by(states)
        add_up(states)

    def send(self, rank: int, value: Value, peer: int) -> None:
        """A gradient has gone to a peer, marks and all; or the version of a weight, which stays here, too."""
        if value.name == "grad":
            self.mail[value, rank, peer].append((self.taken(rank, value.blocks), 0, frozenset()))
        elif value.name == "weight":
            state = self.states[rank, value.blocks]
            self.mail[value, rank, peer].append((Counter(), state.versions[-1], state.drift))

    def receive(self, rank: int, value: Value, peer: int) -> None:
        """A gradient that came is added to the one that is here; a weight that came is the newest version."""
        if value.name == "grad":
            marks, _, _ = self.mail[value, peer, rank].pop(0)
            state = self.states[rank, value.blocks]
            state.whole, state.has_buffer = state.whole + marks, True
        elif value.name == "weight":
            state = self.states[rank, value.blocks]
            _, version, state.drift = self.mail[value, peer, rank].pop(0)
            state.versions.append(version)

    def serve(self, rank: int, index: int, units: Sequence[Unit]) -> None:
        """A server has made an update of each push, in the order in which they came."""
        for unit in units:
            self.served.add((rank, unit))
            for decision, marks in self.pushes.pop((rank, unit), []):
                self.record((rank, index), unit, (WHOLE, marks), decision)
                self.states[rank, unit].versions.append(self.states[rank, unit].versions[-1] + 1)

    def release(self, rank: int, index: int, value: Value) -> None:
        """What was gathered, or a gradient, is forgotten; what the end of a stream dropped is noted."""
        if value.name not in OF_UNITS:
            return
        state = self.states[rank, value.blocks]
        late = state.late if value.name == "delayed_grad" else ()
        if fact := released(state, value.name, is_end=index >= self.ends[rank]):
            raise self.wrong(6 if value.name == "delayed_grad" else 7, rank, index, fact)
        self.dropped[value.blocks].update(late)
