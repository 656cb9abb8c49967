"""Verify a program against eight rules before it may run.

1. Every send has exactly one receive, and every push one pull; a rank receives from a peer in the order in which that
   peer sends.
2. There is no deadlock, even if a send blocks until its receive is posted or until one of the receive buffers that the
   strategy declares is free.
3. All members of a group call the same collectives in the same order.
4. Each microbatch passes once forward and once backward through each block, on the same rank, and may be recomputed
   once in between. Every instruction finds its inputs; activations arrive once at each consumer, the gradients of all
   consumers come back, and partial results are summed once over all tensor-parallel shards.
5. Backward and recomputation read the weight version that their forward read; staleness stays within its bound.
6. Every gradient contributes to every update of its parameters exactly once, and all ranks that contributed to it
   commit together, about exactly these microbatches.
7. Whatever is gathered, delayed or in flight is freed at the end, and nothing else is. State and weights that are
   offloaded are fetched for each update, weights for each gather, and updated ones are offloaded again. The number of
   microbatches in flight, saved activations, weight versions, and the fractions of gradients and optimizer states per
   rank stay within their bounds.
8. The bytes that each rank sends equal the closed formula of the strategy.

Strategies declare the bounds (:class:`Bounds`) separately from the instructions that they write, so that a mistake in
either of them is found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from counterpoint.errors import ProgramError
from counterpoint.program.edges import Edge
from counterpoint.program.execution_order import check_rendezvous_sends, format_locations
from counterpoint.program.instruction import ApplyPushes, Backward, Collective, Forward, Instruction, Update
from counterpoint.program.offloading import check_offloads
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
    """Bounds that the strategies of a plan declare for its program.

    A bound that is None is not checked; blocks, microbatches and tensor-parallel shards are then read off the program.

    Args:
        staleness: maximum number of updates between reading a weight and applying the gradient computed with it.
        in_flight: per rank, the maximum number of microbatches between forward and backward: in any one block or, with
            ``chunk_starts``, summed over these blocks.
        sent_bytes: per rank, the bytes sent in one step according to the closed formulas.
        num_blocks: number of blocks of the model.
        num_micros: number of microbatches in the global batch.
        tp_blocks: the tensor-parallel blocks, whose outputs are partial on every rank.
        optimizer_fraction: per rank, the maximum fraction of each unit that it updates and keeps optimizer state for.
        grad_fraction: per rank, the maximum fraction of each gradient that it holds from one forward to the next.
        replicas_may_diverge: whether replicas may end with different weights, to be averaged by a later step of the
            plan.
        chunk_starts: per rank, the first block of each of its pipeline chunks.
        weight_versions: per rank, the maximum number of weight versions that it holds.
        recv_buffer_depth: number of messages per peer that a rank can buffer before it posts their receives.
        max_saved_activations: per rank, for how many pairs of block and microbatch it may hold saved activations at
            once.
        recompute: which blocks are recomputed.
        edges: which activations pass between which blocks.
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


NO_BOUNDS = Bounds()
"""The bounds of a program that no strategy has written: those of a synchronous step."""


def verify(
    program: Program,
    bounds: Bounds = NO_BOUNDS,
    units: Iterable[Unit] | None = None,
    sent_bytes: Sequence[Fraction] | None = None,
    sparse_units: Collection[Unit] = (),
) -> SymbolicResult:
    r"""Verify that a program obeys all rules.

    An asynchronous pipeline is verified on its prologue, two bodies and its epilogue. By induction this covers any
    number of bodies, because one more body leaves the same state, shifted by one repetition.

    Args:
        program: the program.
        bounds: what its strategies declare; by default a synchronous step of as many blocks and microbatches as it has.
        units: all units of the model, each of which must be updated; by default those that the program updates.
        sent_bytes: bytes that each rank sends, counted from the instructions.
        sparse_units: units with sparse gradients, whose rows the members of a group gather together where they wait for
            a reduction.

    Returns:
        The result of the symbolic execution of one step (or of the unrolled pipeline). Printed, it is a summary.

    Raises:
        ProgramError: a rule is violated; ``rule`` has its number, the message shows the instructions around the place.

    Example:
        >>> import counterpoint as cp
        >>> text = "F0.0 B0.0 all_reduce(grad0)@0,1 commit@0,1 U0\nF0.1 B0.1 all_reduce(grad0)@0,1 commit@0,1 U0"
        >>> print(cp.verify(cp.parse_program(text)))
        2 ranks, 1 unit, 2 microbatches, at most 1 in flight on a rank; rules 1 to 7 hold
        2 updates on 2 ranks
        in flight on each rank: 1, 1
    """
    units = updated_units(program) if units is None else list(units)
    rank_instructions = program.unroll(2 if program.is_async_pipeline else 1)
    blocks = range(bounds.num_blocks or _last_block(rank_instructions, units) + 1)
    check_p2p_matching(rank_instructions)
    check_work_done_once(program, rank_instructions, blocks, _num_unrolled_micros(program, bounds.num_micros))
    symbolic = execute_symbolically(program, rank_instructions, bounds.chunk_starts)
    check_rendezvous_sends(rank_instructions, bounds.recv_buffer_depth)
    if sparse_units:
        with_gathers = [tuple(add_row_gathers(instructions, sparse_units)) for instructions in rank_instructions]
        check_rendezvous_sends(with_gathers, bounds.recv_buffer_depth)
    check_inputs_available(program, rank_instructions, blocks.stop - 1, bounds.tp_blocks, bounds.edges)
    check_staleness(rank_instructions, symbolic, bounds)
    check_grad_coverage(program, rank_instructions, symbolic, units)
    check_async_collectives_awaited(rank_instructions)
    check_commit_before_update(rank_instructions)
    check_commit_groups(program, rank_instructions, symbolic, is_bounded=bounds.staleness is not None)
    check_final_state(program, rank_instructions, symbolic, bounds)
    check_offloads(rank_instructions)
    if bounds.max_saved_activations is not None:
        check_saved_activations(rank_instructions, bounds.max_saved_activations)
    if bounds.recompute is not None:
        check_recompute_policy(rank_instructions, bounds.recompute)
    if bounds.grad_fraction is not None:
        check_gradients_freed(rank_instructions, units, bounds.grad_fraction)
    if bounds.sent_bytes is not None and sent_bytes is not None:
        check_sent_bytes(bounds.sent_bytes, sent_bytes)
        return replace(symbolic, rules=(1, 2, 3, 4, 5, 6, 7, 8))
    return replace(symbolic, rules=(1, 2, 3, 4, 5, 6, 7))


def add_row_gathers(instructions: Instructions, sparse_units: Collection[Unit]) -> Iterator[Instruction]:
    """Yield a rank's instructions, and after each wait for a sparse gradient the collective that gathers its rows."""
    for instruction in instructions:
        yield instruction
        if (
            isinstance(instruction, Collective)
            and instruction.phase == "wait"
            and instruction.tensor.name == "grad"
            and instruction.tensor.blocks in sparse_units
        ):
            yield replace(instruction, phase="")


def updated_units(program: Program) -> list[Unit]:
    """Return the units that a program updates, on workers or on servers."""
    units: dict[Unit, None] = {}
    for _, instruction in program.instructions():
        if isinstance(instruction, Update):
            units[instruction.unit] = None
        elif isinstance(instruction, ApplyPushes):
            units |= dict.fromkeys(instruction.units)
    return sorted(units)


def _num_unrolled_micros(program: Program, num_micros: int | None) -> int | None:
    """Return the number of microbatches of the unrolled program, given that of one global batch."""
    if num_micros is None or not program.is_async_pipeline:
        return num_micros
    ends = (
        instruction
        for rank_program in program.rank_programs
        for instruction in rank_program.prologue + rank_program.epilogue
    )
    before = {instruction.micro for instruction in ends if isinstance(instruction, Forward)}
    return len(before) + 2 * num_micros


def _last_block(rank_instructions: Sequence[Instructions], units: Iterable[Unit]) -> int:
    blocks_run = (
        instruction.block
        for instructions in rank_instructions
        for instruction in instructions
        if isinstance(instruction, Forward | Backward)
    )
    return max([*blocks_run, *(block for unit in units for block in unit)], default=-1)


def check_work_done_once(
    program: Program, rank_instructions: Sequence[Instructions], blocks: Iterable[int], num_micros: int | None
) -> None:
    """Check that every shard of every block runs every microbatch forward and backward exactly once (rule 4).

    Nothing else may run.

    Args:
        program: the program.
        rank_instructions: its unrolled instructions, per rank.
        blocks: the blocks of the model.
        num_micros: number of microbatches; None for those that any rank runs.
    """
    work_done = _count_work(program, rank_instructions)
    micros_run = sorted({micro for counts in work_done.values() for _, micro, _ in counts})
    micros = micros_run if num_micros is None else range(num_micros)
    tp_ranks = range(max((rank_program.tp_degree for rank_program in program.rank_programs), default=1))
    expected = {(block, micro, tp_rank) for block in blocks for micro in micros for tp_rank in tp_ranks}
    for direction, counts in work_done.items():
        if counts.keys() == expected and len(expected) == counts.total():
            continue
        for work in [*sorted(expected), *sorted(counts.keys() - expected)]:
            expected_count = int(work in expected)
            if counts[work] != expected_count:
                text = f"{direction} of block {work[0]} on microbatch {work[1]}"
                of = f" of shard {work[2]}" if len(tp_ranks) > 1 else ""
                location = _last_location(program, rank_instructions, work)
                shown = (
                    format_locations(rank_instructions, dict([location]), "here") if location else "  no rank does it"
                )
                times = f"{counts[work]} times, not once" if expected_count else "but is not part of this plan"
                raise ProgramError(f"{text}{of} is done {times}\n{shown}", rule=4)


def _count_work(program: Program, rank_instructions: Sequence[Instructions]) -> dict[str, Counter[GradContribution]]:
    """Count what runs on each (block, microbatch, shard), with the halves of split backwards counted separately."""
    forwards: Counter[GradContribution] = Counter()
    inputs: Counter[GradContribution] = Counter()
    weights: Counter[GradContribution] = Counter()
    for rank_program, instructions in zip(program.rank_programs, rank_instructions, strict=True):
        tp_rank = rank_program.tp_rank
        forwards.update(
            [
                (instruction.block, instruction.micro, tp_rank)
                for instruction in instructions
                if type(instruction) is Forward
            ]
        )
        backwards = [instruction for instruction in instructions if type(instruction) is Backward]
        inputs.update(
            [
                (instruction.block, instruction.micro, tp_rank)
                for instruction in backwards
                if instruction.computes_input_grad
            ]
        )
        weights.update(
            [
                (instruction.block, instruction.micro, tp_rank)
                for instruction in backwards
                if instruction.computes_weight_grad
            ]
        )
    if not any(
        type(instruction) is Backward and instruction.part
        for instructions in rank_instructions
        for instruction in instructions
    ):
        return {"forward": forwards, "backward": inputs}
    return {"forward": forwards, "input part of the backward": inputs, "weight part of the backward": weights}


def _last_location(
    program: Program, rank_instructions: Sequence[Instructions], work: GradContribution
) -> tuple[int, int] | None:
    block, micro, tp_rank = work
    locations = [
        (rank, index)
        for rank, instructions in enumerate(rank_instructions)
        for index, instruction in enumerate(instructions)
        if isinstance(instruction, Forward | Backward) and (instruction.block, instruction.micro) == (block, micro)
    ]
    return max(
        (location for location in locations if program.rank_programs[location[0]].tp_rank == tp_rank), default=None
    )


def check_staleness(rank_instructions: Sequence[Instructions], symbolic: SymbolicResult, bounds: Bounds) -> None:
    """Check that no gradient is older than declared when it is applied (rule 5)."""
    if bounds.staleness is None:
        return
    for update in symbolic.updates:
        if update.staleness > bounds.staleness:
            raise ProgramError(
                f"rank {update.rank} updates unit {format_unit(update.unit)} with a gradient {update.staleness} "
                "updates "
                f"old; the plan declares at most {bounds.staleness}\n"
                f"{format_locations(rank_instructions, {update.rank: update.index}, 'here')}",
                rule=5,
            )


def check_final_state(
    program: Program, rank_instructions: Sequence[Instructions], symbolic: SymbolicResult, bounds: Bounds
) -> None:
    """Check that nothing stays gathered or unused, and that resources stay within their bounds (rule 7)."""
    _check_nothing_held(rank_instructions, symbolic)
    if bounds.staleness is not None:
        _check_final_versions(rank_instructions, symbolic)
        if not bounds.replicas_may_diverge:
            check_replicas_equal(rank_instructions, symbolic)
    if bounds.optimizer_fraction is not None:
        _check_optimizer_fractions(rank_instructions, symbolic, bounds.optimizer_fraction)
    if bounds.weight_versions is not None:
        _check_weight_versions(program, bounds.weight_versions)
    if bounds.in_flight is not None:
        for rank, (peak, allowed) in enumerate(zip(symbolic.peak_in_flight, bounds.in_flight, strict=True)):
            if peak > allowed:
                raise ProgramError(
                    f"rank {rank} has {peak} microbatches in flight; the plan declares at most {allowed}\n"
                    f"{format_locations(rank_instructions, {rank: 0}, 'rank program')}",
                    rule=7,
                )
    if program.is_async_pipeline:
        check_steady_state(program)


def _check_nothing_held(rank_instructions: Sequence[Instructions], symbolic: SymbolicResult) -> None:
    for (rank, unit), state in symbolic.unit_states.items():
        location = {rank: len(rank_instructions[rank]) - 1}
        if state.available != state.local_shard:
            raise ProgramError(
                f"rank {rank} still holds the gathered weight{format_unit(unit)} at the end\n"
                f"{format_locations(rank_instructions, location, 'end')}",
                rule=7,
            )
        if state.full_grad or state.delayed_grad or state.grad_shard is not None:
            raise ProgramError(
                f"rank {rank} ends with a gradient of unit {format_unit(unit)} that no update has applied\n"
                f"{format_locations(rank_instructions, location, 'end')}",
                rule=6,
            )


def _check_final_versions(rank_instructions: Sequence[Instructions], symbolic: SymbolicResult) -> None:
    newest: dict[Unit, tuple[int, int]] = {}
    served_units = {
        unit
        for instructions in rank_instructions
        for instruction in instructions
        if isinstance(instruction, ApplyPushes)
        for unit in instruction.units
    }
    for (rank, unit), state in symbolic.unit_states.items():
        if unit in served_units:  # each worker's copy is as new as the last answer that it got
            continue
        first, version = newest.setdefault(unit, (rank, state.versions[-1]))
        if version != state.versions[-1]:
            raise ProgramError(
                f"rank {first} ends with version {version} of weight{format_unit(unit)}, rank {rank} with version "
                f"{state.versions[-1]}; all copies of the same parameters must end equal\n"
                f"{format_locations(rank_instructions, {rank: len(rank_instructions[rank]) - 1}, 'end')}",
                rule=6,
            )


def _check_weight_versions(program: Program, bounds: Sequence[int]) -> None:
    for rank, (rank_program, allowed) in enumerate(zip(program.rank_programs, bounds, strict=True)):
        versions_read = weight_versions_needed(rank_program.prologue + rank_program.body + rank_program.epilogue)
        if versions_read > allowed:
            bodies = [rank_program.body for rank_program in program.rank_programs]
            raise ProgramError(
                f"rank {rank} reads {versions_read} versions of its weights; the plan declares at most {allowed}\n"
                f"{format_locations(bodies, {rank: 0}, 'rank program')}",
                rule=7,
            )


def _check_optimizer_fractions(
    rank_instructions: Sequence[Instructions], symbolic: SymbolicResult, bounds: Sequence[Fraction]
) -> None:
    for update in symbolic.updates:
        fraction = update.shard[1] - update.shard[0]
        if fraction > bounds[update.rank]:
            raise ProgramError(
                f"rank {update.rank} updates {fraction} of unit {format_unit(update.unit)} and keeps optimizer state "
                "for "
                f"it; the plan declares at most {bounds[update.rank]}\n"
                f"{format_locations(rank_instructions, {update.rank: update.index}, 'here')}",
                rule=7,
            )


def check_sent_bytes(formula_bytes: Sequence[Fraction], counted_bytes: Sequence[Fraction]) -> None:
    """Check that the instructions send as many bytes as the formulas of the strategies say (rule 8)."""
    for rank, (formula, counted) in enumerate(zip(formula_bytes, counted_bytes, strict=True)):
        if formula != counted:
            raise ProgramError(
                f"rank {rank} sends {float(counted):.0f} bytes in a step; by the formulas of the plan's strategies it "
                f"should send {float(formula):.0f}",
                rule=8,
            )
