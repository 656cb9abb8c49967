"""Run a program on a virtual clock, one rank of each class for all of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
from counterpoint.program.one_copy import groups_with_one_copy
from counterpoint.program.partners import Partners, find_partners
from counterpoint.program.program import Program, Words
from counterpoint.program.runs import goes_on
from counterpoint.program.symmetry import refine
from counterpoint.program.text import format_instruction
from counterpoint.program.trace import Event, Trace
from counterpoint.program.turn import Turn
from counterpoint.program.walk import Groups, show_places, walk
from counterpoint.simulator.bodies import Bodies
from counterpoint.simulator.clock import Clash, Clock
from counterpoint.simulator.costs import Costs
from counterpoint.simulator.moves import row_moves
from counterpoint.simulator.places import Places, nearness
from counterpoint.simulator.score import IDLE_HAND, Hand, Score, hand_of
from counterpoint.world.cluster import Cluster

ALIKE = Cluster()
"""Ranks that are alike, none in the way of another."""


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
    seconds = {rank: row_seconds(rows[rank], costs, rank=rank, speed=cluster.speed(rank)) for rank in speakers}
    crossings = {rank: row_crossings(rows[rank], costs, rank) for rank in speakers} if places.has_cards else {}
    hands = {rank: row_hands(rows[rank], costs, rank, cluster) for rank in speakers}
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


def row_seconds(row: Words, costs: Costs, *, rank: int = 0, speed: float = 1.0) -> list[float]:
    """Return the seconds of every word of a row, on its processor or on its link, while nothing else is in its way.

    A gradient that was shared out is summed and applied in part. Adjacent words that are one call begin it once. What a
    block's backward makes for a microbatch is added to what others before it have left, until an update has used it.

    Args:
        row: whose words.
        costs: of words.
        rank: whose row it is.
        speed: how many times as fast as the device it computes.
    """
    found: list[float] = []
    held: set[int] = set()  # blocks of which there is a gradient
    for index, (word, part) in enumerate(_parted(row)):
        match word:
            case Forward() | Recompute() | Backward() | Update():
                is_first = index == 0 or not goes_on(row[index - 1], word)
                seconds = costs.compute_s(word, part) + (costs.call_s(word) if is_first else 0.0)
                if isinstance(word, Update):
                    held.difference_update(word.unit)
                elif isinstance(word, Backward) and word.part != "input":
                    seconds += costs.add_s(word.block) if word.block in held else 0.0
                    held.add(word.block)
                found.append(seconds / speed)
            case Collective(phase="-"):
                found.append(0.0)
            case Send() | Push() | Commit() | Collective():
                found.append(costs.link_s(word, part, rank))
            case Recv() | Pull() | Serve() | Release() | Swap():
                found.append(0.0)
    return found


def row_hands(row: Words, costs: Costs, rank: int, cluster: Cluster) -> list[Hand]:
    """Return what each word of a row that talks to others asks of its rank's own processor.

    What a rank waits for it takes when it is there: a started collective where it is waited for. A rank that updates
    nothing has what a step costs beside its calls with its commit.
    """
    together, found = groups_with_one_copy(row), list[Hand]()
    updates = any(isinstance(word, Update) for word in row)

    def has_one_copy(word: Collective) -> bool:
        is_one_host = len({cluster.host(member) for member in word.group}) == 1
        return is_one_host and together.get(word.value.blocks) == word.group

    for (word, part), passes in zip(_parted(row), row_moves(row, has_one_copy), strict=True):
        match word:
            case Send() | Push() | Recv() | Pull():
                found.append(hand_of(word, costs, rank, part, passes * costs.pass_s(word)))
            case Commit():
                found.append(Hand(costs.hand_s(word, part, rank) + (0.0 if updates else costs.call_s(word))))
            case Release():
                found.append(Hand(passes * costs.pass_s(word)) if passes else IDLE_HAND)
            case Collective() if word.phase != "+":
                seconds = costs.hand_s(word, part, rank, has_one_copy=has_one_copy(word))
                found.append(Hand(seconds + passes * costs.pass_s(word)))
            case Forward() | Recompute() | Backward() | Update() | Collective() | Serve() | Swap():
                found.append(IDLE_HAND)
    return found


def row_crossings(row: Words, costs: Costs, rank: int) -> list[float]:
    """Return of these seconds those on links that ranks share."""
    found = []
    for word, part in _parted(row):
        if isinstance(word, Send | Push | Commit) or (isinstance(word, Collective) and word.phase != "-"):
            found.append(costs.crossing_s(word, part, rank))
        else:
            found.append(0.0)
    return found


def _parted(row: Words) -> Iterator[tuple[Instruction, Fraction]]:
    """Yield every word with the part of its value that is at hand."""
    parts: dict[tuple[int, ...], Fraction] = {}
    whole = Fraction(1)
    for word in row:
        if isinstance(word, Update):
            yield word, parts.get(word.unit, whole)
        elif isinstance(word, Collective):
            sums_gradients = (word.verb, word.value.name) == ("sum", "grad")
            yield word, parts.get(word.value.blocks, whole) if sums_gradients else whole
            if word.verb == "share" and word.phase != "-":
                parts[word.value.blocks] = Fraction(1, len(word.group))
        else:
            yield word, whole
