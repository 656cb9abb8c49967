"""The registry of pipeline schedules by name and number of chunks per stage."""

from __future__ import annotations

from counterpoint.errors import PlanError
from counterpoint.strategies.pipeline.schedules import (
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    zero_bubble,
    zero_bubble_v,
)
from counterpoint.strategies.pipeline.schedules.pipedream import ASYNC_SCHEDULES
from counterpoint.strategies.pipeline.schedules.schedule import PipelineSchedule

_MAX_CHUNKS = 1 << 20
"""More chunks than any model has blocks."""

SCHEDULES: dict[str, tuple[PipelineSchedule, ...]] = {
    "gpipe": (PipelineSchedule(gpipe.gpipe, gpipe.in_flight, range(1, _MAX_CHUNKS)),),
    "one_f_one_b": (PipelineSchedule(one_f_one_b.one_f_one_b, one_f_one_b.in_flight),),
    "interleaved": (PipelineSchedule(interleaved_1f1b.interleaved, interleaved_1f1b.in_flight, range(2, _MAX_CHUNKS)),),
    "zero_bubble": (
        PipelineSchedule(zero_bubble.zb_h1, zero_bubble.in_flight),
        PipelineSchedule(zero_bubble_v.zb_v, zero_bubble_v.in_flight, range(2, 3), is_v_shaped=True),
    ),
}
"""Schedules with a flush; under each name one for each range of numbers of chunks."""

SCHEDULE_NAMES = tuple(sorted((*SCHEDULES, *ASYNC_SCHEDULES)))
"""All values of a pipeline's ``schedule``."""


def require_schedule(name: str, chunks: int) -> None:
    """Check that a schedule supports a number of chunks per stage; asynchronous ones support one chunk.

    Raises:
        PlanError: there is no such schedule, or it does not.
    """
    if name not in SCHEDULE_NAMES:
        raise PlanError(f"there is no pipeline schedule {name!r}; the schedules are {', '.join(SCHEDULE_NAMES)}")
    variants = SCHEDULES.get(name, (PipelineSchedule(one_f_one_b.one_f_one_b, one_f_one_b.in_flight),))
    if not any(chunks in variant.chunk_counts for variant in variants):
        counts = _format_chunk_counts(variants)
        raise PlanError(f"schedule={name} does not support chunks_per_stage={chunks}; give {counts}")


def find_schedule(name: str, chunks: int) -> PipelineSchedule:
    """Return the schedule with a flush of that name for a number of chunks per stage, which must exist."""
    return next(variant for variant in SCHEDULES[name] if chunks in variant.chunk_counts)


def _format_chunk_counts(variants: tuple[PipelineSchedule, ...]) -> str:
    counts = [variant.chunk_counts for variant in variants]
    return " or ".join(
        f"chunks_per_stage={count.start}" + (" or more" if count.stop == _MAX_CHUNKS else "") for count in counts
    )
