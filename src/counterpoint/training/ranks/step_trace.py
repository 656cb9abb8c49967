"""Take a step with a clock on every rank, as a trace of what each rank did and when."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from counterpoint.device.event_clock import EventClock
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

TimingRow: TypeAlias = list[Any]
"""Start and stop of the instructions, start and stop in seconds, whether it is a transfer, and its text."""


def trace_step(
    local_ranks: LocalRanks,
    number: int,
    batch: MicrobatchSource,
    while_computing: Callable[[], None] | None = None,
) -> tuple[StepResult | LateResult, Trace]:
    """Take a step with a clock on every rank and return its trace, the same on all of them.

    Ranks of one process run one at a time, so their times are those of each rank, not of ranks that run concurrently.
    On a device the clock is its own: times are those at which it did the work, and are read once after the step.
    Collectives on other streams and copies of batches are in the lane ``link``.

    Args:
        local_ranks: of this process.
        number: of the step.
        batch: what it reads.
        while_computing: as of :meth:`LocalRanks.step`.
    """
    assert local_ranks.compiled is not None, "built"
    rank_programs = local_ranks.variant_at(number).program.rank_programs
    accelerator = local_ranks.accelerator
    clock = time.perf_counter if accelerator.is_host else EventClock(accelerator)
    for rank in local_ranks.ranks.values():
        rank.interpreter.use_clock(clock)
    try:
        result = local_ranks.step(number, batch, while_computing)
        timings = {index: _to_rows(rank.interpreter.read_timings()) for index, rank in local_ranks.ranks.items()}
    finally:
        for rank in local_ranks.ranks.values():
            rank.interpreter.use_clock(None)
    first: Fabric = local_ranks.world.fabrics[0]
    if len(local_ranks.world.fabrics) < first.num_ranks:
        gathered = first.gather_values("trace", timings[first.rank], tuple(range(first.num_ranks)))
        timings = dict(enumerate(gathered))  # type: ignore[arg-type]  # what every rank sends
    events = [event for rank, times in timings.items() for event in _events(rank, rank_programs[rank].body, times)]
    return result, Trace.from_events(events, len(rank_programs), "measured")


def _to_rows(timings: Sequence[CallTiming]) -> list[TimingRow]:
    """Return timings as JSON, relative to the first call; a copy may have run before it."""
    origin_s = min((timing.start_s for timing in timings if not timing.is_transfer), default=0.0)
    return [
        [one.start, one.stop, one.start_s - origin_s, one.stop_s - origin_s, one.is_transfer, one.text]
        for one in timings
    ]


def _events(rank: int, instructions: tuple[Instruction, ...], rows: list[TimingRow]) -> list[TraceEvent]:
    return [
        TraceEvent(
            rank,
            start,
            text or " ".join(map(format_instruction, instructions[start:stop])),
            began,
            ended,
            "link" if is_transfer else trace_lane(instructions[start]),
        )
        for start, stop, began, ended, is_transfer, text in rows
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
