"""The offload pass: fetch optimizer state before the updates that need it, and offload it again after them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

from counterpoint.compiler.recompute import move_kept_inputs
from counterpoint.errors import PlanError
from counterpoint.model.spec import ModelSpec
from counterpoint.plan.plan import Plan
from counterpoint.program.instruction import ApplyPushes, Fetch, Instruction, Offload, OffloadPlace, Update, state
from counterpoint.program.program import Instructions, Program
from counterpoint.program.rewrite import map_parts
from counterpoint.strategies.offload import Offloading


def offload(program: Program, offloading: Offloading, model: ModelSpec) -> Program:
    """Keep the optimizer state of all units elsewhere between updates, or inputs of blocks until their recomputation.

    ::

        before   commit@0,1 U0 U1
        after    commit@0,1 fetch(state0)<disk fetch(state1)<disk U0 U1 offload(state0)>disk offload(state1)>disk

        before   F0.0 F1.0                    F2.0 ...                   B2.0 R1.0 B1.0
        after    F0.0 F1.0 offload(x1.0)>disk F2.0 ... fetch(x1.0)<disk  B2.0 R1.0 B1.0

    An input is written while the next blocks run, and read during the computation before the recomputation.

    Cost:
        Every step reads and writes the state that a rank updates once: with Adam in float32, 8 bytes for each of its
        parameters each way. In memory are three chunks of at most 32 MiB, and only during updates. State in host
        memory stays there: the weights and gradients that a rank updates are copied to it, and weights back. Each input
        that blocks are recomputed from is written and read once; in memory are at most one that is written and two
        that are read.

    Source:
        Rajbhandari et al., ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning, SC 2021,
        section 5.2; Ren et al., ZeRO-Offload: Democratizing Billion-Scale Model Training, USENIX ATC 2021.
    """
    place, state_place = offloading.activations, offloading.state
    rank_programs = program.rank_programs
    if place is not None:
        rank_programs = tuple(
            replace(
                one,
                body=move_kept_inputs(
                    one.body, model, lambda tensor: (Offload(tensor, place), Fetch(tensor, place)), is_early=True
                ),
            )
            for one in rank_programs
        )
    if state_place is not None:
        rank_programs = tuple(
            map_parts(one, lambda part: list(_offload_states(part, state_place))) for one in rank_programs
        )
    return replace(program, rank_programs=rank_programs)


def require_offloadable(plan: Plan, program: Program, offloading: Offloading) -> None:
    """Check that ranks update in steps of their own, and that forwards and recomputations are of one batch.

    Raises:
        PlanError: servers update when pushes arrive, or the pipeline is asynchronous.
    """
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
