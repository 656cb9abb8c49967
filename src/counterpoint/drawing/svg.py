"""Traces as inline SVG: one row per rank, time from left to right."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from counterpoint.drawing.kinds import COLOURS, Kind, kind_of, shade_of
from counterpoint.drawing.markup import escape, label, picture, tag
from counterpoint.drawing.naming import Naming, letter_of
from counterpoint.drawing.scale import format_number, format_seconds, format_tick, round_step, ticks, time_unit
from counterpoint.program.trace import Event, Trace

WIDTH, LEFT, RIGHT = 960.0, 62.0, 46.0
ROW, LINK, GAP = 20.0, 5.0, 6.0
LEGEND, HEADING, RULER = 28.0, 26.0, 26.0
THIN, LETTER = 0.75, 6.6
"""Widths, in units of the picture: below the first, events are drawn as one; a letter takes the second."""

COMPUTING: frozenset[Kind] = frozenset({"forward", "recomputation", "backward", "weight part", "update"})
"""Kinds that are drawn as high as their row; all others are thin."""


@dataclass(frozen=True, slots=True)
class _Scale:
    """Where a time stands, ``span_s`` fills the picture; and what events are called."""

    span_s: float
    names: Naming

    def x(self, seconds: float) -> float:
        """Return how far from the left edge of the picture a time stands."""
        return LEFT + (WIDTH - LEFT - RIGHT) * (seconds / self.span_s if self.span_s else 0.0)


@dataclass(frozen=True, slots=True)
class _Panel:
    """One trace, drawn from the height ``top`` to ``bottom``."""

    content: str
    bottom: float


def draw_timeline(trace: Trace, *, most_ranks: int = 32) -> str:
    """Return a trace as a picture: what each rank computes and waits for, and below it what its link carries.

    Args:
        trace: what to draw.
        most_ranks: rows; further ranks are counted below.
    """
    panel = _panel(trace, _Scale(trace.span_s, Naming.of(trace)), LEGEND, most_ranks, _summary(trace))
    return picture(
        WIDTH, panel.bottom, f"{trace.source} timeline of one step", _describe(trace), _legend([trace]), panel.content
    )


def draw_beside(simulated: Trace, measured: Trace, *, most_ranks: int = 16) -> str:
    """Return both traces on one time scale, the simulated one above.

    Where one takes more than twenty times as long as the other, each has its own scale, and the picture says so.
    """
    return _stacked([("", simulated), ("", measured)], "one step, simulated and measured", most_ranks)


def draw_plans(traces: Sequence[tuple[str, Trace]], *, most_ranks: int = 8) -> str:
    """Return one step under each of several plans on one time scale, the first one above.

    Where one takes more than twenty times as long as another, each has its own scale, and the picture says so.

    Args:
        traces: what the plans are called, and their steps.
        most_ranks: rows of each; further ranks are counted below.
    """
    named = [(f"{name}: ", trace) for name, trace in traces]
    return _stacked(named, f"one step under {len(traces)} plans", most_ranks)


def _stacked(traces: Sequence[tuple[str, Trace]], title: str, most_ranks: int) -> str:
    spans = [trace.span_s for _, trace in traces]
    alike = max(spans) <= 20 * min(spans)
    content, bottom = [], LEGEND
    for name, trace in traces:
        scale = _Scale(max(spans) if alike else trace.span_s, Naming.of(trace))
        heading = f"{name}{_summary(trace)}{'' if alike else ', on a scale of its own'}"
        panel = _panel(trace, scale, bottom, most_ranks, heading)
        content.append(panel.content)
        bottom = panel.bottom + GAP
    said = " ".join(f"{name}{_describe(trace)}" for name, trace in traces)
    return picture(WIDTH, bottom, title, said, _legend([trace for _, trace in traces]), *content)


def _describe(trace: Trace) -> str:
    """Write what the picture shows, for those who do not see it."""
    busy = _busy(trace)
    shares = ", ".join(f"rank {rank} {busy[rank]:.0%}" for rank in range(min(trace.num_ranks, 32)))
    return f"{_summary(trace)}. Part of the step in which a rank computes: {shares}."


def _busy(trace: Trace) -> defaultdict[int, float]:
    """Return the part of the step in which each rank computes."""
    busy: defaultdict[int, float] = defaultdict(float)
    step_s = trace.step_s or 1.0
    for event in trace.events:
        if event.lane == "compute":
            busy[event.rank] += event.seconds / step_s
    return busy


def _summary(trace: Trace) -> str:
    ranks = "1 rank" if trace.num_ranks == 1 else f"{trace.num_ranks} ranks"
    return f"{trace.source}, {ranks}: {format_seconds(trace.step_s)} a step, {trace.bubble:.1%} of it idle"


def _legend(traces: Sequence[Trace]) -> str:
    shown = {kind_of(event) for trace in traces for event in trace.events if event.seconds > 0}
    parts, x = [], LEFT
    for kind, colour in COLOURS.items():
        if kind in shown:
            height = _height(kind)
            parts.append(tag("rect", x=x, y=11 - height / 2, width=14, height=height, rx=2, fill=colour))
            parts.append(label(kind, x=x + 19, y=15))
            x += 34 + LETTER * len(kind)
    parts += _shades(shown, Naming.of(*traces).num_chunks, x)
    return tag("g", *parts) if parts else ""


def _shades(shown: set[Kind], num_chunks: int, x: float) -> Iterator[str]:
    """Draw what tells chunks of one rank apart, where one has several."""
    if num_chunks < 2 or "forward" not in shown:
        return
    for chunk in range(num_chunks):
        fill = shade_of("forward", chunk, num_chunks)
        yield tag("rect", x=x + 14 * chunk, y=5, width=13, height=12, rx=2, fill=fill)
    letters = f"{letter_of(0)} .. {letter_of(num_chunks - 1)}" if num_chunks > 2 else "a, b"
    yield label(f"chunks {letters} of a rank", x=x + 14 * num_chunks + 5, y=15)


def _height(kind: Kind) -> float:
    return 12.0 if kind in COMPUTING else LINK


def _panel(trace: Trace, scale: _Scale, top: float, most_ranks: int, title: str) -> _Panel:
    ranks: defaultdict[int, list[Event]] = defaultdict(list)
    for event in trace.events:
        ranks[event.rank].append(event)
    shown = min(trace.num_ranks, max(1, most_ranks))
    has_links = any(event.lane == "link" and event.seconds > 0 for event in trace.events)
    pitch = ROW + GAP + (LINK + 2 if has_links else 0)
    first = top + HEADING
    last = first + shown * pitch
    busy = _busy(trace)
    rows = [_row(rank, ranks[rank], scale, first + rank * pitch, busy[rank]) for rank in range(shown)]
    heading = label(title, x=LEFT, y=top + 16, font_weight=600)
    more = label(f"and {trace.num_ranks - shown} more ranks", x=LEFT, y=last + 12) if shown < trace.num_ranks else ""
    end = last + (16 if more else 0)
    return _Panel(heading + _ruler(scale, first, end) + "".join(rows) + more, end + RULER)


def _ruler(scale: _Scale, top: float, bottom: float) -> str:
    """Draw upright lines at round times, and the times below them."""
    times, unit = time_unit(scale.span_s)
    step = round_step(scale.span_s * times, 8) if scale.span_s else 1.0
    marks = ticks(0, scale.span_s * times, 8) or (0.0,)
    lines = [tag("line", x1=scale.x(at / times), x2=scale.x(at / times), y1=top - 4, y2=bottom + 2) for at in marks]
    texts = [
        label(format_tick(at, step) + (f" {unit}" if at == marks[-1] else ""), x=scale.x(at / times), y=bottom + 15)
        for at in marks
    ]
    return tag("g", *lines, stroke="currentColor", stroke_opacity=0.2) + tag(
        "g", *texts, text_anchor="middle", font_size=11
    )


def _row(rank: int, events: Sequence[Event], scale: _Scale, top: float, busy: float) -> str:
    """Draw one rank: waiting and computing on one line, since a rank does one at a time, and its link below."""
    own = [event for event in events if event.lane != "link"]
    link = [event for event in events if event.lane == "link"]
    bars = [_Bar.of(group, scale) for group in _groups(own, scale)]
    transfers = [_Bar.of(group, scale) for group in _groups(link, scale)]
    boxes: defaultdict[str, list[str]] = defaultdict(list)
    for bar in bars:
        height = ROW if bar.kind in COMPUTING else LINK
        boxes[bar.fill].append(bar.box(top + (ROW - height) / 2, height))
    names = [bar.name(top + ROW / 2 + 4) for bar in bars if bar.text]
    return tag(
        "g",
        label(f"rank {rank}", x=LEFT - 8, y=top + ROW / 2 + 4, text_anchor="end"),
        label(f"{busy:.0%}", x=WIDTH - RIGHT + 8, y=top + ROW / 2 + 4),
        *(tag("g", *boxes[fill], fill=fill) for fill in sorted(boxes, key=_from_behind)),
        *([tag("g", *(bar.box(top + ROW + 1, LINK) for bar in transfers), fill=COLOURS["communication"])]
          if transfers else []),
        *([tag("g", *names, fill="#ffffff", font_size=11, text_anchor="middle", pointer_events="none")]
          if names else []),
    )  # fmt: skip


def _from_behind(fill: str) -> tuple[int, str]:
    """Return where a colour stands among those that are drawn: the kinds of legends last, shades before all."""
    colours = list(COLOURS.values())
    return -colours.index(fill) if fill in colours else -len(colours), fill


@dataclass(frozen=True, slots=True)
class _Bar:
    """A box for one event, or for several that are too thin to be told apart."""

    kind: Kind
    fill: str
    x: float
    width: float
    text: str
    tip: str

    @staticmethod
    def of(group: Sequence[Event], scale: _Scale) -> _Bar:
        """Return the box for events that follow upon each other; its kind is the one that takes the most time."""
        spent: defaultdict[Kind, float] = defaultdict(float)
        for event in group:
            spent[kind_of(event)] += event.seconds
        kind = max(spent, key=lambda kind: spent[kind])
        start, stop = group[0].start_s, max(event.stop_s for event in group)
        width = scale.x(stop) - scale.x(start)
        words = group[0].words if len(group) == 1 else f"{len(group)} events, {group[0].words} to {group[-1].words}"
        tip = f"{_cut(words)}: {format_number((stop - start) * 1e3)} ms"
        chunk = scale.names.chunk(group[0]) if len(group) == 1 else None
        fill = shade_of(kind, chunk or 0, scale.names.num_chunks)
        return _Bar(kind, fill, scale.x(start), width, _fitting(kind, group, width, scale.names), tip)

    def box(self, y: float, height: float) -> str:
        """Return the box, and what it says to whoever points at it; ``y`` is its upper edge."""
        slit = 0.6 if self.width > 3 else 0.0
        shape = {"rx": 2.0} if self.width > 6 else {}
        width = max(self.width - slit, 0.4)
        return tag("rect", tag("title", escape(self.tip)), x=self.x, y=y, width=width, height=height, **shape)

    def name(self, y: float) -> str:
        """Return what is written in the box, around the height ``y``."""
        return label(self.text, x=self.x + self.width / 2, y=y)


def _fitting(kind: Kind, group: Sequence[Event], width: float, names: Naming) -> str:
    """Return the longest name that fits into a box."""
    if len(group) > 1 or kind not in COMPUTING:
        return ""
    event = group[0]
    wanted = (event.words, names.full(event), names.short(event))
    return next((name for name in wanted if len(name) * LETTER <= width - 4), "")


def _cut(words: str) -> str:
    return words if len(words) <= 100 else f"{words[:70]} .. {words[-24:]}"


def _groups(events: Sequence[Event], scale: _Scale) -> Iterator[tuple[Event, ...]]:
    """Yield events that take time one by one, and neighbours together that are too thin to be told apart."""
    group: list[Event] = []
    for event in events:
        if event.seconds <= 0:
            continue
        if group and scale.x(event.stop_s) - scale.x(group[0].start_s) > THIN:
            yield tuple(group)
            group = []
        group.append(event)
    if group:
        yield tuple(group)
