"""A pipeline schedule of the user's own: a function that yields the actions of one stage replica, which are checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TypeAlias

from counterpoint.errors import PlanError, ProgramError
from counterpoint.strategies.pipeline.schedules.schedule import (
    MAX_CHUNKS,
    ActionGenerator,
    PipelineAction,
    PipelineSchedule,
    StageReplica,
)

OwnSchedule: TypeAlias = Callable[[StageReplica], Iterable[PipelineAction]]
"""Called for one stage replica, returns its forwards and backwards in order."""

ACTION_KINDS = ("F", "B", "Bi", "Bw")


def schedule_name(schedule: object) -> str:
    """Return the name of a pipeline's ``schedule``."""
    if isinstance(schedule, str):
        return schedule
    own = getattr(schedule, "func", schedule)  # of a partial
    return schedule.name if isinstance(schedule, PipelineSchedule) else getattr(own, "__name__", type(own).__name__)


def build_own_schedule(schedule: object) -> PipelineSchedule:
    """Return a schedule of the user's own, whose actions are checked.

    Raises:
        PlanError: it is neither a schedule nor a function.
    """
    if isinstance(schedule, PipelineSchedule):
        return PipelineSchedule(
            schedule.name,
            partial(checked_actions, schedule.name, schedule.actions),
            schedule.in_flight,
            schedule.chunk_counts,
            is_v_shaped=schedule.is_v_shaped,
        )
    if not callable(schedule) or isinstance(schedule, type):
        raise PlanError(
            f"schedule={schedule!r} is not a pipeline schedule; give the name of one, or a function that is called "
            "with a StageReplica and yields its PipelineAction('F', micro) and PipelineAction('B', micro) in order"
        )
    actions = partial(checked_actions, schedule_name(schedule), schedule)
    return PipelineSchedule(schedule_name(schedule), actions, partial(peak_in_flight, actions), range(1, MAX_CHUNKS))


def checked_actions(name: str, generate: OwnSchedule, replica: StageReplica) -> Iterator[PipelineAction]:
    """Yield the actions of a stage replica after checking that each of its microbatches is computed once.

    Raises:
        ProgramError: an action is missing, comes twice or too early, or something else is yielded.
    """
    place = f"{name}, for stage {replica.stage} of {replica.num_stages},"
    actions = [parse_action(place, action) for action in generate(replica)]
    done: set[tuple[str, int, int]] = set()
    for action in actions:
        micro, chunk = action.micro, action.chunk
        where = f"of microbatch {micro} on chunk {chunk}"
        if micro not in replica.micros or chunk not in range(replica.chunks_per_stage):
            micros = f"{replica.micros[0]} to {replica.micros[-1]}" if replica.micros else "none"
            raise ProgramError(
                f"{place} yields {action.kind} {where}, but its microbatches are {micros}, and it has "
                f"{replica.chunks_per_stage} chunks, counted from 0; iterate over replica.micros and "
                "range(replica.chunks_per_stage)"
            )
        if (action.kind, micro, chunk) in done or (action.kind == "B" and ("Bi", micro, chunk) in done):
            raise ProgramError(f"{place} yields {action.kind} {where} twice; yield each action once")
        needed = {"F": "", "B": "F", "Bi": "F", "Bw": "Bi"}[action.kind]
        if needed and (needed, micro, chunk) not in done:
            raise ProgramError(f"{place} yields {action.kind} {where} before its {needed}; yield {needed} first")
        done.add((action.kind, micro, chunk))
    for micro in replica.micros:
        for chunk in range(replica.chunks_per_stage):
            kinds = {kind for kind in ACTION_KINDS if (kind, micro, chunk) in done}
            if kinds not in ({"F", "B"}, {"F", "Bi", "Bw"}):
                lacks = "F" if "F" not in kinds else "Bw" if "Bi" in kinds else "B"
                raise ProgramError(
                    f"{place} yields no {lacks} of microbatch {micro} on chunk {chunk}; a schedule yields the forward "
                    "F and the backward, B or its two parts Bi and Bw, of each of replica.micros on each chunk"
                )
    yield from actions


def parse_action(place: str, action: object) -> PipelineAction:
    """Return an action, which may be a plain tuple.

    Raises:
        ProgramError: it is something else.
    """
    if not isinstance(action, tuple) or len(action) not in {2, 3} or action[0] not in ACTION_KINDS:
        raise ProgramError(
            f"{place} yields {action!r}; yield PipelineAction(kind, micro, chunk), with the kind "
            f"{', '.join(ACTION_KINDS)}"
        )
    return PipelineAction(*action)


def peak_in_flight(actions: ActionGenerator, replica: StageReplica) -> int:
    """Return the most microbatches between forward and the end of their backward, summed over chunks."""
    in_flight = peak = 0
    for action in actions(replica):
        in_flight += {"F": 1, "B": -1, "Bi": 0, "Bw": -1}[action.kind]
        peak = max(peak, in_flight)
    return peak
