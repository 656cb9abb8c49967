"""Line charts as inline SVG: loss and throughput over the steps of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from counterpoint.viz.markup import escape, format_coordinate, label, svg_picture, tag
from counterpoint.viz.number_format import format_number, format_tick, round_step, ticks

Points: TypeAlias = tuple[tuple[float, float], ...]

LINE_COLOURS = ("#3579c4", "#c2620f", "#2b8a57", "#c03d8b", "#8a5bcf")
WIDTH, HEIGHT = 480.0, 280.0
LEFT, RIGHT, TOP, BOTTOM = 56.0, 14.0, 34.0, 44.0
MAX_POINTS = 400


@dataclass(frozen=True, slots=True)
class ChartSeries:
    """One line of a chart.

    Args:
        name: its word in the legend.
        points: ``(x, y)`` upwards in x; what is not finite interrupts the line.
        look: a line, a faint one for what another one smooths, or a line with a dot at every point.
    """

    name: str
    points: Points
    style: Literal["line", "faint", "dots"] = "line"

    @property
    def finite(self) -> Points:
        """The points that can be drawn."""
        return tuple(point for point in self.points if all(map(math.isfinite, point)))


@dataclass(frozen=True, slots=True)
class _PlotArea:
    """The part of the plane that the picture shows, and how far apart the ticks of its upright axis are."""

    y_step: float
    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def to_pixels(self, point: tuple[float, float]) -> tuple[float, float]:
        """Return where a point stands in the picture, from its left and its upper edge."""
        across = (point[0] - self.x_low) / (self.x_high - self.x_low)
        up = (point[1] - self.y_low) / (self.y_high - self.y_low)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)


def draw_chart(
    series: Sequence[ChartSeries], *, title: str, x_label: str, y_label: str, y_low: float | None = None
) -> str:
    """Return a line chart with its axes and a legend that gives the last value of every line.

    Args:
        series: the lines; those without a point that can be drawn are left out.
        title: what it shows.
        x_label: below.
        y_label: above the upright axis.
        y_low: the upright axis begins at this value or below it; None for where the lines need it.
    """
    drawn = [one for one in series if one.finite]
    said = "; ".join(_describe_series(one) for one in drawn) or "no values"
    if not drawn:
        return svg_picture(WIDTH, 60, title, said, label("no values", x=LEFT, y=34))
    frame = _plot_area([point for one in drawn for point in one.finite], y_low)
    colours = list(_assign_colours(drawn))
    lines = [_draw_line(one, frame, colour) for one, colour in zip(drawn, colours, strict=True)]
    return svg_picture(
        WIDTH, HEIGHT, title, f"{said}.", _draw_axes(frame, x_label, y_label), *lines, _draw_legend(drawn, colours)
    )


def moving_average(points: Points, window: int) -> Points:
    """Return the mean of every ``window`` neighbours, at the place of the middle one."""
    ends = range(window, len(points) + 1)
    return tuple(
        (points[end - 1 - window // 2][0], sum(y for _, y in points[end - window : end]) / window) for end in ends
    )


def _describe_series(series: ChartSeries) -> str:
    (first_x, first_y), (last_x, last_y) = series.finite[0], series.finite[-1]
    lost = len(series.points) - len(series.finite)
    more = f", {lost} values are not finite" if lost else ""
    return (
        f"{series.name}: {format_number(first_y)} at {format_number(first_x)}, "
        f"{format_number(last_y)} at {format_number(last_x)}{more}"
    )


def _plot_area(points: Sequence[tuple[float, float]], y_low: float | None) -> _PlotArea:
    x_low, x_high = _value_range([x for x, _ in points])
    low, high = _value_range([y for _, y in points] + ([] if y_low is None else [y_low]))
    step = round_step(high - low, 5)
    return _PlotArea(step, x_low, x_high, math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step)


def _value_range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = max(abs(high) * 1e-9, 1e-12)
    return (low, high) if high - low > room else (low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2)


def _draw_axes(frame: _PlotArea, x_label: str, y_label: str) -> str:
    x_step = round_step(frame.x_high - frame.x_low, 6)
    lines, texts = [], []
    for number in range(round((frame.y_high - frame.y_low) / frame.y_step) + 1):
        y = frame.y_low + number * frame.y_step
        _, at = frame.to_pixels((frame.x_low, y))
        lines.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=at, y2=at))
        texts.append(label(format_tick(y, frame.y_step), x=LEFT - 8, y=at + 4, text_anchor="end"))
    for x in ticks(frame.x_low, frame.x_high, 6):
        at, _ = frame.to_pixels((x, frame.y_low))
        texts.append(label(format_tick(x, x_step), x=at, y=HEIGHT - BOTTOM + 18, text_anchor="middle"))
    names = label(y_label, x=8, y=16, font_weight=600) + label(
        x_label, x=WIDTH - RIGHT, y=HEIGHT - 8, text_anchor="end", font_weight=600
    )
    return tag("g", *lines, stroke="currentColor", stroke_opacity=0.2) + tag("g", *texts) + names


def _assign_colours(drawn: Sequence[ChartSeries]) -> Iterator[str]:
    """Yield a colour per line; a faint one has that of the next, which smooths it."""
    at = 0
    for one in drawn:
        yield LINE_COLOURS[at % len(LINE_COLOURS)]
        at += one.style != "faint"


def _draw_legend(drawn: Sequence[ChartSeries], colours: Sequence[str]) -> str:
    parts, right = [], WIDTH - RIGHT
    for one, colour in reversed(list(zip(drawn, colours, strict=True))):
        text = f"{one.name} {format_number(one.finite[-1][1])}"
        parts.append(label(text, x=right, y=16, text_anchor="end"))
        right -= 6.8 * len(text) + 6
        faint = 0.45 if one.style == "faint" else 1.0
        parts.append(tag("rect", x=right - 14, y=10, width=14, height=4, rx=2, fill=colour, fill_opacity=faint))
        right -= 24
    return "".join(parts)


def _draw_line(series: ChartSeries, frame: _PlotArea, colour: str) -> str:
    width, opacity = (1.0, 0.45) if series.style == "faint" else (2.0, 1.0)
    parts = [tag("title", escape(series.name))]
    dots = series.finite if series.style == "dots" else ()
    for run in _finite_runs(series.points):
        if len(run) == 1:
            dots = (*dots, *run)
            continue
        places = " ".join(
            f"{format_coordinate(x)},{format_coordinate(y)}" for x, y in map(frame.to_pixels, _downsample(run))
        )
        parts.append(tag("polyline", points=places, fill="none", stroke_linejoin="round"))
    for dot in dict.fromkeys(_downsample(dots)):
        x, y = frame.to_pixels(dot)
        tip = f"{series.name} {format_number(dot[1])} at {format_number(dot[0])}"
        parts.append(tag("circle", tag("title", escape(tip)), cx=x, cy=y, r=3, fill=colour, stroke="none"))
    return tag("g", *parts, stroke=colour, stroke_width=width, stroke_opacity=opacity)


def _finite_runs(points: Points) -> Iterator[Points]:
    """Yield the parts of a line between values that are not finite."""
    run: list[tuple[float, float]] = []
    for point in points:
        if all(map(math.isfinite, point)):
            run.append(point)
        elif run:
            yield tuple(run)
            run = []
    if run:
        yield tuple(run)


def _downsample(points: Points) -> Points:
    """Return at most ``MAX_POINTS`` points, the lowest and the highest of equal parts: peaks stay."""
    if len(points) <= MAX_POINTS:
        return points
    num_parts = MAX_POINTS // 2
    kept: list[tuple[float, float]] = []
    for at in range(num_parts):
        part = points[at * len(points) // num_parts : (at + 1) * len(points) // num_parts]
        extremes = {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
        kept += sorted(extremes)
    return tuple(kept)
