"""Run a program on a virtual clock, one rank of each class for all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from counterpoint.errors import ProgramError
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
from counterpoint.program.partners import Partners, find_partners
from counterpoint.program.program import Program, Words
from counterpoint.program.runs import goes_on
from counterpoint.program.symmetry import refine
from counterpoint.program.text import format_instruction
from counterpoint.program.trace import Event, Trace
from counterpoint.program.turn import Turn
from counterpoint.program.walk import Groups, show_places, walk
from counterpoint.simulator.clock import Clash, Clock, Score
from counterpoint.simulator.costs import Costs


def simulate(program: Program, costs: Costs, speeds: Sequence[float] = ()) -> Trace:
    """Return what one step would be like: one rank of each symmetry class is played, all ranks are in the trace.

    Args:
        program: a program that keeps the laws; a stream is played with one body.
        costs: seconds of its instructions.
        speeds: how many times as fast each rank computes; empty where all are alike.

    Raises:
        ProgramError: the program comes to no end (law 2 or 3).
    """
    return _simulate(program, program.unroll(1), costs, speeds)


BODIES_PLAYED = 4
"""So many bodies of a stream are played to see the last one, which is then like all later ones."""


def simulate_turn(turn: Turn, costs: Costs, speeds: Sequence[float] = ()) -> Trace:
    """Return what one kind of step would be like; in a stream, one body in the long run.

    Every rank's body begins at 0 then, as it does where it is measured.

    Args:
        turn: of a plan.
        costs: seconds of its instructions.
        speeds: how many times as fast each rank computes; empty where all are alike.
    """
    if turn.stream is None:
        return simulate(turn.program, costs, speeds)
    trace = _simulate(turn.stream, turn.stream.unroll(BODIES_PLAYED), costs, speeds)
    events = [event for rank in range(trace.num_ranks) for event in _last_body(trace, turn, rank)]
    return Trace.of(events, trace.num_ranks, "simulated")


def _last_body(trace: Trace, turn: Turn, rank: int) -> list[Event]:
    assert turn.stream is not None, "a stream"
    row, words = turn.stream.rows[rank], turn.program.rows[rank].body
    first = len(row.prologue) + (BODIES_PLAYED - 1) * len(row.body)
    played = [event for event in trace.events if event.rank == rank and 0 <= event.index - first < len(words)]
    began = min((event.start_s for event in played), default=0.0)
    return [
        replace(
            event,
            index=event.index - first,
            words=format_instruction(words[event.index - first]),
            start_s=event.start_s - began,
            stop_s=event.stop_s - began,
        )
        for event in played
    ]


def _simulate(program: Program, rows: Sequence[Words], costs: Costs, speeds: Sequence[float]) -> Trace:
    speaker, clock = play(rows, find_cast(program, rows, speeds), costs, speeds)
    return Trace.of(_events(rows, speaker, clock), len(rows), "simulated")


@dataclass(frozen=True, slots=True)
class Cast:
    """Who meets whom in rows, and which rank speaks for which, whatever the words cost."""

    partners: Partners
    speaker: Sequence[int]


def find_cast(program: Program, rows: Sequence[Words], speeds: Sequence[float] = ()) -> Cast:
    """Return the cast of a program's flat rows.

    Raises:
        ProgramError: messages do not pair up (law 1).
    """
    try:
        partners = find_partners(rows)
    except (IndexError, KeyError):
        raise _reason(rows) from None
    unlike = len(set(speeds)) > 1  # no rank can speak for another then
    groups = tuple((rank,) for rank in range(len(rows))) if unlike else refine(program, rows, partners)
    speaker = [0] * len(rows)
    for group in groups:
        for rank in group:
            speaker[rank] = group[0]
    return Cast(partners, speaker)


def play(rows: Sequence[Words], cast: Cast, costs: Costs, speeds: Sequence[float] = ()) -> tuple[Sequence[int], Clock]:
    """Return who has spoken for each rank in the end, and the clock with what the speakers did.

    Raises:
        ProgramError: the program comes to no end (law 2 or 3).
    """
    speaker = cast.speaker
    try:
        clock = _play(rows, cast.partners, speaker, costs, speeds)
    except Clash:
        speaker = range(len(rows))
        clock = _play(rows, cast.partners, speaker, costs, speeds)
    if clock.stuck:
        raise _reason(rows)
    return speaker, clock


def simulate_every_rank(program: Program, costs: Costs) -> Trace:
    """Return what :func:`simulate` returns, without use of symmetry: the reference that it must equal."""
    rows = program.unroll(1)
    clock = _play(rows, find_partners(rows), range(len(rows)), costs)
    return Trace.of(_events(rows, range(len(rows)), clock), len(rows), "simulated")


def _play(
    rows: Sequence[Words], partners: Partners, speaker: Sequence[int], costs: Costs, speeds: Sequence[float] = ()
) -> Clock:
    seconds = {
        rank: row_seconds(rows[rank], costs, speeds[rank] if rank < len(speeds) else 1.0)
        for rank in dict.fromkeys(speaker)
    }
    clock = Clock(Score(rows, partners, speaker, seconds, costs))
    clock.run()
    return clock


def _reason(rows: Sequence[Words]) -> ProgramError:
    """Return why a program comes to no end; the walk knows."""
    try:
        for _ in walk(rows):
            pass
    except ProgramError as error:
        return error
    places = dict.fromkeys(range(len(rows)), 0)
    return ProgramError(f"the messages of the rows do not pair up\n{show_places(rows, places, 'row')}", law=1)


def _events(rows: Sequence[Words], speaker: Sequence[int], clock: Clock) -> list[Event]:
    write = _Writer()
    return [
        Event(rank, index, write.text(rows[rank][index]), start, stop, lane)
        for rank in range(len(rows))
        for index, start, stop, lane in clock.spans[speaker[rank]]
    ]


class _Writer:
    """Writes words; what a thousand members call is written once."""

    def __init__(self) -> None:
        self.groups = Groups()
        self.texts: dict[tuple[object, ...], str] = {}

    def text(self, word: Instruction) -> str:
        """Return the text of a word."""
        if not isinstance(word, Collective | Commit):
            return format_instruction(word)
        group = self.groups.number(word.group)
        key = (group, word.name, word.value, word.phase) if isinstance(word, Collective) else (group,)
        if key not in self.texts:
            self.texts[key] = format_instruction(word)
        return self.texts[key]


def row_seconds(row: Words, costs: Costs, speed: float = 1.0) -> list[float]:
    """Return the seconds of every word of a row, on its processor, so many times as fast as any, or on its link.

    A gradient that was shared out is summed and applied in part. Adjacent words that are one call begin it once.
    """
    parts: dict[tuple[int, ...], Fraction] = {}
    found = [_word_s(word, parts, costs) for word in row]
    for index, word in enumerate(row):
        if isinstance(word, Forward | Recompute | Backward | Update):
            is_first = index == 0 or not goes_on(row[index - 1], word)
            found[index] = (found[index] + (costs.call_s(word) if is_first else 0.0)) / speed
    return found


def _word_s(word: Instruction, parts: dict[tuple[int, ...], Fraction], costs: Costs) -> float:
    match word:
        case Forward() | Recompute() | Backward():
            return costs.compute_s(word, Fraction(1))
        case Update(unit):
            return costs.compute_s(word, parts.get(unit, Fraction(1)))
        case Collective(phase="-"):
            return 0.0
        case Collective(verb, value, group):
            part = parts.get(value.blocks, Fraction(1)) if (verb, value.name) == ("sum", "grad") else Fraction(1)
            if verb == "share":
                parts[value.blocks] = Fraction(1, len(group))
            return costs.link_s(word, part)
        case Send() | Push() | Commit():
            return costs.link_s(word, Fraction(1))
        case Recv() | Pull() | Serve() | Release() | Swap():
            return 0.0
