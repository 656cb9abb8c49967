"""A run as one HTML file: nothing else is needed to read it, now or in ten years."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from counterpoint.drawing.chart import Points, Series, draw_chart, smoothed
from counterpoint.drawing.figures import Figure as Figure, draw_figures
from counterpoint.drawing.grid import draw_rows
from counterpoint.drawing.kinds import kind_of_word
from counterpoint.drawing.markup import escape, tag
from counterpoint.drawing.page import scrolling, timeline, write_page, write_table
from counterpoint.drawing.scale import format_number
from counterpoint.drawing.svg import draw_beside, draw_timeline
from counterpoint.drawing.weighing import Weighing, draw_weighing
from counterpoint.program.program import Program
from counterpoint.program.text import format_program
from counterpoint.program.trace import Trace

MOST_EVALUATIONS = 20
MOST_PROGRAM_LETTERS = 200_000


@dataclass(frozen=True, slots=True)
class Heading:
    """What a report is about.

    Args:
        title: of the run.
        plan: the plan as it is written.
        ended_early: why the run ended before its last step; empty when it is finished.
        note: a sentence below; may be empty.
    """

    title: str
    plan: str
    ended_early: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What was measured on held-out data after so many steps: ``(name, value)`` per metric."""

    step: int
    metrics: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Curves:
    """What changed from step to step.

    Args:
        loss: ``(step, loss)``.
        throughput: ``(step, samples per second)``.
        held_out: every evaluation.
    """

    loss: Points = ()
    throughput: Points = ()
    held_out: tuple[HeldOut, ...] = ()


@dataclass(frozen=True, slots=True)
class Timelines:
    """One step on the simulator's clock and on the real one; ``note`` is a sentence about them."""

    simulated: Trace | None = None
    measured: Trace | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class ReportData:
    """Everything that a report shows.

    Args:
        heading: title, plan, and how the run ended.
        figures: the numbers to see first.
        curves: loss, throughput and evaluations.
        program: what every rank did.
        timelines: one step.
        configuration: the text from which the run can be repeated.
        weighing: how the plan was chosen, where it was.
    """

    heading: Heading
    figures: tuple[Figure, ...]
    curves: Curves
    program: Program
    timelines: Timelines
    configuration: str
    weighing: Weighing | None = None


def write_report(data: ReportData) -> str:
    """Return a self-contained HTML page: it loads nothing, runs nothing, and shows text from outside as text."""
    return write_page(
        data.heading.title,
        _heading(data.heading),
        draw_figures(data.figures),
        _training(data.curves),
        _held_out(data.curves.held_out),
        _program(data.program, data.timelines.simulated),
        _step(data.timelines),
        *(draw_weighing(data.weighing) if data.weighing is not None else ()),
        _configuration(data.configuration),
    )


def _heading(heading: Heading) -> str:
    status = (
        tag("p", escape(f"ended early: {heading.ended_early}"), class_="status bad")
        if heading.ended_early
        else tag("p", "finished", class_="status good")
    )
    plan = tag("p", tag("code", escape(heading.plan)))
    note = tag("p", escape(heading.note), class_="quiet") if heading.note else ""
    return tag("header", tag("h1", escape(heading.title)), plan, status, note)


def _training(curves: Curves) -> str:
    charts = []
    if curves.loss:
        held_out = tuple((one.step, value) for one in curves.held_out for name, value in one.metrics if name == "loss")
        lines = _with_mean("loss", curves.loss)
        if held_out:
            lines.append(Series("held out", held_out, "dots"))
        charts.append(draw_chart(lines, title="loss by step", x_label="step", y_label="loss"))
    if curves.throughput:
        charts.append(
            draw_chart(
                _with_mean("samples/s", curves.throughput),
                title="throughput by step",
                x_label="step",
                y_label="samples/s",
                y_low=0.0,
            )
        )
    if not charts:
        return ""
    figures = tag("div", *(tag("figure", chart) for chart in charts), class_="charts")
    return tag("section", tag("h2", "Training"), figures)


def _with_mean(name: str, points: Points) -> list[Series]:
    """Return a line, and for many points a faint one with the mean of neighbours over it."""
    window = len(points) // 40
    if window < 2:
        return [Series(name, points)]
    return [Series("each step", points, "faint"), Series(f"mean of {window}", smoothed(points, window))]


def _held_out(evaluations: Sequence[HeldOut]) -> str:
    if not evaluations:
        return ""
    names = list(dict.fromkeys(name for one in evaluations for name, _ in one.metrics))
    shown = evaluations[-MOST_EVALUATIONS:]
    rows = [(format_number(one.step), *(_metric(dict(one.metrics).get(name)) for name in names)) for one in shown]
    earlier = len(evaluations) - len(shown)
    note = tag("p", f"{earlier} earlier evaluations are not shown.", class_="quiet") if earlier else ""
    return tag("section", tag("h2", "Held-out data"), write_table(["step", *names], rows, "held-out metrics"), note)


def _metric(value: float | None) -> str:
    return " " if value is None else format_number(value)


def _program(program: Program, simulated: Trace | None) -> str:
    parts = [tag("h2", "Program"), _rows(draw_rows(program, width=132), "rows of the program")]
    whole = format_program(program)
    if len(whole) <= MOST_PROGRAM_LETTERS:
        summary = tag("summary", f"all words of {program.num_ranks} rows")
        parts.append(tag("details", summary, _rows(whole, "all rows of the program")))
    if simulated is not None:
        parts += [tag("h3", "Its step on the simulator's clock"), timeline(draw_timeline(simulated))]
    return tag("section", *parts)


def _rows(text: str, name: str) -> str:
    return scrolling("pre", "\n".join(map(_coloured, text.splitlines())) or " ", name)


def _coloured(line: str) -> str:
    """Write a line of words, each in the colour of its kind."""
    return " ".join(_word(word) for word in line.split(" "))


def _word(word: str) -> str:
    if not word[:1].isalpha() or not any(letter.isdigit() for letter in word):
        return escape(word)
    return tag("span", escape(word), class_=kind_of_word(word))


def _step(timelines: Timelines) -> str:
    simulated, measured = timelines.simulated, timelines.measured
    if measured is None:
        return ""
    drawing = draw_timeline(measured) if simulated is None else draw_beside(simulated, measured)
    title = "One step, measured" if simulated is None else "One step, simulated and measured"
    note = tag("p", escape(timelines.note), class_="quiet") if timelines.note else ""
    return tag("section", tag("h2", title), note, timeline(drawing))


def _configuration(text: str) -> str:
    if not text:
        return ""
    return tag("section", tag("h2", "Configuration"), scrolling("pre", escape(text), "configuration"))
