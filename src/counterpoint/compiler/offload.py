"""The offload pass: fetch optimizer state before the updates that need it, and offload it again after them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

from counterpoint.errors import PlanError
from counterpoint.plan.plan import Plan
from counterpoint.program.instruction import ApplyPushes, Fetch, Instruction, Offload, Update, state
from counterpoint.program.program import Instructions, Program
from counterpoint.program.rewrite import map_parts
from counterpoint.strategies.offload import Offloading


def offload(program: Program, offloading: Offloading) -> Program:
    """Keep the optimizer state of all units elsewhere between updates.

    ::

        before   commit@0,1 U0 U1
        after    commit@0,1 fetch(state0)<disk fetch(state1)<disk U0 U1 offload(state0)>disk offload(state1)>disk

    Cost:
        Every step reads and writes the state that a rank updates once: with Adam in float32, 8 bytes for each of its
        parameters each way. In memory are three chunks of at most 32 MiB, and only during updates. State in host
        memory stays there: the weights and gradients that a rank updates are copied to it, and weights back.

    Source:
        Rajbhandari et al., ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning, SC 2021,
        section 5.2; Ren et al., ZeRO-Offload: Democratizing Billion-Scale Model Training, USENIX ATC 2021.
    """
    return replace(
        program,
        rank_programs=tuple(
            map_parts(rank_program, lambda part: list(_offload_states(part, offloading)))
            for rank_program in program.rank_programs
        ),
    )


def require_offloadable(plan: Plan, program: Program) -> None:
    """Check that ranks update in steps of their own.

    Raises:
        PlanError: servers update when pushes arrive.
    """
    if any(isinstance(instruction, ApplyPushes) for _, instruction in program.instructions()):
        raise PlanError(
            f"under {plan} servers update whenever pushes arrive, so that their optimizer state is always in use; drop "
            "the pass offload, or use data, zero, pipeline or tensor"
        )


def _offload_states(instructions: Instructions, offloading: Offloading) -> Iterator[Instruction]:
    """Yield the instructions, with each run of updates between its fetches and its offloads."""
    for is_update, run in groupby(instructions, lambda one: isinstance(one, Update)):
        run_list = list(run)
        states = [state(one.unit) for one in run_list if isinstance(one, Update)] if is_update else []
        yield from (Fetch(tensor, offloading.state) for tensor in states)
        yield from run_list
        yield from (Offload(tensor, offloading.state) for tensor in states)
