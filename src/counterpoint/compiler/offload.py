"""The offload pass: fetch optimizer state and weights before they are used, and offload them again after updates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TypeGuard

from counterpoint.compiler.recompute import move_kept_inputs
from counterpoint.errors import PlanError
from counterpoint.model.spec import ModelSpec
from counterpoint.plan.plan import Plan
from counterpoint.program.instruction import (
    ApplyPushes,
    Collective,
    Commit,
    Fetch,
    Free,
    Instruction,
    Offload,
    OffloadPlace,
    TensorRef,
    Update,
    state,
)
from counterpoint.program.program import Instructions, Program
from counterpoint.program.rewrite import map_parts
from counterpoint.program.units import freed_weights
from counterpoint.strategies.offload import OFFLOAD_ACTIVATIONS_PASS, Offloading
from counterpoint.strategies.recomputation import PARTITION_PASS, select_blocks


def offload(program: Program, offloading: Offloading, model: ModelSpec) -> Program:
    """Keep optimizer state elsewhere between updates, inputs of blocks until recomputation, or shards of weights.

    ::

        before   commit@0,1 U0 U1
        after    commit@0,1 fetch(state0)<disk fetch(state1)<disk U0 U1 offload(state0)>disk offload(state1)>disk

        before   F0.0 F1.0                    F2.0 ...                   B2.0 R1.0 B1.0
        after    F0.0 F1.0 offload(x1.0)>disk F2.0 ... fetch(x1.0)<disk  B2.0 R1.0 B1.0

        before   gather(w0)                     F0.0 free(w0) gather(w1) F1.0 free(w1) ...
        after    fetch(w0) gather(w0) fetch(w1) F0.0 free(w0) gather(w1) F1.0 free(w1) ...
        before   U0 U1 U2
        after    fetch(w0) fetch(w1) U0 fetch(w2) U1 offload(w0) U2 offload(w1) offload(w2)

    An input is written while the next blocks run, and read during the computation before the recomputation. A shard of
    weights is read from the gather before on, but not before the same weights are freed; during an update the next one
    is read and the one before written.

    Cost:
        Every step reads and writes the state that a rank updates once: with Adam in float32, 8 bytes for each of its
        parameters each way. In memory are three chunks of at most 32 MiB, and only during updates. State in host
        memory stays there: the weights and gradients that a rank updates are copied to it, and weights back. Each input
        that blocks are recomputed from is written and read once; in memory are at most one that is written and two
        that are read. Shards of weights are read for each gather and each update, and written once; in memory is the
        one that is gathered next, and during updates one that is read, one that is updated and one that is written.

    Source:
        Rajbhandari et al., ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning, SC 2021,
        section 5.2; Ren et al., ZeRO-Offload: Democratizing Billion-Scale Model Training, USENIX ATC 2021.
    """
    place, state_place, param_place = offloading.activations, offloading.state, offloading.params
    rank_programs = program.rank_programs
    if place is not None:
        blocks = select_blocks(offloading.selector, model, OFFLOAD_ACTIVATIONS_PASS)
        rank_programs = tuple(
            replace(
                one,
                body=move_kept_inputs(
                    one.body,
                    model,
                    lambda tensor: (Offload(tensor, place), Fetch(tensor, place)),
                    blocks=blocks,
                    is_early=True,
                ),
            )
            for one in rank_programs
        )
    if param_place is not None:  # before states, whose updates it separates
        rank_programs = tuple(map_parts(one, lambda part: _offload_weights(part, param_place)) for one in rank_programs)
    if state_place is not None:
        rank_programs = tuple(
            map_parts(one, lambda part: list(_offload_states(part, state_place))) for one in rank_programs
        )
    return replace(program, rank_programs=rank_programs)


def require_offloadable(plan: Plan, program: Program, offloading: Offloading, model: ModelSpec) -> None:
    """Check that ranks update in steps of their own, that a step is of one batch, and that weights are gathered.

    Raises:
        PlanError: servers update when pushes arrive, the pipeline is asynchronous, weights are whole between steps, or
            an input would be both on disk and on other ranks.
    """
    if offloading.activations and plan.partition_selector is not None:
        on_disk = select_blocks(offloading.selector, model, OFFLOAD_ACTIVATIONS_PASS)
        both = sorted(on_disk & select_blocks(plan.partition_selector, model, PARTITION_PASS))
        if both:
            raise PlanError(
                f"the passes {PARTITION_PASS} and {OFFLOAD_ACTIVATIONS_PASS} both say where the input of block "
                f"{both[0]} is; drop it from one of the two"
            )
    if offloading.params and not freed_weights(instruction for _, instruction in program.instructions()):
        raise PlanError(
            f"offload:params={offloading.params} offloads the shards of weights that ranks gather for each use, but "
            f"under {plan} weights are whole; use zero(n, level=3) with n of at least 2 and a persistence_threshold "
            "below the sizes of its units, or drop the pass"
        )
    if offloading.activations and program.is_async_pipeline:
        raise PlanError(
            f"under {plan} forwards and recomputations are of different batches, so that offload:activations is not "
            "available; drop it, or give the pipeline schedule=one_f_one_b"
        )
    if offloading.state and any(isinstance(instruction, ApplyPushes) for _, instruction in program.instructions()):
        raise PlanError(
            f"under {plan} servers update whenever pushes arrive, so that their optimizer state is always in use; drop "
            "the pass offload, or use data, zero, pipeline or tensor"
        )


def _offload_states(instructions: Instructions, place: OffloadPlace) -> Iterator[Instruction]:
    """Yield the instructions, with each run of updates between its fetches and its offloads."""
    for is_update, run in groupby(instructions, lambda one: isinstance(one, Update)):
        run_list = list(run)
        states = [state(one.unit) for one in run_list if isinstance(one, Update)] if is_update else []
        yield from (Fetch(tensor, place) for tensor in states)
        yield from run_list
        yield from (Offload(tensor, place) for tensor in states)


def _offload_weights(instructions: Instructions, place: OffloadPlace) -> list[Instruction]:
    """Return the instructions with the weights that they free in a place, and fetched before each use."""
    freed = frozenset(TensorRef("weight", unit) for unit in freed_weights(instructions))
    return list(_move_around_updates(_fetch_before_gathers(instructions, freed, place), freed, place))


def _fetch_before_gathers(
    instructions: Instructions, freed: frozenset[TensorRef], place: OffloadPlace
) -> list[Instruction]:
    """Return the instructions with a fetch for each gather, where the one before ends or the weights were freed."""
    fetches: defaultdict[int, list[Instruction]] = defaultdict(list)  # by the index that they come before
    earliest: int | None = None  # where the gathers before end, or the last update
    freed_at: dict[TensorRef, int] = {}
    for is_gather, run in groupby(enumerate(instructions), lambda one: _is_gather(one[1], freed)):
        items = list(run)
        if is_gather:
            first, after = items[0][0], items[-1][0] + 1
            for _, gather in items:
                assert isinstance(gather, Collective), "a gather"
                at = first if earliest is None else max(earliest, freed_at.get(gather.tensor, 0))
                fetches[at].append(Fetch(gather.tensor, place))
            earliest = after
        for index, one in items:
            if isinstance(one, Free):
                freed_at[one.tensor] = index + 1
            elif isinstance(one, Commit | Update):
                earliest = index + 1
    result: list[Instruction] = []
    for index, instruction in enumerate(instructions):
        result += [*fetches[index], instruction]
    return result


def _is_gather(instruction: Instruction, freed: frozenset[TensorRef]) -> TypeGuard[Collective]:
    """Return whether an instruction gathers weights that are freed after use, or starts to."""
    if not isinstance(instruction, Collective) or instruction.phase == "wait":
        return False
    return instruction.op == "all_gather" and instruction.tensor in freed


def _move_around_updates(
    instructions: Sequence[Instruction], freed: frozenset[TensorRef], place: OffloadPlace
) -> Iterator[Instruction]:
    """Yield the instructions; during an update the next weights are read, and those before are written."""
    for is_update, run in groupby(instructions, lambda one: isinstance(one, Update)):
        run_list = list(run)
        weights = [TensorRef("weight", one.unit) for one in run_list if isinstance(one, Update)] if is_update else []
        moved = [tensor for tensor in weights if tensor in freed]
        yield from (Fetch(tensor, place) for tensor in moved[:1])
        num_updated = 0
        for index, instruction in enumerate(run_list):
            if not weights or weights[index] not in freed:
                yield instruction
                continue
            yield from (Fetch(tensor, place) for tensor in moved[num_updated + 1 : num_updated + 2])
            yield instruction
            yield from (Offload(tensor, place) for tensor in moved[max(num_updated - 1, 0) : num_updated])
            num_updated += 1
        yield from (Offload(tensor, place) for tensor in moved[-1:])
