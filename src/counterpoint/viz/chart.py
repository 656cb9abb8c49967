"""Draw line charts as inline SVG: loss and throughput over the steps of a run."""

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
        name: its label in the legend.
        points: ``(x, y)`` in ascending x; values that are not finite interrupt the line.
        style: a line, a faint line that a smoothed one is drawn over, or a line with a dot at every point.
    """

    name: str
    points: Points
    style: Literal["line", "faint", "dots"] = "line"

    @property
    def finite(self) -> Points:
        """The points with finite coordinates."""
        return tuple(point for point in self.points if all(map(math.isfinite, point)))


@dataclass(frozen=True, slots=True)
class _PlotArea:
    """The data range that the picture shows, and the distance of ticks on the vertical axis."""

    y_step: float
    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def to_pixels(self, point: tuple[float, float]) -> tuple[float, float]:
        """Return the position of a data point, from the left and the upper edge of the picture."""
        across = (point[0] - self.x_low) / (self.x_high - self.x_low)
        up = (point[1] - self.y_low) / (self.y_high - self.y_low)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)


def draw_chart(
    series: Sequence[ChartSeries], *, title: str, x_label: str, y_label: str, y_low: float | None = None
) -> str:
    """Return a line chart with axes and a legend that gives the last value of every line.

    Args:
        series: the lines; those without a finite point are skipped.
        title: of the chart.
        x_label: of the horizontal axis.
        y_label: of the vertical axis.
        y_low: upper limit of the vertical axis's lower end; None to fit the lines.
    """
    visible = [line for line in series if line.finite]
    description = "; ".join(_describe_series(line) for line in visible) or "no values"
    if not visible:
        return svg_picture(WIDTH, 60, title, description, label("no values", x=LEFT, y=34))
    frame = _plot_area([point for line in visible for point in line.finite], y_low)
    colours = list(_assign_colours(visible))
    lines = [_draw_line(line, frame, colour) for line, colour in zip(visible, colours, strict=True)]
    return svg_picture(
        WIDTH,
        HEIGHT,
        title,
        f"{description}.",
        _draw_axes(frame, x_label, y_label),
        *lines,
        _draw_legend(visible, colours),
    )


def moving_average(points: Points, window: int) -> Points:
    """Return the mean of every ``window`` neighbours, at the x of the middle one."""
    window_ends = range(window, len(points) + 1)
    return tuple(
        (points[end - 1 - window // 2][0], sum(y for _, y in points[end - window : end]) / window)
        for end in window_ends
    )


def _describe_series(series: ChartSeries) -> str:
    (first_x, first_y), (last_x, last_y) = series.finite[0], series.finite[-1]
    num_missing = len(series.points) - len(series.finite)
    suffix = f", {num_missing} values are not finite" if num_missing else ""
    return (
        f"{series.name}: {format_number(first_y)} at {format_number(first_x)}, "
        f"{format_number(last_y)} at {format_number(last_x)}{suffix}"
    )


def _plot_area(points: Sequence[tuple[float, float]], y_low: float | None) -> _PlotArea:
    x_low, x_high = _value_range([x for x, _ in points])
    low, high = _value_range([y for _, y in points] + ([] if y_low is None else [y_low]))
    step = round_step(high - low, 5)
    return _PlotArea(step, x_low, x_high, math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step)


def _value_range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    tolerance = max(abs(high) * 1e-9, 1e-12)
    return (low, high) if high - low > tolerance else (low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2)


def _draw_axes(frame: _PlotArea, x_label: str, y_label: str) -> str:
    x_step = round_step(frame.x_high - frame.x_low, 6)
    lines, texts = [], []
    for tick in range(round((frame.y_high - frame.y_low) / frame.y_step) + 1):
        y = frame.y_low + tick * frame.y_step
        _, position = frame.to_pixels((frame.x_low, y))
        lines.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=position, y2=position))
        texts.append(label(format_tick(y, frame.y_step), x=LEFT - 8, y=position + 4, text_anchor="end"))
    for x in ticks(frame.x_low, frame.x_high, 6):
        position, _ = frame.to_pixels((x, frame.y_low))
        texts.append(label(format_tick(x, x_step), x=position, y=HEIGHT - BOTTOM + 18, text_anchor="middle"))
    labels = label(y_label, x=8, y=16, font_weight=600) + label(
        x_label, x=WIDTH - RIGHT, y=HEIGHT - 8, text_anchor="end", font_weight=600
    )
    return tag("g", *lines, stroke="currentColor", stroke_opacity=0.2) + tag("g", *texts) + labels


def _assign_colours(visible: Sequence[ChartSeries]) -> Iterator[str]:
    """Yield a colour per line; a faint line has the colour of the next one, which smooths it."""
    index = 0
    for series in visible:
        yield LINE_COLOURS[index % len(LINE_COLOURS)]
        index += series.style != "faint"


def _draw_legend(visible: Sequence[ChartSeries], colours: Sequence[str]) -> str:
    parts, right = [], WIDTH - RIGHT
    for series, colour in reversed(list(zip(visible, colours, strict=True))):
        text = f"{series.name} {format_number(series.finite[-1][1])}"
        parts.append(label(text, x=right, y=16, text_anchor="end"))
        right -= 6.8 * len(text) + 6
        opacity = 0.45 if series.style == "faint" else 1.0
        parts.append(tag("rect", x=right - 14, y=10, width=14, height=4, rx=2, fill=colour, fill_opacity=opacity))
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
        coordinates = " ".join(
            f"{format_coordinate(x)},{format_coordinate(y)}" for x, y in map(frame.to_pixels, _downsample(run))
        )
        parts.append(tag("polyline", points=coordinates, fill="none", stroke_linejoin="round"))
    for dot in dict.fromkeys(_downsample(dots)):
        x, y = frame.to_pixels(dot)
        tooltip = f"{series.name} {format_number(dot[1])} at {format_number(dot[0])}"
        parts.append(tag("circle", tag("title", escape(tooltip)), cx=x, cy=y, r=3, fill=colour, stroke="none"))
    return tag("g", *parts, stroke=colour, stroke_width=width, stroke_opacity=opacity)


def _finite_runs(points: Points) -> Iterator[Points]:
    """Yield the stretches of a line between values that are not finite."""
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
    """Return at most ``MAX_POINTS`` points, the minimum and maximum of equal parts, so that peaks remain."""
    if len(points) <= MAX_POINTS:
        return points
    num_parts = MAX_POINTS // 2
    sampled: list[tuple[float, float]] = []
    for index in range(num_parts):
        part = points[index * len(points) // num_parts : (index + 1) * len(points) // num_parts]
        extremes = {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
        sampled += sorted(extremes)
    return tuple(sampled)
