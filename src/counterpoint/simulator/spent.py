"""How long a step takes on the virtual clock, without a trace of it: for comparing many plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from counterpoint.program.instruction import Serve, Update
from counterpoint.program.program import Words
from counterpoint.program.turn import Turn
from counterpoint.simulator.clock import Clock
from counterpoint.simulator.costs import Costs
from counterpoint.simulator.simulate import ALIKE, BODIES_PLAYED, find_cast, play
from counterpoint.world.cluster import Cluster


@dataclass(frozen=True, slots=True)
class Spent:
    """The seconds of a step, and of those how many a rank computes and how many it updates, on average."""

    step_s: float
    compute_s: float
    update_s: float


def spend(turn: Turn, costs: Sequence[Costs], cluster: Cluster = ALIKE) -> list[Spent]:
    """Return what :func:`counterpoint.simulator.simulate.simulate_turn` would show of one kind of step, in sums.

    Args:
        turn: of a plan.
        costs: one or more, for each of which it is played.
        cluster: how fast each rank is, and which of them are in each other's way.

    Raises:
        ProgramError: the program comes to no end (law 2 or 3).
    """
    rows = turn.playable.unroll(1 if turn.stream is None else BODIES_PLAYED)
    cast = find_cast(turn.playable, rows, cluster)
    bodies = [_body(turn, rank) for rank in range(len(rows))]
    found = []
    for each in costs:
        speaker, clock = play(rows, cast, each, cluster)
        found.append(spent_in(rows, speaker, clock, bodies))
    return found


def spent_in(rows: Sequence[Words], speaker: Sequence[int], clock: Clock, bodies: Sequence[range]) -> Spent:
    """Return what a clock has shown that has played rows.

    Args:
        rows: of all ranks.
        speaker: for each rank the one that has played for it.
        clock: with what the speakers did.
        bodies: for each speaker the places of the words in its row that count.
    """
    own = {rank: _spent(rows[rank], clock, rank, bodies[rank]) for rank in dict.fromkeys(speaker)}
    return Spent(
        max((spent.step_s for spent in own.values()), default=0.0),
        sum(own[rank].compute_s for rank in speaker) / len(rows),
        sum(own[rank].update_s for rank in speaker) / len(rows),
    )


def beat_s(turn: Turn, costs: Costs, cluster: Cluster = ALIKE) -> float:
    """Return the seconds from the end of one body of a stream to the end of the next; of any other step, its seconds.

    A body begins before the one before it has come to its end, because links go on: in the long run a step takes less
    than a body.

    Args:
        turn: of a plan.
        costs: of its words.
        cluster: as for :func:`spend`.

    Raises:
        ProgramError: the program comes to no end (law 2 or 3).
    """
    if turn.stream is None:
        return spend(turn, [costs], cluster)[0].step_s
    rows = turn.stream.unroll(BODIES_PLAYED)
    speaker, clock = play(rows, find_cast(turn.stream, rows, cluster), costs, cluster)
    beats = []
    for rank in dict.fromkeys(speaker):
        last = _body(turn, rank)
        ends = [
            max((stop for index, _, stop, _ in clock.spans[rank] if index in body), default=0.0)
            for body in (range(last.start - len(last), last.start), last)
        ]
        beats.append(ends[1] - ends[0])
    return max(beats)


def _body(turn: Turn, rank: int) -> range:
    """Return the places of the words in a rank's flat row that count: of a stream the last body that is played."""
    if turn.stream is None:
        return range(len(turn.program.rows[rank].body))
    row = turn.stream.rows[rank]
    first = len(row.prologue) + (BODIES_PLAYED - 1) * len(row.body)
    return range(first, first + len(turn.program.rows[rank].body))


def _spent(row: Words, clock: Clock, rank: int, body: range) -> Spent:
    spans = [span for span in clock.spans[rank] if span[0] in body]
    began = min((start for _, start, _, _ in spans), default=0.0) if body.start else 0.0
    stopped = max((stop for _, _, stop, _ in spans), default=0.0)
    compute_s = update_s = 0.0
    for index, start, stop, lane in spans:
        if lane == "compute" and isinstance(row[index], Update | Serve):
            update_s += stop - start
        elif lane == "compute":
            compute_s += stop - start
    return Spent(stopped - began, compute_s, update_s)
