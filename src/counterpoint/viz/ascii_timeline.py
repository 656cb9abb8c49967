"""Draw traces and programs as plain text, for terminals and doctests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from counterpoint.program.program import Program
from counterpoint.program.text import format_rank_program
from counterpoint.program.trace import Trace, TraceEvent
from counterpoint.viz.event_style import EventLabels
from counterpoint.viz.number_format import format_tick, round_step, ticks, time_unit


def draw_ascii_timeline(trace: Trace, *, tick_s: float | None, width: int = 100, max_ranks: int = 32) -> str:
    """Return what every rank computes, one line per rank, time from left to right.

    A label such as ``F0`` is the forward of microbatch 0, ``=`` continues it, and ``.`` is idle. ``F0a`` and ``F0b``
    belong to the first and the second chunk of the rank; ``F0:-1`` reads weights one version older than the newest. A
    cell shows what took most of its time.

    Args:
        trace: what to draw.
        tick_s: seconds per column; None for one character per equal part of the step.
        width: characters of a line; further ticks are counted below.
        max_ranks: lines for ranks; further ranks are counted below.

    Raises:
        ValueError: a tick that is not positive.

    Example:
        >>> print(draw_ascii_timeline(Trace((TraceEvent(0, 0, "F0.0", 0, 1, "compute"),), 1, "simulated"), tick_s=1))
        tick   0
        rank 0 F0
    """
    if tick_s is not None and not tick_s > 0:
        raise ValueError(f"tick_s is {tick_s}; a column needs a positive duration; give seconds above 0, or None")
    ranks = range(min(trace.num_ranks, max(1, max_ranks)))
    headers = [f"rank {rank} " for rank in ranks]
    indent = max((len(header) for header in headers), default=0)
    computes = {rank: list(events) for rank, events in groupby(_computing_events(trace), lambda event: event.rank)}
    events_of_ranks = [computes.get(rank, []) for rank in ranks]
    num_columns = max(1, width - indent)
    label = EventLabels.from_traces(trace).full_label
    timeline = (
        _draw_by_tick(trace, events_of_ranks, (tick_s, num_columns), label)
        if tick_s
        else _draw_by_fraction(trace, events_of_ranks, num_columns, label)
    )
    ruler, lines, notes = timeline
    if len(ranks) < trace.num_ranks:
        notes = [*notes, f"and {trace.num_ranks - len(ranks)} more ranks"]
    text = [ruler[0].ljust(indent) + ruler[1], *(a.ljust(indent) + b for a, b in zip(headers, lines, strict=True))]
    return "\n".join(line.rstrip() for line in [*text, *notes])


def _computing_events(trace: Trace) -> Iterator[TraceEvent]:
    return (event for event in trace.events if event.lane == "compute" and event.seconds > 0)


_LabelFn = Callable[[TraceEvent], str]
_Timeline = tuple[tuple[str, str], list[str], list[str]]
"""The label and the text of the ruler, one line per rank, notes."""


def _draw_by_tick(
    trace: Trace, rows: Sequence[Sequence[TraceEvent]], columns: tuple[float, int], name: _LabelFn
) -> _Timeline:
    tick_s, num_columns = columns
    num_ticks = math.ceil(trace.span_s / tick_s - 1e-6)
    longest = max((len(name(event)) for row in rows for event in row), default=1)
    cell = longest + 1
    num_shown = min(num_ticks, max(1, (num_columns + 1) // cell))
    label_distance = math.ceil((len(str(max(0, num_shown - 1))) + 1) / cell)
    ruler = ""
    for tick in range(0, num_shown, label_distance):
        ruler = f"{ruler.ljust(tick * cell)}{tick}"
    cells = [_cell_texts(_dominant_events(row, tick_s, num_shown), longest, name) for row in rows]
    lines = [" ".join(text.ljust(longest) for text in row) for row in cells]
    num_hidden = num_ticks - num_shown
    return ("tick", ruler), lines, [f"and {num_hidden} more ticks of {num_ticks}"] if num_hidden else []


def _cell_texts(fillers: Sequence[TraceEvent | None], longest: int, name: _LabelFn) -> Iterator[str]:
    for event, run in groupby(fillers, lambda event: event):
        for index, _ in enumerate(run):
            yield "." if event is None else "=" * longest if index else name(event)


def _draw_by_fraction(
    trace: Trace, rows: Sequence[Sequence[TraceEvent]], num_columns: int, name: _LabelFn
) -> _Timeline:
    span_s = trace.span_s
    if span_s == 0:
        return ("time", "0"), ["" for _ in rows], []
    lines = []
    for row in rows:
        runs = groupby(_dominant_events(row, span_s / num_columns, num_columns), lambda event: event)
        lines.append("".join(_bar(event, sum(1 for _ in run), name) for event, run in runs))
    times, unit = time_unit(span_s)
    max_ticks = max(1, min(8, num_columns // 10))
    step = round_step(span_s * times, max_ticks)
    ruler = ""
    for tick in ticks(0, span_s * times, max_ticks):
        column = min(num_columns - 1, round(tick / (span_s * times) * num_columns))
        ruler = f"{ruler.ljust(column)}{format_tick(tick, step)}"
    return (unit, ruler[:num_columns]), lines, []


def _bar(event: TraceEvent | None, length: int, name: _LabelFn) -> str:
    return "." * length if event is None else name(event)[:length].ljust(length, "=")


def _dominant_events(events: Sequence[TraceEvent], column_s: float, num_columns: int) -> list[TraceEvent | None]:
    """Return what takes most of each column: one of the events, or None for idle time."""
    best: list[TraceEvent | None] = [None] * num_columns
    longest = [0.0] * num_columns
    idle = [1.0] * num_columns
    for event in events:
        start, stop = event.start_s / column_s, event.stop_s / column_s
        for column in range(max(0, math.floor(start)), min(num_columns, math.ceil(stop))):
            covered = min(stop, column + 1) - max(start, column)
            idle[column] -= covered
            if covered > longest[column]:
                best[column], longest[column] = event, covered
    return [event if idle[column] <= 0.5 else None for column, event in enumerate(best)]


def abbreviate_program(program: Program, *, max_ranks: int = 16, width: int = 100) -> str:
    """Return the program's text with the rank before each line, abbreviating long lines and many ranks.

    Args:
        program: what to format.
        max_ranks: lines for ranks: the first ones and the last one.
        width: characters of a line; instructions in the middle of a longer one are counted instead.
    """
    last = program.num_ranks - 1
    first = range(program.num_ranks if last < max_ranks else max(1, max_ranks - 1))
    indent = len(f"rank {last} ")
    lines = [_rank_line(program, rank, indent, width) for rank in first]
    if len(first) <= last:
        hidden = last - len(first)
        lines += [f"{hidden} more ranks"] if hidden else []
        lines.append(_rank_line(program, last, indent, width))
    return "\n".join(lines)


def _rank_line(program: Program, rank: int, indent: int, width: int) -> str:
    text = format_rank_program(program.rank_programs[rank], all_parts=program.is_async_pipeline)
    return (f"rank {rank} ".ljust(indent) + _abbreviate(text, max(1, width - indent))).rstrip()


def _abbreviate(text: str, width: int) -> str:
    """Return text of at most ``width`` characters: its first and last instructions, and the number between them."""
    if len(text) <= width:
        return text
    parts = text.split()
    front, back = parts[:1], parts[-1:] if len(parts) > 1 else []
    rest = parts[1:-1]
    width -= len(" ".join([*front, f"..{len(rest)}..", *back]))
    while rest:
        kept, index = (back, -1) if len(front) >= 2 * len(back) else (front, 0)
        width -= len(rest[index]) + 1
        if width < 0:
            break
        kept.insert(0 if index else len(kept), rest.pop(index))
    return " ".join([*front, *([f"..{len(rest)}.."] if rest else []), *back])
