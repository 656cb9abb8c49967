"""Take a step with a clock on every rank, as a trace of what each rank did and when."""

from __future__ import annotations

import time

from counterpoint.fabric.fabric import Fabric
from counterpoint.program.instruction import (
    ApplyPushes,
    Backward,
    Collective,
    Commit,
    Fetch,
    Forward,
    Free,
    Instruction,
    Offload,
    Pull,
    Push,
    Recompute,
    Recv,
    Send,
    SwapGradBuffers,
    Update,
)
from counterpoint.program.text import format_instruction
from counterpoint.program.trace import Lane, Trace, TraceEvent
from counterpoint.runtime.commit.device_commit import LateResult
from counterpoint.runtime.commit.step_commit import StepResult
from counterpoint.runtime.microbatches import MicrobatchSource
from counterpoint.runtime.rank_state import CallTiming
from counterpoint.training.ranks.local_ranks import LocalRanks


def trace_step(local_ranks: LocalRanks, number: int, batch: MicrobatchSource) -> tuple[StepResult | LateResult, Trace]:
    """Take a step with a clock on every rank and return its trace, the same on all of them.

    Ranks of one process run one at a time, so their times are those of each rank, not of ranks that run concurrently.
    """
    assert local_ranks.compiled is not None, "built"
    rank_programs = local_ranks.variant_at(number).program.rank_programs
    for rank in local_ranks.ranks.values():
        rank.interpreter.use_clock(time.perf_counter)
    try:
        result = local_ranks.step(number, batch)
    finally:
        for rank in local_ranks.ranks.values():
            rank.interpreter.use_clock(None)
    timings = {index: _to_floats(rank.interpreter.state.timings) for index, rank in local_ranks.ranks.items()}
    first: Fabric = local_ranks.world.fabrics[0]
    if len(local_ranks.world.fabrics) < first.num_ranks:
        gathered = first.gather_values("trace", timings[first.rank], tuple(range(first.num_ranks)))
        timings = dict(enumerate(gathered))  # type: ignore[arg-type]  # what every rank sends
    events = [event for rank, times in timings.items() for event in _events(rank, rank_programs[rank].body, times)]
    return result, Trace.from_events(events, len(rank_programs), "measured")


def _to_floats(timings: list[CallTiming]) -> list[list[float]]:
    """Return timings as numbers, relative to the first one."""
    origin_s = timings[0].start_s if timings else 0.0
    return [
        [timing.start, timing.stop, timing.start_s - origin_s, timing.stop_s - origin_s, float(timing.is_transfer)]
        for timing in timings
    ]


def _events(rank: int, instructions: tuple[Instruction, ...], times: list[list[float]]) -> list[TraceEvent]:
    return [
        TraceEvent(
            rank,
            int(start),
            " ".join(map(format_instruction, instructions[int(start) : int(stop)])),
            began,
            ended,
            "link" if is_transfer else trace_lane(instructions[int(start)]),
        )
        for start, stop, began, ended, is_transfer in times
    ]


def trace_lane(instruction: Instruction) -> Lane:
    """Return the lane of the trace that an instruction belongs to."""
    match instruction:
        case Forward() | Recompute() | Backward() | Update():
            return "compute"
        case Send() | Push() | Free() | ApplyPushes() | SwapGradBuffers() | Fetch() | Offload():
            return "link"
        case Recv() | Pull() | Commit() | Collective():
            return "wait"
