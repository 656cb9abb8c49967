"""A step measured word by word."""

from __future__ import annotations

import time

from counterpoint.fabric.fabric import Fabric
from counterpoint.program.instruction import (
    Backward,
    Collective,
    Commit,
    Forward,
    Instruction,
    Pull,
    Push,
    Recompute,
    Recv,
    Release,
    Send,
    Serve,
    Swap,
    Update,
)
from counterpoint.program.text import format_instruction
from counterpoint.program.trace import Event, Lane, Trace
from counterpoint.runtime.feed import Feed
from counterpoint.runtime.records import Note
from counterpoint.runtime.vote import Verdict
from counterpoint.training.team import Team


def measured_step(team: Team, number: int, feed: Feed) -> tuple[Verdict, Trace]:
    """Take a step with a clock on every rank and return its trace, the same on all of them.

    Ranks of one process take turns, so their times say what each did, not what they would do side by side.
    """
    assert team.compiled is not None, "built"
    rows = team.turn_at(number).program.rows
    for rank in team.ranks.values():
        rank.interpreter.clock = time.perf_counter
    try:
        verdict = team.step(number, feed)
    finally:
        for rank in team.ranks.values():
            rank.interpreter.clock = None
    notes = {at: _plain(rank.interpreter.state.notes) for at, rank in team.ranks.items()}
    first: Fabric = team.world.fabrics[0]
    if len(team.world.fabrics) < first.num_ranks:
        everyone = first.gather_values("trace", notes[first.rank], tuple(range(first.num_ranks)))
        notes = dict(enumerate(everyone))  # type: ignore[arg-type]  # what every rank sends
    events = [event for rank, times in notes.items() for event in _events(rank, rows[rank].body, times)]
    return verdict, Trace.of(events, len(rows), "measured")


def _plain(notes: list[Note]) -> list[list[float]]:
    """Return notes as numbers, counted from the first one."""
    began = notes[0].start_s if notes else 0.0
    return [
        [note.start, note.stop, note.start_s - began, note.stop_s - began, float(note.is_transfer)] for note in notes
    ]


def _events(rank: int, words: tuple[Instruction, ...], times: list[list[float]]) -> list[Event]:
    return [
        Event(
            rank,
            int(start),
            " ".join(map(format_instruction, words[int(start) : int(stop)])),
            began,
            ended,
            "link" if is_transfer else lane_of(words[int(start)]),
        )
        for start, stop, began, ended, is_transfer in times
    ]


def lane_of(word: Instruction) -> Lane:
    """Return where the time of an instruction goes."""
    match word:
        case Forward() | Recompute() | Backward() | Update():
            return "compute"
        case Send() | Push() | Release() | Serve() | Swap():
            return "link"
        case Recv() | Pull() | Commit() | Collective():
            return "wait"
