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
from counterpoint.program.edges import Edge
from counterpoint.program.execution_order import check_rendezvous_sends, format_locations
from counterpoint.program.instruction import ApplyPushes, Backward, Forward
from counterpoint.program.program import Instructions, Program, weight_versions_needed
from counterpoint.program.recompute_sets import (
    RecomputePolicy,
    check_recompute_policy,
    check_saved_activations,
)
from counterpoint.program.text import format_unit
from counterpoint.program.units import Unit
from counterpoint.program.verify.dataflow import check_inputs_available, check_p2p_matching
from counterpoint.program.verify.symbolic import GradContribution, SymbolicResult, execute_symbolically
from counterpoint.program.verify.updates import (
    check_async_collectives_awaited,
    check_commit_before_update,
    check_commit_groups,
    check_grad_coverage,
    check_gradients_freed,
    check_replicas_equal,
    check_steady_state,
)


@dataclass(frozen=True, slots=True)
class Bounds:
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
    tp_blocks: frozenset[int] | None = None
    optimizer_fraction: tuple[Fraction, ...] | None = None
    grad_fraction: tuple[Fraction, ...] | None = None
    replicas_may_diverge: bool = False
    chunk_starts: tuple[tuple[int, ...], ...] | None = None
    weight_versions: tuple[int, ...] | None = None
    recv_buffer_depth: int = 0
    max_saved_activations: tuple[int, ...] | None = None
    recompute: RecomputePolicy | None = None
    edges: tuple[Edge, ...] | None = None


def verify(
    program: Program,
    bounds: Bounds,
    units: Iterable[Unit],
    sent_bytes: Sequence[Fraction] | None = None,
) -> SymbolicResult:
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
    rows = program.unroll(2 if program.is_async_pipeline else 1)
    blocks = range(bounds.num_blocks or _last_block(rows, units) + 1)
    check_p2p_matching(rows)
    check_work_done_once(program, rows, blocks, _num_unrolled_micros(program, bounds.num_micros))
    ledger = execute_symbolically(program, rows, bounds.chunk_starts)
    check_rendezvous_sends(rows, bounds.recv_buffer_depth)
    check_inputs_available(program, rows, blocks.stop - 1, bounds.tp_blocks, bounds.edges)
    check_staleness(rows, ledger, bounds)
    check_grad_coverage(program, rows, ledger, units)
    check_async_collectives_awaited(rows)
    check_commit_before_update(rows)
    check_commit_groups(program, rows, ledger, is_bounded=bounds.staleness is not None)
    check_final_state(program, rows, ledger, bounds)
    if bounds.max_saved_activations is not None:
        check_saved_activations(rows, bounds.max_saved_activations)
    if bounds.recompute is not None:
        check_recompute_policy(rows, bounds.recompute)
    if bounds.grad_fraction is not None:
        check_gradients_freed(rows, units, bounds.grad_fraction)
    if bounds.sent_bytes is not None and sent_bytes is not None:
        check_sent_bytes(bounds.sent_bytes, sent_bytes)
    return ledger


def _num_unrolled_micros(program: Program, num_micros: int | None) -> int | None:
    """Return how many microbatches the unrolled program has, given those of one global batch."""
    if num_micros is None or not program.is_async_pipeline:
        return num_micros
    ends = (word for row in program.rank_programs for word in row.prologue + row.epilogue)
    before = {word.micro for word in ends if isinstance(word, Forward)}
    return len(before) + 2 * num_micros


def _last_block(rows: Sequence[Instructions], units: Iterable[Unit]) -> int:
    run = (word.block for row in rows for word in row if isinstance(word, Forward | Backward))
    return max([*run, *(block for unit in units for block in unit)], default=-1)


def check_work_done_once(
    program: Program, rows: Sequence[Instructions], blocks: Iterable[int], num_micros: int | None
) -> None:
    """Prove that every block of every slice runs every microbatch forward and backward once, and nothing else runs.

    A backward in two parts is done once when both are.

    Args:
        program: whose rows they are.
        rows: the flat rows.
        blocks: of the model.
        num_micros: of the global batch; None for those that any rank runs.
    """
    done = _count_work(program, rows)
    found = sorted({micro for counted in done.values() for _, micro, _ in counted})
    micros = found if num_micros is None else range(num_micros)
    slices = range(max((row.tp_degree for row in program.rank_programs), default=1))
    every = {(block, micro, at) for block in blocks for micro in micros for at in slices}
    for direction, counted in done.items():
        if counted.keys() == every and len(every) == counted.total():
            continue
        for mark in [*sorted(every), *sorted(counted.keys() - every)]:
            due = int(mark in every)
            if counted[mark] != due:
                text = f"{direction} of block {mark[0]} on microbatch {mark[1]}"
                of = f" of slice {mark[2]}" if len(slices) > 1 else ""
                place = _last_location(program, rows, mark)
                shown = format_locations(rows, dict([place]), "here") if place else "  no rank does it"
                times = f"{counted[mark]} times, not once" if due else "but is no work of this plan"
                raise ProgramError(f"{text}{of} is done {times}\n{shown}", rule=4)


def _count_work(program: Program, rows: Sequence[Instructions]) -> dict[str, Counter[GradContribution]]:
    """Return how often each block of each slice does what; backwards apart by their parts where any has two."""
    forwards: Counter[GradContribution] = Counter()
    inputs: Counter[GradContribution] = Counter()
    weights: Counter[GradContribution] = Counter()
    for row, words in zip(program.rank_programs, rows, strict=True):
        at = row.tp_rank
        forwards.update([(word.block, word.micro, at) for word in words if type(word) is Forward])
        backwards = [word for word in words if type(word) is Backward]
        inputs.update([(word.block, word.micro, at) for word in backwards if word.computes_input_grad])
        weights.update([(word.block, word.micro, at) for word in backwards if word.computes_weight_grad])
    if not any(type(word) is Backward and word.part for words in rows for word in words):
        return {"forward": forwards, "backward": inputs}
    return {"forward": forwards, "input part of the backward": inputs, "weight part of the backward": weights}


def _last_location(program: Program, rows: Sequence[Instructions], work: GradContribution) -> tuple[int, int] | None:
    block, micro, slice_index = work
    places = [
        (rank, index)
        for rank, row in enumerate(rows)
        for index, word in enumerate(row)
        if isinstance(word, Forward | Backward) and (word.block, word.micro) == (block, micro)
    ]
    return max((place for place in places if program.rank_programs[place[0]].tp_rank == slice_index), default=None)


def check_staleness(rows: Sequence[Instructions], symbolic: SymbolicResult, bounds: Bounds) -> None:
    """Prove that no gradient is older at its update than the strategies promise."""
    if bounds.staleness is None:
        return
    for entry in symbolic.updates:
        if entry.staleness > bounds.staleness:
            raise ProgramError(
                f"rank {entry.rank} updates unit {format_unit(entry.unit)} with a gradient {entry.staleness} updates "
                f"old; the plan promises at most {bounds.staleness}\n"
                f"{format_locations(rows, {entry.rank: entry.index}, 'here')}",
                rule=5,
            )


def check_final_state(program: Program, rows: Sequence[Instructions], symbolic: SymbolicResult, bounds: Bounds) -> None:
    """Prove that nothing stays gathered or unused, and that the peak in flight is as promised."""
    _check_nothing_held(rows, symbolic)
    if bounds.staleness is not None:
        _check_final_versions(rows, symbolic)
        if not bounds.replicas_may_diverge:
            check_replicas_equal(rows, symbolic)
    if bounds.optimizer_fraction is not None:
        _check_optimizer_fractions(rows, symbolic, bounds.optimizer_fraction)
    if bounds.weight_versions is not None:
        _check_weight_versions(program, bounds.weight_versions)
    if bounds.in_flight is not None:
        for rank, (peak, allowed) in enumerate(zip(symbolic.peak_in_flight, bounds.in_flight, strict=True)):
            if peak > allowed:
                raise ProgramError(
                    f"rank {rank} has {peak} microbatches in flight; the plan promises at most {allowed}\n"
                    f"{format_locations(rows, {rank: 0}, 'row')}",
                    rule=7,
                )
    if program.is_async_pipeline:
        check_steady_state(program)


def _check_nothing_held(rows: Sequence[Instructions], symbolic: SymbolicResult) -> None:
    for (rank, unit), state in symbolic.unit_states.items():
        end = {rank: len(rows[rank]) - 1}
        if state.available != state.local_shard:
            raise ProgramError(
                f"rank {rank} still holds the gathered weight{format_unit(unit)} at the end\n"
                f"{format_locations(rows, end, 'end')}",
                rule=7,
            )
        if state.full_grad or state.delayed_grad or state.grad_shard is not None:
            raise ProgramError(
                f"rank {rank} ends with a gradient of unit {format_unit(unit)} that no update has used\n"
                f"{format_locations(rows, end, 'end')}",
                rule=6,
            )


def _check_final_versions(rows: Sequence[Instructions], symbolic: SymbolicResult) -> None:
    newest: dict[Unit, tuple[int, int]] = {}
    answered = {unit for row in rows for word in row if isinstance(word, ApplyPushes) for unit in word.units}
    for (rank, unit), state in symbolic.unit_states.items():
        if unit in answered:  # push by push: each copy is as old as its answer
            continue
        first, version = newest.setdefault(unit, (rank, state.versions[-1]))
        if version != state.versions[-1]:
            raise ProgramError(
                f"rank {first} ends with version {version} of weight{format_unit(unit)}, rank {rank} with version "
                f"{state.versions[-1]}; all copies of the same parameters end alike\n"
                f"{format_locations(rows, {rank: len(rows[rank]) - 1}, 'end')}",
                rule=6,
            )


def _check_weight_versions(program: Program, bounds: Sequence[int]) -> None:
    for rank, (row, allowed) in enumerate(zip(program.rank_programs, bounds, strict=True)):
        held = weight_versions_needed(row.prologue + row.body + row.epilogue)
        if held > allowed:
            raise ProgramError(
                f"rank {rank} reads {held} versions of its weights; the plan promises to hold at most {allowed}\n"
                f"{format_locations([row.body for row in program.rank_programs], {rank: 0}, 'row')}",
                rule=7,
            )


def _check_optimizer_fractions(
    rows: Sequence[Instructions], symbolic: SymbolicResult, bounds: Sequence[Fraction]
) -> None:
    for entry in symbolic.updates:
        part = entry.shard[1] - entry.shard[0]
        if part > bounds[entry.rank]:
            raise ProgramError(
                f"rank {entry.rank} updates {part} of unit {format_unit(entry.unit)} and keeps optimizer state for "
                f"it; the plan promises {bounds[entry.rank]}\n"
                f"{format_locations(rows, {entry.rank: entry.index}, 'here')}",
                rule=7,
            )


def check_sent_bytes(formula_bytes: Sequence[Fraction], counted_bytes: Sequence[Fraction]) -> None:
    """Prove that the words move as many bytes as the strategies' formulas say."""
    for rank, (formula, words) in enumerate(zip(formula_bytes, counted_bytes, strict=True)):
        if formula != words:
            raise ProgramError(
                f"rank {rank} sends {float(words):.0f} bytes in a step; by the formulas of the plan's strategies it "
                f"should send {float(formula):.0f}",
                rule=8,
            )
