"""The registry of pipeline schedules: those with a flush by name and number of chunks per stage, and those without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from counterpoint.errors import PlanError
from counterpoint.strategies.pipeline.schedules.gpipe import GPIPE
from counterpoint.strategies.pipeline.schedules.interleaved_1f1b import INTERLEAVED
from counterpoint.strategies.pipeline.schedules.one_f_one_b import ONE_F_ONE_B
from counterpoint.strategies.pipeline.schedules.pipedream import WeightPolicy
from counterpoint.strategies.pipeline.schedules.schedule import MAX_CHUNKS, PipelineSchedule
from counterpoint.strategies.pipeline.schedules.zero_bubble import ZB_H1
from counterpoint.strategies.pipeline.schedules.zero_bubble_v import ZB_V

SCHEDULES: tuple[PipelineSchedule, ...] = (
    ONE_F_ONE_B,
    GPIPE,
    ZB_H1,
    ZB_V,
    INTERLEAVED,
)
"""Schedules with a flush, in the order in which the planner tries them; plan texts accept ``schedule=NAME`` of each."""

ASYNC_SCHEDULES: Mapping[str, WeightPolicy] = {"pipedream": "stashing", "pipedream_2bw": "double_buffer"}
"""Schedules without a flush; vertical sync turns the first one's policy into ``vertical_sync``."""

SCHEDULE_NAMES = tuple(sorted({*(schedule.name for schedule in SCHEDULES), *ASYNC_SCHEDULES}))
"""All values of a pipeline's ``schedule``."""


def require_schedule(name: str, chunks: int) -> None:
    """Check that a schedule supports a number of chunks per stage; asynchronous ones support one chunk.

    Raises:
        PlanError: there is no such schedule, or it does not.
    """
    if name not in SCHEDULE_NAMES:
        raise PlanError(f"there is no pipeline schedule {name!r}; the schedules are {', '.join(SCHEDULE_NAMES)}")
    _require_count(name, [one.chunk_counts for one in SCHEDULES if one.name == name] or [range(1, 2)], chunks)


def require_chunk_count(schedule: PipelineSchedule, chunks: int) -> None:
    """Check that a schedule of the user's own supports a number of chunks per stage.

    Raises:
        PlanError: it does not.
    """
    _require_count(schedule.name, [schedule.chunk_counts], chunks)


def _require_count(name: str, all_counts: Sequence[range], chunks: int) -> None:
    if not any(chunks in chunk_counts for chunk_counts in all_counts):
        supported = " or ".join(
            f"chunks_per_stage={chunk_counts.start}" + (" or more" if chunk_counts.stop == MAX_CHUNKS else "")
            for chunk_counts in all_counts
        )
        raise PlanError(f"schedule={name} does not support chunks_per_stage={chunks}; give {supported}")


def find_schedule(name: str, chunks: int) -> PipelineSchedule:
    """Return the schedule with a flush of that name for a number of chunks per stage, which must exist."""
    return next(schedule for schedule in SCHEDULES if schedule.name == name and chunks in schedule.chunk_counts)
