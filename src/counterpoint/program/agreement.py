"""Law 6: before any weight changes, all who had a part in the gradient decide together, and about nothing else.

The mean of the loss is taken over the microbatches of the ranks that commit together, and a step is left out by all
of them or by none. A commit of fewer ranks would divide by too few samples, and let one rank skip what others apply.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from counterpoint.errors import ProgramError
from counterpoint.program.accounts import Decision, Entry
from counterpoint.program.instruction import Backward, Commit, Group, Serve
from counterpoint.program.ledger import Ledger
from counterpoint.program.program import Program, Words
from counterpoint.program.text import format_group, format_instruction, format_unit
from counterpoint.program.units import Unit
from counterpoint.program.walk import show_places


def law_6_all_concerned_decide(
    program: Program, rows: Sequence[Words], ledger: Ledger, *, is_bounded: bool = True
) -> None:
    """Prove that each update is decided on by all who had a part in it, and that a body decides once.

    Those are the ranks that ran any block on its microbatches, and those that update the same unit. The stages of a
    stream update at different times and some more often than others: there, the ranks that went backward through the
    unit's blocks, as often as they update. Where no bound on staleness is promised, replicas that update apart decide
    apart.

    Raises:
        ProgramError: law 6; a commit is too narrow, too wide, or not the only one of its body.
    """
    for rank, row in enumerate(program.rows):
        places = [index for index, word in enumerate(row.body) if isinstance(word, Commit)]
        if len(places) > 1 and not program.is_stream:
            raise ProgramError(
                f"rank {rank} commits {len(places)} times in one body; a step counts or does not, which is decided "
                f"once\n{show_places([row.body for row in program.rows], {rank: places[1]}, 'here')}",
                law=6,
            )
    concerned = _Concerned.of(program, rows, ledger, is_bounded=is_bounded)
    for entry in sorted(ledger.entries, key=lambda entry: (entry.rank, entry.index)):
        concerned.judge(entry)


@dataclass(slots=True)
class _Concerned:
    """Who had a part in what.

    Args:
        rows: the flat rows.
        is_stream: whether stages decide at different times.
        runners: the ranks that went backward, by block and microbatch.
        updaters: the ranks that update each unit, and for replicas that decide apart those of each; a server that does
            not wait decides nothing.
        is_bounded: whether replicas that update apart decide together all the same.
        judged: what needs no second look: equal marks under one decision.
    """

    rows: Sequence[Words]
    is_stream: bool
    runners: dict[int, dict[int, set[int]]]
    updaters: dict[tuple[Unit, Group], set[int]]
    is_bounded: bool
    judged: set[tuple[Unit, int, int]] = field(default_factory=set)

    @staticmethod
    def of(program: Program, rows: Sequence[Words], ledger: Ledger, *, is_bounded: bool) -> _Concerned:
        """Read off the rows who goes backward, and off the ledger who updates what."""
        runners: defaultdict[int, defaultdict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        for rank, row in enumerate(rows):
            for word in row:
                if type(word) is Backward:
                    runners[word.micro][word.block].add(rank)
        updaters: defaultdict[tuple[Unit, Group], set[int]] = defaultdict(set)
        for entry in ledger.entries:
            if not isinstance(rows[entry.rank][entry.index], Serve):
                updaters[entry.unit, () if is_bounded else entry.replica].add(entry.rank)
        return _Concerned(rows, program.is_stream, dict(runners), dict(updaters), is_bounded)

    def judge(self, entry: Entry) -> None:
        """All who had a part in an update's gradient decide on it, and on its microbatches and no others.

        Raises:
            ProgramError: law 6, with the place shown.
        """
        key = (entry.unit, id(entry.decision), id(entry.marks))
        if key in self.judged:
            return
        self.judged.add(key)  # the entries hold both, so that no other object gets their ids
        if entry.decision is None:
            raise self.wrong(entry, "no commit stands before it")
        text = format_instruction(Commit(entry.decision.group, entry.replica))
        micros = {micro for _, micro, _ in entry.marks}
        counted = entry.decision.counted_by(entry.rank)
        if micros != counted:
            raise self.wrong(
                entry,
                f"its gradient is of {_listed(micros)}, but {text} decides on {_listed(counted)}; the "
                "mean over the samples is taken over what is decided on",
            )
        missing = self.missing(entry, entry.decision)
        if missing:
            ranks = "rank " if len(missing) == 1 else "ranks "
            raise self.wrong(
                entry,
                f"{ranks}{format_group(tuple(sorted(missing)))} had a part in it, but not in {text}; all apply a step "
                "or all leave it out",
            )

    def missing(self, entry: Entry, decision: Decision) -> set[int]:
        """Return the ranks that should take part in a decision and do not."""
        found = set(self.updaters.get((entry.unit, () if self.is_bounded else entry.replica), ()))
        for micro in decision.micros:
            by_block = self.runners.get(micro, {})
            blocks: Iterable[int] = entry.unit if self.is_stream else by_block
            for block in blocks:
                found |= by_block.get(block, set())
        return found.difference(decision.group)

    def wrong(self, entry: Entry, fact: str) -> ProgramError:
        """Return the error for an update, with the place shown."""
        shown = show_places(self.rows, {entry.rank: entry.index}, "here")
        return ProgramError(f"rank {entry.rank} updates unit {format_unit(entry.unit)}: {fact}\n{shown}", law=6)


def _listed(micros: Collection[int]) -> str:
    if not micros:
        return "no microbatch"
    word = "microbatch" if len(micros) == 1 else "microbatches"
    first = ", ".join(map(str, sorted(micros)[:6]))
    return f"{word} {first}{' and others' if len(micros) > 6 else ''}"
