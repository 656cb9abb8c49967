"""Run a program on a virtual clock, one rank of each class for all of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from counterpoint.errors import ProgramError
from counterpoint.program.instruction import (
    Collective,
    Commit,
    Instruction,
)
from counterpoint.program.partners import Partners, find_partners
from counterpoint.program.program import Program, Words
from counterpoint.program.symmetry import refine
from counterpoint.program.text import format_instruction
from counterpoint.program.trace import Event, Trace
from counterpoint.program.turn import Turn
from counterpoint.program.walk import Groups, show_places, walk
from counterpoint.simulator.bodies import Bodies
from counterpoint.simulator.clock import Clash, Clock
from counterpoint.simulator.costs import Costs
from counterpoint.simulator.places import Places, nearness
from counterpoint.simulator.row_times import ALIKE, Times, time_row
from counterpoint.simulator.score import Score
from counterpoint.world.cluster import Cluster


def simulate(program: Program, costs: Costs, cluster: Cluster = ALIKE) -> Trace:
    """Return what one step would be like: one rank of each symmetry class is played, all ranks are in the trace.

    Args:
        program: a program that keeps the laws; a stream is played with one body.
        costs: seconds of its instructions.
        cluster: how fast each rank is, and which of them are in each other's way.

    Raises:
        ProgramError: the program comes to no end (law 2 or 3).
    """
    return _simulate(program, program.unroll(1), costs, cluster)


def simulate_turn(turn: Turn, costs: Costs, cluster: Cluster = ALIKE) -> Trace:
    """Return what one kind of step would be like; in a stream, one body in the long run.

    Every rank's body begins at 0 then, as it does where it is measured; how long it is until the next is told beside.

    Args:
        turn: of a plan.
        costs: seconds of its instructions.
        cluster: how fast each rank is, and which of them are in each other's way.
    """
    if turn.stream is None:
        return simulate(turn.program, costs, cluster)
    bodies = Bodies.of(turn)
    rows = turn.stream.unroll(bodies.num_played)
    speaker, clock = play(rows, find_cast(turn.stream, rows, cluster), costs, cluster)
    own = _by_rank(_trace(rows, speaker, clock))
    events = [event for rank in range(len(rows)) for event in _last_body(own[rank], bodies, rank)]
    return replace(Trace.of(events, len(rows), "simulated"), beat_s=step_s(dict.fromkeys(speaker), clock, bodies))


def _by_rank(trace: Trace) -> list[list[Event]]:
    found: list[list[Event]] = [[] for _ in range(trace.num_ranks)]
    for event in trace.events:
        found[event.rank].append(event)
    return found


def _last_body(events: Sequence[Event], bodies: Bodies, rank: int) -> list[Event]:
    last, words = bodies.last(rank), bodies.turn.program.rows[rank].body
    played = [event for event in events if event.index in last]
    began = min((event.start_s for event in played), default=0.0)
    return [
        replace(
            event,
            index=event.index - last.start,
            words=format_instruction(words[event.index - last.start]),
            start_s=event.start_s - began,
            stop_s=event.stop_s - began,
        )
        for event in played
    ]


def _simulate(program: Program, rows: Sequence[Words], costs: Costs, cluster: Cluster) -> Trace:
    speaker, clock = play(rows, find_cast(program, rows, cluster), costs, cluster)
    return _trace(rows, speaker, clock)


DIGITS = 12
"""A difference of two late moments has so many digits that are no rounding; equal streams are then equally fast."""


def step_s(speakers: Iterable[int], clock: Clock, bodies: Bodies | None = None) -> float:
    """Return the seconds of a step that was played: in a stream those from the end of a body to the end of the next.

    Args:
        speakers: whose words were played.
        clock: with what they did.
        bodies: which of a stream's were played; None where the rows are one step.
    """
    found = 0.0
    for rank in speakers:
        if bodies is None or bodies.turn.stream is None:
            found = max(found, _end(clock, rank, None))
        else:
            passed = _end(clock, rank, bodies.counted(rank)) - _end(clock, rank, bodies.earlier(rank))
            found = max(found, float(f"{passed / bodies.num_counted:.{DIGITS}g}"))
    return found


def _end(clock: Clock, rank: int, places: range | None) -> float:
    """Return when the last of a rank's words at some places was done; of all of them, with none."""
    return max((stop for index, _, stop, _ in clock.spans[rank] if places is None or index in places), default=0.0)


@dataclass(frozen=True, slots=True)
class Cast:
    """Who meets whom in rows, and which rank speaks for which, whatever the words cost."""

    partners: Partners
    speaker: Sequence[int]


def find_cast(program: Program, rows: Sequence[Words], cluster: Cluster = ALIKE) -> Cast:
    """Return the cast of a program's flat rows.

    Raises:
        ProgramError: messages do not pair up (law 1).
    """
    try:
        partners = find_partners(rows)
    except (IndexError, KeyError):
        raise _reason(rows) from None
    speaker = [0] * len(rows)
    for group in refine(program, rows, partners, nearness(cluster, len(rows))):
        for rank in group:
            speaker[rank] = group[0]
    return Cast(partners, speaker)


def play(rows: Sequence[Words], cast: Cast, costs: Costs, cluster: Cluster = ALIKE) -> tuple[Sequence[int], Clock]:
    """Return who has spoken for each rank in the end, and the clock with what the speakers did.

    Raises:
        ProgramError: the program comes to no end (law 2 or 3).
    """
    speaker = cast.speaker
    try:
        clock = _play(rows, cast, costs, cluster)
    except Clash:
        speaker = range(len(rows))
        clock = _play(rows, Cast(cast.partners, speaker), costs, cluster)
    if clock.stuck:
        raise _reason(rows)
    return speaker, clock


def simulate_every_rank(program: Program, costs: Costs, cluster: Cluster = ALIKE) -> Trace:
    """Return what :func:`simulate` returns, without use of symmetry: the reference that it must equal."""
    rows = program.unroll(1)
    clock = _play(rows, Cast(find_partners(rows), range(len(rows))), costs, cluster)
    return _trace(rows, range(len(rows)), clock)


def _play(rows: Sequence[Words], cast: Cast, costs: Costs, cluster: Cluster) -> Clock:
    speakers = list(dict.fromkeys(cast.speaker))
    places = Places(cluster, cast.speaker)
    times = {rank: time_row(rows[rank], costs, rank=rank, cluster=cluster) for rank in speakers}
    return run_clock(rows, cast, times, costs, places)


def run_clock(rows: Sequence[Words], cast: Cast, times: Mapping[int, Times], costs: Costs, places: Places) -> Clock:
    """Return the clock after those have spoken of whose words it is known what each takes.

    Raises:
        Clash: ranks of one class would differ, see there.
    """
    seconds = {rank: own.seconds for rank, own in times.items()}
    crossings = {rank: own.crossings for rank, own in times.items()} if places.has_cards else {}
    hands = {rank: own.hands for rank, own in times.items()}
    clock = Clock(Score(rows, cast.partners, cast.speaker, seconds, crossings, hands, costs, places))
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


def _trace(rows: Sequence[Words], speaker: Sequence[int], clock: Clock) -> Trace:
    """Return the events of all ranks; those of a class are put in order once."""
    write = _Writer()
    spans = {rank: sorted(own, key=lambda span: (span[1], span[2], span[0])) for rank, own in clock.spans.items()}
    events = [
        Event(rank, index, write.text(row[index]), start, stop, lane)
        for rank, row in enumerate(rows)
        for index, start, stop, lane in spans[speaker[rank]]
    ]
    return Trace(tuple(events), len(rows), "simulated")


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
