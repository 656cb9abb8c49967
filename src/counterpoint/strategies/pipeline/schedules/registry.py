"""The orders by name."""

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
"""Under each name the orders for different numbers of chunks."""

SCHEDULE_NAMES = tuple(sorted((*SCHEDULES, *ASYNC_SCHEDULES)))
"""All that a pipeline may be told as its order, streams among them."""


def require_schedule(name: str, chunks: int) -> None:
    """Check that there is an order of that name for so many chunks per stage; a stage of a stream runs one.

    Raises:
        PlanError: there is none.
    """
    if name not in SCHEDULE_NAMES:
        raise PlanError(f"there is no pipeline schedule {name!r}; the schedules are {', '.join(SCHEDULE_NAMES)}")
    if not any(chunks in order.chunk_counts for order in SCHEDULES.get(name, ())) and (
        name in SCHEDULES or chunks != 1
    ):
        wanted = _format_chunk_counts(SCHEDULES[name]) if name in SCHEDULES else "chunks_per_stage=1"
        raise PlanError(f"schedule={name} is not made for chunks_per_stage={chunks} chunks per stage; give {wanted}")


def find_schedule(name: str, chunks: int) -> PipelineSchedule:
    """Return the order of that name for so many chunks per stage; there must be one, and it must flush."""
    return next(order for order in SCHEDULES[name] if chunks in order.chunk_counts)


def _format_chunk_counts(schedules: tuple[PipelineSchedule, ...]) -> str:
    """Write which numbers of chunks there are orders for."""
    parts = [
        f"chunks_per_stage={order.chunk_counts.start}" + (" or more" if order.chunk_counts.stop == _MAX_CHUNKS else "")
        for order in schedules
    ]
    return " or ".join(parts)
