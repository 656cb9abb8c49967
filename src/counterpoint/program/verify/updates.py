"""What can be seen along one row: nothing is used before it is agreed on, or while it is under way.

These parts of laws 6 and 7 need no other row, so that each row is read once.

Law 6: every gradient enters every update of its parameters exactly once, and copies update alike.

Law 6: before any weight changes, all who had a part in the gradient decide together, and about nothing else.

The mean of the loss is taken over the microbatches of the ranks that commit together, and a step is left out by all
of them or by none. A commit of fewer ranks would divide by too few samples, and let one rank skip what others apply.

What a program leaves behind: copies that are alike, and a stream that can go on.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from counterpoint.errors import ProgramError
from counterpoint.program.execution_order import format_locations, rule_violation
from counterpoint.program.instruction import (
    ApplyPushes,
    Backward,
    Collective,
    Commit,
    Forward,
    Free,
    Group,
    Instruction,
    Push,
    Recompute,
    Recv,
    Send,
    SwapGradBuffers,
    TensorRef,
    Update,
)
from counterpoint.program.program import Instructions, Program, shift_microbatch
from counterpoint.program.text import format_group, format_instruction, format_unit
from counterpoint.program.units import Unit
from counterpoint.program.verify.symbolic import CommitRecord, GradContribution, SymbolicResult, UpdateRecord


def check_commit_before_update(rows: Sequence[Instructions]) -> None:
    """Prove that between the gradients and the updates or pushes of a row stands a commit; weights have no code.

    Raises:
        ProgramError: law 6; an update would be applied that nobody has agreed on, or weights would be changed on their
            way.
    """
    for rank, row in enumerate(rows):
        agreed = False
        for index, word in enumerate(row):
            match word:
                case Commit():
                    agreed = True
                case Send(value, codec=code) | Recv(value, codec=code) | Push(value, codec=code) if (
                    code and value.name != "grad"
                ):
                    raise rule_violation(rows, (rank, index), 6, "only gradients have a code")
                case Update() | Push() if not agreed:
                    raise rule_violation(rows, (rank, index), 6, "no commit stands between the gradients and this word")
                case Backward() | Recv(TensorRef("grad")) | Collective(_, TensorRef("grad")) | SwapGradBuffers():
                    agreed = False
                case _:
                    pass


def check_gradients_freed(
    rows: Sequence[Instructions], units: Iterable[Unit], grad_fractions: Sequence[Fraction]
) -> None:
    """Prove that ranks which keep only parts of gradients free the whole ones: each as soon as it is shared out.

    Args:
        rows: the flat rows.
        units: of the model.
        kept: per rank, the part of each gradient that may be held from one forward to the next.

    Raises:
        ProgramError: law 7; a gradient that was shared out, or not even that, is held on whole.
    """
    users: defaultdict[int, list[Unit]] = defaultdict(list)
    for unit in units:
        for block in unit:
            users[block].append(unit)
    for rank, (row, part) in enumerate(zip(rows, grad_fractions, strict=True)):
        if part == 1:
            continue
        held: set[Unit] = set()
        shared: set[Unit] = set()
        for index, word in enumerate(row):
            match word:
                case Backward(block) if word.computes_weight_grad:
                    _check_freed(rows, (rank, index), shared, part)
                    held.update(users[block])
                case Forward() | Commit():
                    _check_freed(rows, (rank, index), held, part)
                case Collective("reduce_scatter", TensorRef("grad", unit), phase="" | "wait"):
                    shared.add(unit)
                case Free(TensorRef("grad", unit)):
                    held.discard(unit)
                    shared.discard(unit)
                case _:
                    pass


def _check_freed(
    rows: Sequence[Instructions], location: tuple[int, int], held: Collection[Unit], fraction: Fraction
) -> None:
    if held:
        text = format_unit(min(held))
        raise rule_violation(
            rows, location, 7, f"the whole gradient of unit {text} is held; the plan promises {fraction} of it"
        )


def check_async_collectives_awaited(rows: Sequence[Instructions]) -> None:
    """Prove that nothing is used while it is under way, and that nothing is under way at the end.

    Raises:
        ProgramError: law 6, a gradient is used between the start and the wait of its sum; or law 7, nobody waits.
    """
    for rank, row in enumerate(rows):
        started: dict[TensorRef, int] = {}
        used: tuple[int, str] | None = None
        for index, word in enumerate(row):
            if isinstance(word, Collective):
                if word.phase == "wait":
                    started.pop(word.tensor, None)
                elif word.tensor in started:
                    used = used or (index, "it is under way already")
                elif word.phase == "start":
                    started[word.tensor] = index
            elif started and any(value in started for value in _tensors_used(word, started)):
                used = used or (index, "what it uses is still under way")
        if started:
            raise rule_violation(rows, (rank, min(started.values())), 7, "nobody waits for it")
        if used:
            raise rule_violation(rows, (rank, used[0]), 6, used[1])


def _tensors_used(word: Instruction, started: Iterable[TensorRef]) -> Iterable[TensorRef]:
    match word:
        case Update(unit):
            return TensorRef("grad", unit), TensorRef("weight", unit)
        case SwapGradBuffers(unit):
            return TensorRef("grad", unit), TensorRef("delayed_grad", unit)
        case Send(value) | Push(value) | Free(value):
            return (value,)
        case Backward(block):
            return [value for value in started if value.name in {"grad", "weight"} and block in value.blocks]
        case Forward(block) | Recompute(block):
            return [value for value in started if value.name == "weight" and block in value.blocks]
        case _:
            return ()


def check_grad_coverage(
    program: Program, rows: Sequence[Instructions], symbolic: SymbolicResult, units: Iterable[Unit]
) -> None:
    """Prove that each mark enters exactly one update of each part of its unit, and that copies update alike.

    Replicas that update apart are judged one by one: the marks of each enter its own updates, and no others do. What
    the end of a stream drops, as its strategy promises, enters no update.
    """
    expected = _contributions_by_block(program, rows, range(len(rows)))
    by_unit: defaultdict[Unit, list[UpdateRecord]] = defaultdict(list)
    for entry in symbolic.updates:
        by_unit[entry.unit].append(entry)
    units = list(units)
    slices = sorted({row.tp_rank for row in program.rank_programs})
    apart: dict[Group, defaultdict[int, set[GradContribution]]] = {}
    for foreign in by_unit.keys() - set(units):
        place = {by_unit[foreign][0].rank: by_unit[foreign][0].index}
        raise ProgramError(
            f"unit {format_unit(foreign)} is updated, but is none of the model's\n{format_locations(rows, place, 'here')}",
            rule=6,
        )
    for unit in units:
        marks = {mark for block in unit for mark in expected[block]} - symbolic.dropped.get(unit, set())
        for replica in sorted({entry.replica for entry in by_unit[unit]}):
            if replica and replica not in apart:
                apart[replica] = _contributions_by_block(program, rows, replica)
            own = {mark for block in unit for mark in apart[replica][block]} if replica else marks
            made = [entry for entry in by_unit[unit] if entry.replica == replica]
            for at in slices:
                mine = [entry for entry in made if program.rank_programs[entry.rank].tp_rank == at]
                _check_unit_updates(rows, unit, mine, {mark for mark in own if mark[2] == at})
            marks = marks - own
        if marks or not by_unit[unit]:  # of somebody who updates nothing
            _check_unit_updates(rows, unit, [], marks)


def _contributions_by_block(
    program: Program, rows: Sequence[Instructions], ranks: Iterable[int]
) -> defaultdict[int, set[GradContribution]]:
    """Return the marks that the backwards of ranks leave, by block."""
    found: defaultdict[int, set[GradContribution]] = defaultdict(set)
    for rank in ranks:
        for word in rows[rank]:
            if isinstance(word, Backward):
                found[word.block].add((word.block, word.micro, program.rank_programs[rank].tp_rank))
    return found


def _check_unit_updates(
    rows: Sequence[Instructions], unit: Unit, updates: Sequence[UpdateRecord], expected: set[GradContribution]
) -> None:
    text = format_unit(unit)
    by_rank: defaultdict[int, list[UpdateRecord]] = defaultdict(list)
    for entry in updates:
        by_rank[entry.rank].append(entry)
    histories: dict[tuple[Fraction, Fraction], tuple[int, list[Counter[GradContribution]]]] = {}
    judged: set[tuple[int, ...]] = set()
    for rank, own in by_rank.items():
        history = [entry.contributions for entry in own]
        first, known = histories.setdefault(own[0].shard, (rank, history))
        place = {rank: own[-1].index}
        if known is not history and known != history:
            raise ProgramError(
                f"ranks {first} and {rank} update unit {text} with different gradients; copies of the same "
                f"parameters must see the same\n{format_locations(rows, place, 'here')}",
                rule=6,
            )
        if first != rank or tuple(map(id, history)) in judged:
            continue
        judged.add(tuple(map(id, history)))  # ranks share the very objects where they share the gradient
        total = history[0] if len(history) == 1 else sum(history, Counter())
        _check_contributions(rows, text, place, (total, expected))
        if not all(history):
            raise ProgramError(
                f"rank {rank} updates unit {text} without a gradient that has come since the update before\n"
                f"{format_locations(rows, place, 'here')}",
                rule=6,
            )
    _check_shards_cover_unit(text, sorted(histories))


def _check_contributions(
    rows: Sequence[Instructions],
    unit: str,
    location: Mapping[int, int],
    contributions: tuple[Counter[GradContribution], set[GradContribution]],
) -> None:
    total, expected = contributions
    if total.keys() == expected and all(count == 1 for count in total.values()):
        return
    doubled = sorted(mark for mark, count in total.items() if count > 1)
    missing = sorted(expected - total.keys())
    foreign = sorted(total.keys() - expected)
    parts = [
        f"{word} {', '.join(f'B{b}.{m}' for b, m, _ in found[:4])}{' and others' if len(found) > 4 else ''}"
        for word, found in (("twice", doubled), ("never", missing), ("wrongly", foreign))
        if found
    ]
    rank = next(iter(location))
    raise ProgramError(
        f"rank {rank} updates unit {unit} with gradients counted {'; '.join(parts)}; every gradient enters every "
        f"update exactly once\n{format_locations(rows, location, 'here')}",
        rule=6,
    )


def _check_shards_cover_unit(unit: str, shards: Sequence[tuple[Fraction, Fraction]]) -> None:
    reached = Fraction(0)
    for low, high in shards:
        if low != reached:
            break
        reached = high
    if reached != 1:
        held = ", ".join(f"{low} to {high}" for low, high in shards) or "nothing"
        raise ProgramError(f"unit {unit} is updated only in part: {held}; all of it must be updated", rule=6)


def check_commit_groups(
    program: Program, rows: Sequence[Instructions], symbolic: SymbolicResult, *, is_bounded: bool = True
) -> None:
    """Prove that each update is decided on by all who had a part in it, and that a body decides once.

    Those are the ranks that ran any block on its microbatches, and those that update the same unit. The stages of a
    stream update at different times and some more often than others: there, the ranks that went backward through the
    unit's blocks, as often as they update. Where no bound on staleness is promised, replicas that update apart decide
    apart.

    Raises:
        ProgramError: law 6; a commit is too narrow, too wide, or not the only one of its body.
    """
    for rank, row in enumerate(program.rank_programs):
        places = [index for index, word in enumerate(row.body) if isinstance(word, Commit)]
        if len(places) > 1 and not program.is_async_pipeline:
            raise ProgramError(
                f"rank {rank} commits {len(places)} times in one body; a step counts or does not, which is decided "
                f"once\n{format_locations([row.body for row in program.rank_programs], {rank: places[1]}, 'here')}",
                rule=6,
            )
    concerned = _CommitChecker.build(program, rows, symbolic, is_bounded=is_bounded)
    for entry in sorted(symbolic.updates, key=lambda entry: (entry.rank, entry.index)):
        concerned.check(entry)


@dataclass(slots=True)
class _CommitChecker:
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

    rows: Sequence[Instructions]
    is_async_pipeline: bool
    backward_ranks: dict[int, dict[int, set[int]]]
    updating_ranks: dict[tuple[Unit, Group], set[int]]
    is_bounded: bool
    checked: set[tuple[Unit, int, int]] = field(default_factory=set)

    @staticmethod
    def build(
        program: Program, rows: Sequence[Instructions], symbolic: SymbolicResult, *, is_bounded: bool
    ) -> _CommitChecker:
        """Read off the rows who goes backward, and off the ledger who updates what."""
        runners: defaultdict[int, defaultdict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        for rank, row in enumerate(rows):
            for word in row:
                if type(word) is Backward:
                    runners[word.micro][word.block].add(rank)
        updaters: defaultdict[tuple[Unit, Group], set[int]] = defaultdict(set)
        for entry in symbolic.updates:
            if not isinstance(rows[entry.rank][entry.index], ApplyPushes):
                updaters[entry.unit, () if is_bounded else entry.replica].add(entry.rank)
        return _CommitChecker(rows, program.is_async_pipeline, dict(runners), dict(updaters), is_bounded)

    def check(self, update: UpdateRecord) -> None:
        """All who had a part in an update's gradient decide on it, and on its microbatches and no others.

        Raises:
            ProgramError: law 6, with the place shown.
        """
        key = (update.unit, id(update.commit), id(update.contributions))
        if key in self.checked:
            return
        self.checked.add(key)  # the entries hold both, so that no other object gets their ids
        if update.commit is None:
            raise self.violation(update, "no commit stands before it")
        text = format_instruction(Commit(update.commit.group, update.replica))
        micros = {micro for _, micro, _ in update.contributions}
        counted = update.commit.micros_in_loss_of(update.rank)
        if micros != counted:
            raise self.violation(
                update,
                f"its gradient is of {_format_microbatches(micros)}, but {text} decides on {_format_microbatches(counted)}; the "
                "mean over the samples is taken over what is decided on",
            )
        missing = self.missing_members(update, update.commit)
        if missing:
            ranks = "rank " if len(missing) == 1 else "ranks "
            raise self.violation(
                update,
                f"{ranks}{format_group(tuple(sorted(missing)))} had a part in it, but not in {text}; all apply a step "
                "or all leave it out",
            )

    def missing_members(self, update: UpdateRecord, commit: CommitRecord) -> set[int]:
        """Return the ranks that should take part in a decision and do not."""
        found = set(self.updating_ranks.get((update.unit, () if self.is_bounded else update.replica), ()))
        for micro in commit.micros:
            by_block = self.backward_ranks.get(micro, {})
            blocks: Iterable[int] = update.unit if self.is_async_pipeline else by_block
            for block in blocks:
                found |= by_block.get(block, set())
        return found.difference(commit.group)

    def violation(self, update: UpdateRecord, fact: str) -> ProgramError:
        """Return the error for an update, with the place shown."""
        shown = format_locations(self.rows, {update.rank: update.index}, "here")
        return ProgramError(f"rank {update.rank} updates unit {format_unit(update.unit)}: {fact}\n{shown}", rule=6)


def _format_microbatches(micros: Collection[int]) -> str:
    if not micros:
        return "no microbatch"
    word = "microbatch" if len(micros) == 1 else "microbatches"
    first = ", ".join(map(str, sorted(micros)[:6]))
    return f"{word} {first}{' and others' if len(micros) > 6 else ''}"


def check_replicas_equal(rows: Sequence[Instructions], symbolic: SymbolicResult) -> None:
    """Prove that where replicas have updated weights apart, a mean over all of them has made these alike again.

    Raises:
        ProgramError: law 6; copies end with weights of different replicas.
    """
    found: dict[Unit, tuple[int, frozenset[Group]]] = {}
    for (rank, unit), state in symbolic.unit_states.items():
        first, drift = found.setdefault(unit, (rank, state.diverged_from))
        if drift != state.diverged_from:
            raise ProgramError(
                f"ranks {first} and {rank} end with weights of unit {format_unit(unit)} that replicas have updated "
                "apart and that no mean over all of them has made alike\n"
                f"{format_locations(rows, {rank: len(rows[rank]) - 1}, 'end')}",
                rule=6,
            )


def check_steady_state(program: Program) -> None:
    """Prove that one more body leaves behind what the last one left, one repetition later.

    Raises:
        ProgramError: law 7; the stream cannot go on.
    """
    stride = len(program.micros)
    for rank, row in enumerate(program.rank_programs):
        once = _in_flight_after(row.prologue + row.body)
        second = tuple(shift_microbatch(word, stride) for word in row.body)
        twice = _in_flight_after(row.prologue + row.body + second)
        if twice != Counter({shift_microbatch(word, stride): count for word, count in once.items()}):
            raise ProgramError(
                f"rank {rank}: the body does not leave behind what it found, one repetition later, so the stream "
                "cannot go on\n" + format_locations([row.body], {0: 0}, "body"),
                rule=7,
            )


def _in_flight_after(words: Instructions) -> Counter[Instruction]:
    """Return the forwards without backward, each with the version that its backward would have to read.

    And the backwards whose gradients are set aside.
    """
    live: dict[tuple[int, int], int] = {}
    halfway: set[tuple[int, int]] = set()
    updates: Counter[int] = Counter()
    fresh: defaultdict[Unit, list[Instruction]] = defaultdict(list)
    aside: defaultdict[Unit, list[Instruction]] = defaultdict(list)
    swapped = {word.unit for word in words if isinstance(word, SwapGradBuffers)}
    for word in words:
        match word:
            case Forward(block, micro, version):
                live[block, micro] = updates[block] + version
            case Backward(block, micro, part="input"):
                halfway.add((block, micro))
            case Backward(block, micro):
                halfway.discard((block, micro))
                live.pop((block, micro), None)
                for unit in swapped:
                    fresh[unit] += [word] if block in unit else []
            case Update(unit):
                updates.update(unit)
                fresh.pop(unit, None)
            case SwapGradBuffers(unit):
                fresh[unit], aside[unit] = aside[unit], fresh[unit]
            case _:
                pass
    under_way = Counter[Instruction](word for kept in (fresh, aside) for found in kept.values() for word in found)
    for (block, micro), read in live.items():
        version = read - updates[block]
        is_halfway = (block, micro) in halfway
        under_way[Backward(block, micro, version, "input") if is_halfway else Forward(block, micro, version)] += 1
    return under_way
