"""How long a step takes on the virtual clock, without a trace of it: for comparing many plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from counterpoint.program.instruction import Serve, Update
from counterpoint.program.program import Words
from counterpoint.program.turn import Turn
from counterpoint.simulator.bodies import Bodies
from counterpoint.simulator.clock import Clock
from counterpoint.simulator.costs import Costs
from counterpoint.simulator.row_times import ALIKE
from counterpoint.simulator.simulate import find_cast, play, step_s
from counterpoint.world.cluster import Cluster


@dataclass(frozen=True, slots=True)
class Spent:
    """The seconds of a step, and of those how many a rank computes and how many it updates, on average.

    In a stream a step lasts from the end of a body to the end of the next one, in the long run.
    """

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
    bodies = Bodies.of(turn)
    rows = turn.playable.unroll(bodies.num_played)
    cast = find_cast(turn.playable, rows, cluster)
    found = []
    for each in costs:
        speaker, clock = play(rows, cast, each, cluster)
        found.append(spent_in(rows, speaker, clock, bodies))
    return found


def spent_in(rows: Sequence[Words], speaker: Sequence[int], clock: Clock, bodies: Bodies | None = None) -> Spent:
    """Return what a clock has shown that has played rows.

    Args:
        rows: of all ranks.
        speaker: for each rank the one that has played for it.
        clock: with what the speakers did.
        bodies: which of a stream's were played; None where the rows are one step.
    """
    speakers = dict.fromkeys(speaker)
    times = 1 if bodies is None else bodies.num_counted
    own = {rank: _worked(rows[rank], clock, rank, bodies) for rank in speakers}
    return Spent(
        step_s(speakers, clock, bodies),
        sum(own[rank][0] for rank in speaker) / len(rows) / times,
        sum(own[rank][1] for rank in speaker) / len(rows) / times,
    )


def _worked(row: Words, clock: Clock, rank: int, bodies: Bodies | None) -> tuple[float, float]:
    """Return the seconds that a rank computes and updates in the bodies that count."""
    counted = range(len(row)) if bodies is None else bodies.counted(rank)
    compute_s = update_s = 0.0
    for index, start, stop, lane in clock.spans[rank]:
        if lane != "compute" or index not in counted:
            continue
        if isinstance(row[index], Update | Serve):
            update_s += stop - start
        else:
            compute_s += stop - start
    return compute_s, update_s
