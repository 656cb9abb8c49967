"""Draw traces as inline SVG: one row per rank, time from left to right."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from counterpoint.program.trace import Trace, TraceEvent
from counterpoint.viz.event_style import KIND_COLOURS, EventKind, EventLabels, chunk_shade, chunk_suffix, event_kind
from counterpoint.viz.markup import escape, label, svg_picture, tag
from counterpoint.viz.number_format import format_number, format_seconds, format_tick, round_step, ticks, time_unit

WIDTH, LEFT, RIGHT = 960.0, 62.0, 46.0
ROW_HEIGHT, LINK_HEIGHT, GAP = 20.0, 5.0, 6.0
LEGEND_HEIGHT, HEADING_HEIGHT, RULER_HEIGHT = 28.0, 26.0, 26.0
MIN_EVENT_WIDTH, CHAR_WIDTH = 0.75, 6.6
"""Narrower events are drawn together with their neighbours; width of a character. In user units of the picture."""

COMPUTE_KINDS: frozenset[EventKind] = frozenset({"forward", "recomputation", "backward", "weight part", "update"})
"""Kinds that are drawn at the full height of their row; all others are thin."""


@dataclass(frozen=True, slots=True)
class _TimeAxis:
    """Scale from seconds to the picture, whose width is ``span_s``, and the labels of events."""

    span_s: float
    labels: EventLabels

    def x(self, seconds: float) -> float:
        """Return the distance of a time from the left edge of the picture."""
        return LEFT + (WIDTH - LEFT - RIGHT) * (seconds / self.span_s if self.span_s else 0.0)


@dataclass(frozen=True, slots=True)
class _Panel:
    """The drawing of one trace, down to the height ``bottom``."""

    content: str
    bottom: float


def draw_timeline(trace: Trace, *, max_ranks: int = 32) -> str:
    """Return a trace as a picture: what each rank computes and waits for, and below it what its link carries.

    Args:
        trace: what to draw.
        max_ranks: rows; further ranks are counted below.
    """
    panel = _draw_panel(
        trace, _TimeAxis(trace.span_s, EventLabels.from_traces(trace)), LEGEND_HEIGHT, max_ranks, _summary(trace)
    )
    return svg_picture(
        WIDTH,
        panel.bottom,
        f"{trace.source} timeline of one step",
        _describe(trace),
        _draw_legend([trace]),
        panel.content,
    )


def draw_comparison(simulated: Trace, measured: Trace, *, max_ranks: int = 16) -> str:
    """Return both traces on one time scale, the simulated one above.

    If one takes more than twenty times as long as the other, each has its own scale, and the picture says so.
    """
    return _draw_stacked([("", simulated), ("", measured)], "one step, simulated and measured", max_ranks)


def draw_plans(traces: Sequence[tuple[str, Trace]], *, max_ranks: int = 8) -> str:
    """Return one step under each of several plans on one time scale, the first one at the top.

    If one takes more than twenty times as long as another, each has its own scale, and the picture says so.

    Args:
        traces: names of the plans, and their steps.
        max_ranks: rows of each; further ranks are counted below.
    """
    named = [(f"{name}: ", trace) for name, trace in traces]
    return _draw_stacked(named, f"one step under {len(traces)} plans", max_ranks)


def _draw_stacked(traces: Sequence[tuple[str, Trace]], title: str, max_ranks: int) -> str:
    spans = [trace.span_s for _, trace in traces]
    has_one_scale = max(spans) <= 20 * min(spans)
    content, bottom = [], LEGEND_HEIGHT
    for name, trace in traces:
        scale = _TimeAxis(max(spans) if has_one_scale else trace.span_s, EventLabels.from_traces(trace))
        heading = f"{name}{_summary(trace)}{'' if has_one_scale else ', on a scale of its own'}"
        panel = _draw_panel(trace, scale, bottom, max_ranks, heading)
        content.append(panel.content)
        bottom = panel.bottom + GAP
    description = " ".join(f"{name}{_describe(trace)}" for name, trace in traces)
    return svg_picture(WIDTH, bottom, title, description, _draw_legend([trace for _, trace in traces]), *content)


def _describe(trace: Trace) -> str:
    """Return what the picture shows as text, for screen readers."""
    busy = _busy_fractions(trace)
    shares = ", ".join(f"rank {rank} {busy[rank]:.0%}" for rank in range(min(trace.num_ranks, 32)))
    return f"{_summary(trace)}. Part of the step in which a rank computes: {shares}."


def _busy_fractions(trace: Trace) -> defaultdict[int, float]:
    """Return the fraction of the step in which each rank computes."""
    busy: defaultdict[int, float] = defaultdict(float)
    step_s = trace.step_s or 1.0
    for event in trace.events:
        if event.lane == "compute":
            busy[event.rank] += event.seconds / step_s
    return busy


def _summary(trace: Trace) -> str:
    ranks = "1 rank" if trace.num_ranks == 1 else f"{trace.num_ranks} ranks"
    return f"{trace.source}, {ranks}: {format_seconds(trace.step_s)} a step, {trace.bubble:.1%} of it idle"


def _draw_legend(traces: Sequence[Trace]) -> str:
    kinds = {event_kind(event) for trace in traces for event in trace.events if event.seconds > 0}
    parts, x = [], LEFT
    for kind, colour in KIND_COLOURS.items():
        if kind in kinds:
            height = _height(kind)
            parts.append(tag("rect", x=x, y=11 - height / 2, width=14, height=height, rx=2, fill=colour))
            parts.append(label(kind, x=x + 19, y=15))
            x += 34 + CHAR_WIDTH * len(kind)
    parts += _chunk_legend(kinds, EventLabels.from_traces(*traces).num_chunks, x)
    return tag("g", *parts) if parts else ""


def _chunk_legend(kinds: set[EventKind], num_chunks: int, x: float) -> Iterator[str]:
    """Draw the shades of chunks, if a rank has several."""
    if num_chunks < 2 or "forward" not in kinds:
        return
    for chunk in range(num_chunks):
        fill = chunk_shade("forward", chunk, num_chunks)
        yield tag("rect", x=x + 14 * chunk, y=5, width=13, height=12, rx=2, fill=fill)
    letters = f"{chunk_suffix(0)} .. {chunk_suffix(num_chunks - 1)}" if num_chunks > 2 else "a, b"
    yield label(f"chunks {letters} of a rank", x=x + 14 * num_chunks + 5, y=15)


def _height(kind: EventKind) -> float:
    return 12.0 if kind in COMPUTE_KINDS else LINK_HEIGHT


def _draw_panel(trace: Trace, axis: _TimeAxis, top: float, max_ranks: int, title: str) -> _Panel:
    ranks: defaultdict[int, list[TraceEvent]] = defaultdict(list)
    for event in trace.events:
        if event.stop_s >= 0.0:  # a copy may have run before the step
            ranks[event.rank].append(replace(event, start_s=max(event.start_s, 0.0)))
    num_shown = min(trace.num_ranks, max(1, max_ranks))
    has_links = any(event.lane == "link" and event.seconds > 0 for event in trace.events)
    pitch = ROW_HEIGHT + GAP + (LINK_HEIGHT + 2 if has_links else 0)
    first = top + HEADING_HEIGHT
    last = first + num_shown * pitch
    busy = _busy_fractions(trace)
    rows = [_draw_rank(rank, ranks[rank], axis, first + rank * pitch, busy[rank]) for rank in range(num_shown)]
    heading = label(title, x=LEFT, y=top + 16, font_weight=600)
    note = (
        label(f"and {trace.num_ranks - num_shown} more ranks", x=LEFT, y=last + 12)
        if num_shown < trace.num_ranks
        else ""
    )
    end = last + (16 if note else 0)
    return _Panel(heading + _draw_ruler(axis, first, end) + "".join(rows) + note, end + RULER_HEIGHT)


def _draw_ruler(axis: _TimeAxis, top: float, bottom: float) -> str:
    """Draw vertical lines at round times, and the times below them."""
    times, unit = time_unit(axis.span_s)
    step = round_step(axis.span_s * times, 8) if axis.span_s else 1.0
    marks = ticks(0, axis.span_s * times, 8) or (0.0,)
    lines = [
        tag("line", x1=axis.x(position / times), x2=axis.x(position / times), y1=top - 4, y2=bottom + 2)
        for position in marks
    ]
    texts = [
        label(
            format_tick(position, step) + (f" {unit}" if position == marks[-1] else ""),
            x=axis.x(position / times),
            y=bottom + 15,
        )
        for position in marks
    ]
    return tag("g", *lines, stroke="currentColor", stroke_opacity=0.2) + tag(
        "g", *texts, text_anchor="middle", font_size=11
    )


def _draw_rank(rank: int, events: Sequence[TraceEvent], axis: _TimeAxis, top: float, busy: float) -> str:
    """Draw one rank: waiting and computing on one line, since a rank does one at a time, and its link below."""
    on_processor = [event for event in events if event.lane != "link"]
    link = [event for event in events if event.lane == "link"]
    bars = [_Bar.from_events(group, axis) for group in _group_thin_events(on_processor, axis)]
    transfers = [_Bar.from_events(group, axis) for group in _group_thin_events(link, axis)]
    boxes: defaultdict[str, list[str]] = defaultdict(list)
    for bar in bars:
        height = ROW_HEIGHT if bar.kind in COMPUTE_KINDS else LINK_HEIGHT
        boxes[bar.fill].append(bar.box(top + (ROW_HEIGHT - height) / 2, height))
    link_fill = KIND_COLOURS["communication"]
    names = [bar.label(top + ROW_HEIGHT / 2 + 4) for bar in bars if bar.text]
    return tag(
        "g",
        label(f"rank {rank}", x=LEFT - 8, y=top + ROW_HEIGHT / 2 + 4, text_anchor="end"),
        label(f"{busy:.0%}", x=WIDTH - RIGHT + 8, y=top + ROW_HEIGHT / 2 + 4),
        *(tag("g", *boxes[fill], fill=fill) for fill in sorted(boxes, key=_z_order)),
        *([tag("g", *(bar.box(top + ROW_HEIGHT + 1, LINK_HEIGHT) for bar in transfers), fill=link_fill)]
          if transfers else []),
        *([tag("g", *names, fill="#ffffff", font_size=11, text_anchor="middle", pointer_events="none")]
          if names else []),
    )  # fmt: skip


def _z_order(fill: str) -> tuple[int, str]:
    """Return the drawing order of a colour: shades first, the kinds of the legend last."""
    colours = list(KIND_COLOURS.values())
    return -colours.index(fill) if fill in colours else -len(colours), fill


@dataclass(frozen=True, slots=True)
class _Bar:
    """A box for one event, or for several that are too thin to be drawn separately."""

    kind: EventKind
    fill: str
    x: float
    width: float
    text: str
    tooltip: str

    @staticmethod
    def from_events(group: Sequence[TraceEvent], axis: _TimeAxis) -> _Bar:
        """Return the box of adjacent events; its kind is the one that takes the most time."""
        seconds: defaultdict[EventKind, float] = defaultdict(float)
        for event in group:
            seconds[event_kind(event)] += event.seconds
        kind = max(seconds, key=lambda kind: seconds[kind])
        start, stop = group[0].start_s, max(event.stop_s for event in group)
        width = axis.x(stop) - axis.x(start)
        event_text = group[0].text if len(group) == 1 else f"{len(group)} events, {group[0].text} to {group[-1].text}"
        tip = f"{_truncate(event_text)}: {format_number((stop - start) * 1e3)} ms"
        chunk = axis.labels.chunk(group[0]) if len(group) == 1 else None
        fill = chunk_shade(kind, chunk or 0, axis.labels.num_chunks)
        return _Bar(kind, fill, axis.x(start), width, _fit_label(kind, group, width, axis.labels), tip)

    def box(self, y: float, height: float) -> str:
        """Return the box with its tooltip; ``y`` is its upper edge."""
        slit = 0.6 if self.width > 3 else 0.0
        shape = {"rx": 2.0} if self.width > 6 else {}
        width = max(self.width - slit, 0.4)
        return tag("rect", tag("title", escape(self.tooltip)), x=self.x, y=y, width=width, height=height, **shape)

    def label(self, y: float) -> str:
        """Return the text in the box, centred at the height ``y``."""
        return label(self.text, x=self.x + self.width / 2, y=y)


def _fit_label(kind: EventKind, group: Sequence[TraceEvent], width: float, labels: EventLabels) -> str:
    """Return the longest label that fits into a box."""
    if len(group) > 1 or kind not in COMPUTE_KINDS:
        return ""
    event = group[0]
    candidates = (event.text, labels.full_label(event), labels.short_label(event))
    return next((candidate for candidate in candidates if len(candidate) * CHAR_WIDTH <= width - 4), "")


def _truncate(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:70]} .. {text[-24:]}"


def _group_thin_events(events: Sequence[TraceEvent], axis: _TimeAxis) -> Iterator[tuple[TraceEvent, ...]]:
    """Yield events that take time, adjacent ones together where they are too thin to be drawn separately."""
    group: list[TraceEvent] = []
    for event in events:
        if event.seconds <= 0:
            continue
        if group and axis.x(event.stop_s) - axis.x(group[0].start_s) > MIN_EVENT_WIDTH:
            yield tuple(group)
            group = []
        group.append(event)
    if group:
        yield tuple(group)
