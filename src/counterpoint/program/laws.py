"""The eight laws that every program keeps before it may run.

1. Every send has exactly one receive, and every push one pull; a rank receives in the order in which another sends.
2. No deadlock, even when a send blocks until its receive is posted, or the room is free that the strategy promises to
   do with.
3. All members of a group call the same collectives in the same order.
4. Each microbatch goes once forward and once backward through each block, on the same rank, and may be recomputed
   once between the two; every word finds what it reads, values come once to those that read them and what each reader
   adds to their gradients comes back, and partial results are summed once over all slices.
5. Backward and recomputation use the version that their forward used; staleness stays within the promise.
6. Every gradient enters every update of its parameters exactly once, and all who had a part in it have decided
   together, about just these microbatches, that it counts.
7. What is gathered, stashed or under way is released, and nothing else; the peak in flight, what is kept for
   backwards, the versions of weights and the parts of gradients and optimizer states that a rank holds stay within the
   promise.
8. The bytes that each rank sends equal the strategy's closed formula.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from counterpoint.errors import ProgramError
from counterpoint.program.accounts import Mark
from counterpoint.program.agreement import law_6_all_concerned_decide
from counterpoint.program.counting import law_6_every_gradient_counts_once
from counterpoint.program.endings import law_6_copies_end_alike, law_7_a_body_leaves_what_it_found
from counterpoint.program.flow import (
    law_6_updates_follow_a_commit,
    law_7_gradients_are_freed,
    laws_6_and_7_what_is_started_is_awaited,
)
from counterpoint.program.inputs import law_4_inputs_are_there
from counterpoint.program.instruction import Backward, Forward, Serve
from counterpoint.program.ledger import Ledger, keep_ledger
from counterpoint.program.messages import law_1_messages_pair_up
from counterpoint.program.program import Program, Words, versions_held
from counterpoint.program.strands import Strand
from counterpoint.program.tapes import (
    Repeats,
    law_7_tapes_are_as_promised,
    law_7_what_was_promised_is_computed_again,
)
from counterpoint.program.text import format_unit
from counterpoint.program.units import Unit
from counterpoint.program.walk import rehearse_blocking_sends, show_places


@dataclass(frozen=True, slots=True)
class Promise:
    """What the strategies of a plan promise about its program.

    Where a field is None nothing is promised; blocks, microbatches and slices are then as the rows have them.

    Args:
        staleness: how many updates may come between reading weights and applying their gradient.
        in_flight: per rank, how many microbatches may be between forward and backward, in one block or, with ``heads``,
            summed over these.
        sent_bytes: per rank, the bytes sent in one step by the closed formulas.
        num_blocks: how many blocks the model has.
        num_micros: how many microbatches the global batch has.
        sliced: the blocks whose results are partial on every rank.
        updated: per rank, the part of each unit that it updates and keeps optimizer state for, at most.
        gradients: per rank, the part of each gradient that it holds from one forward to the next, at most.
        apart: whether replicas may end with weights of their own, to be averaged by a later program of the same plan.
        heads: per rank, the first block of each run of blocks through which microbatches go together.
        versions: per rank, how many versions of weights it may have to hold.
        room: for how many messages of each peer a rank must have room before it posts their receives.
        tapes: per rank, of how many blocks and microbatches it keeps at once what a backward needs.
        repeats: what is computed again.
        strands: which values go from block to block.
    """

    staleness: int | None = 0
    in_flight: tuple[int, ...] | None = None
    sent_bytes: tuple[Fraction, ...] | None = None
    num_blocks: int | None = None
    num_micros: int | None = None
    sliced: frozenset[int] | None = None
    updated: tuple[Fraction, ...] | None = None
    gradients: tuple[Fraction, ...] | None = None
    apart: bool = False
    heads: tuple[tuple[int, ...], ...] | None = None
    versions: tuple[int, ...] | None = None
    room: int = 0
    tapes: tuple[int, ...] | None = None
    repeats: Repeats | None = None
    strands: tuple[Strand, ...] | None = None


def check(
    program: Program,
    promise: Promise,
    units: Iterable[Unit],
    sent_bytes: Sequence[Fraction] | None = None,
) -> Ledger:
    """Prove that a program keeps all laws.

    A stream is proved on prologue, two bodies and epilogue, with the induction that one more body leaves the
    same things behind, one repetition later.

    Args:
        program: what is checked.
        promise: what its strategies promise.
        units: every unit of the model that must be updated.
        sent_bytes: the bytes that the program's words move, counted per rank.

    Returns:
        The ledger of one step (of the unrolled stream).

    Raises:
        ProgramError: a law is broken; ``law`` says which, the message shows the rows and the place.
    """
    units = list(units)
    rows = program.unroll(2 if program.is_stream else 1)
    blocks = range(promise.num_blocks or _last_block(rows, units) + 1)
    law_1_messages_pair_up(rows)
    law_4_all_work_is_done_once(program, rows, blocks, _micros_in(program, promise.num_micros))
    ledger = keep_ledger(program, rows, promise.heads)
    rehearse_blocking_sends(rows, promise.room)
    law_4_inputs_are_there(program, rows, blocks.stop - 1, promise.sliced, promise.strands)
    law_5_staleness(rows, ledger, promise)
    law_6_every_gradient_counts_once(program, rows, ledger, units)
    laws_6_and_7_what_is_started_is_awaited(rows)
    law_6_updates_follow_a_commit(rows)
    law_6_all_concerned_decide(program, rows, ledger, is_bounded=promise.staleness is not None)
    law_7_all_is_released(program, rows, ledger, promise)
    if promise.tapes is not None:
        law_7_tapes_are_as_promised(rows, promise.tapes)
    if promise.repeats is not None:
        law_7_what_was_promised_is_computed_again(rows, promise.repeats)
    if promise.gradients is not None:
        law_7_gradients_are_freed(rows, units, promise.gradients)
    if promise.sent_bytes is not None and sent_bytes is not None:
        law_8_bytes(promise.sent_bytes, sent_bytes)
    return ledger


def _micros_in(program: Program, num_micros: int | None) -> int | None:
    """Return how many microbatches the unrolled program has, given those of one global batch."""
    if num_micros is None or not program.is_stream:
        return num_micros
    ends = (word for row in program.rows for word in row.prologue + row.epilogue)
    before = {word.micro for word in ends if isinstance(word, Forward)}
    return len(before) + 2 * num_micros


def _last_block(rows: Sequence[Words], units: Iterable[Unit]) -> int:
    run = (word.block for row in rows for word in row if isinstance(word, Forward | Backward))
    return max([*run, *(block for unit in units for block in unit)], default=-1)


def law_4_all_work_is_done_once(
    program: Program, rows: Sequence[Words], blocks: Iterable[int], num_micros: int | None
) -> None:
    """Prove that every block of every slice runs every microbatch forward and backward once, and nothing else runs.

    A backward in two parts is done once when both are.

    Args:
        program: whose rows they are.
        rows: the flat rows.
        blocks: of the model.
        num_micros: of the global batch; None for those that any rank runs.
    """
    done = _work_done(program, rows)
    found = sorted({micro for counted in done.values() for _, micro, _ in counted})
    micros = found if num_micros is None else range(num_micros)
    slices = range(max((row.num_slices for row in program.rows), default=1))
    every = {(block, micro, at) for block in blocks for micro in micros for at in slices}
    for direction, counted in done.items():
        if counted.keys() == every and len(every) == counted.total():
            continue
        for mark in [*sorted(every), *sorted(counted.keys() - every)]:
            due = int(mark in every)
            if counted[mark] != due:
                text = f"{direction} of block {mark[0]} on microbatch {mark[1]}"
                of = f" of slice {mark[2]}" if len(slices) > 1 else ""
                place = _last_place(program, rows, mark)
                shown = show_places(rows, dict([place]), "here") if place else "  no rank does it"
                times = f"{counted[mark]} times, not once" if due else "but is no work of this plan"
                raise ProgramError(f"{text}{of} is done {times}\n{shown}", law=4)


def _work_done(program: Program, rows: Sequence[Words]) -> dict[str, Counter[Mark]]:
    """Return how often each block of each slice does what; backwards apart by their parts where any has two."""
    forwards: Counter[Mark] = Counter()
    inputs: Counter[Mark] = Counter()
    weights: Counter[Mark] = Counter()
    for row, words in zip(program.rows, rows, strict=True):
        at = row.slice_index
        forwards.update([(word.block, word.micro, at) for word in words if type(word) is Forward])
        backwards = [word for word in words if type(word) is Backward]
        inputs.update([(word.block, word.micro, at) for word in backwards if word.has_input])
        weights.update([(word.block, word.micro, at) for word in backwards if word.has_weight])
    if not any(type(word) is Backward and word.part for words in rows for word in words):
        return {"forward": forwards, "backward": inputs}
    return {"forward": forwards, "input part of the backward": inputs, "weight part of the backward": weights}


def _last_place(program: Program, rows: Sequence[Words], mark: Mark) -> tuple[int, int] | None:
    block, micro, slice_index = mark
    places = [
        (rank, index)
        for rank, row in enumerate(rows)
        for index, word in enumerate(row)
        if isinstance(word, Forward | Backward) and (word.block, word.micro) == (block, micro)
    ]
    return max((place for place in places if program.rows[place[0]].slice_index == slice_index), default=None)


def law_5_staleness(rows: Sequence[Words], ledger: Ledger, promise: Promise) -> None:
    """Prove that no gradient is older at its update than the strategies promise."""
    if promise.staleness is None:
        return
    for entry in ledger.entries:
        if entry.staleness > promise.staleness:
            raise ProgramError(
                f"rank {entry.rank} updates unit {format_unit(entry.unit)} with a gradient {entry.staleness} updates "
                f"old; the plan promises at most {promise.staleness}\n"
                f"{show_places(rows, {entry.rank: entry.index}, 'here')}",
                law=5,
            )


def law_7_all_is_released(program: Program, rows: Sequence[Words], ledger: Ledger, promise: Promise) -> None:
    """Prove that nothing stays gathered or unused, and that the peak in flight is as promised."""
    _judge_leftovers(rows, ledger)
    if promise.staleness is not None:
        _judge_ends(rows, ledger)
        if not promise.apart:
            law_6_copies_end_alike(rows, ledger)
    if promise.updated is not None:
        _judge_parts(rows, ledger, promise.updated)
    if promise.versions is not None:
        _judge_versions(program, promise.versions)
    if promise.in_flight is not None:
        for rank, (peak, allowed) in enumerate(zip(ledger.peak_in_flight, promise.in_flight, strict=True)):
            if peak > allowed:
                raise ProgramError(
                    f"rank {rank} has {peak} microbatches in flight; the plan promises at most {allowed}\n"
                    f"{show_places(rows, {rank: 0}, 'row')}",
                    law=7,
                )
    if program.is_stream:
        law_7_a_body_leaves_what_it_found(program)


def _judge_leftovers(rows: Sequence[Words], ledger: Ledger) -> None:
    for (rank, unit), state in ledger.states.items():
        end = {rank: len(rows[rank]) - 1}
        if state.span != state.home:
            raise ProgramError(
                f"rank {rank} still holds the gathered weight{format_unit(unit)} at the end\n"
                f"{show_places(rows, end, 'end')}",
                law=7,
            )
        if state.whole or state.late or state.part is not None:
            raise ProgramError(
                f"rank {rank} ends with a gradient of unit {format_unit(unit)} that no update has used\n"
                f"{show_places(rows, end, 'end')}",
                law=6,
            )


def _judge_ends(rows: Sequence[Words], ledger: Ledger) -> None:
    newest: dict[Unit, tuple[int, int]] = {}
    answered = {unit for row in rows for word in row if isinstance(word, Serve) for unit in word.units}
    for (rank, unit), state in ledger.states.items():
        if unit in answered:  # push by push: each copy is as old as its answer
            continue
        first, version = newest.setdefault(unit, (rank, state.versions[-1]))
        if version != state.versions[-1]:
            raise ProgramError(
                f"rank {first} ends with version {version} of weight{format_unit(unit)}, rank {rank} with version "
                f"{state.versions[-1]}; all copies of the same parameters end alike\n"
                f"{show_places(rows, {rank: len(rows[rank]) - 1}, 'end')}",
                law=6,
            )


def _judge_versions(program: Program, promised: Sequence[int]) -> None:
    for rank, (row, allowed) in enumerate(zip(program.rows, promised, strict=True)):
        held = versions_held(row.prologue + row.body + row.epilogue)
        if held > allowed:
            raise ProgramError(
                f"rank {rank} reads {held} versions of its weights; the plan promises to hold at most {allowed}\n"
                f"{show_places([row.body for row in program.rows], {rank: 0}, 'row')}",
                law=7,
            )


def _judge_parts(rows: Sequence[Words], ledger: Ledger, promised: Sequence[Fraction]) -> None:
    for entry in ledger.entries:
        part = entry.span[1] - entry.span[0]
        if part > promised[entry.rank]:
            raise ProgramError(
                f"rank {entry.rank} updates {part} of unit {format_unit(entry.unit)} and keeps optimizer state for "
                f"it; the plan promises {promised[entry.rank]}\n"
                f"{show_places(rows, {entry.rank: entry.index}, 'here')}",
                law=7,
            )


def law_8_bytes(promised: Sequence[Fraction], counted: Sequence[Fraction]) -> None:
    """Prove that the words move as many bytes as the strategies' formulas say."""
    for rank, (formula, words) in enumerate(zip(promised, counted, strict=True)):
        if formula != words:
            raise ProgramError(
                f"rank {rank} sends {float(words):.0f} bytes in a step; by the formulas of the plan's strategies it "
                f"should send {float(formula):.0f}",
                law=8,
            )
