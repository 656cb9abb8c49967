"""Write a run as one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from counterpoint.program.program import Program
from counterpoint.program.text import format_program
from counterpoint.program.trace import Trace
from counterpoint.viz.ascii_timeline import abbreviate_program
from counterpoint.viz.chart import ChartSeries, Points, draw_chart, moving_average
from counterpoint.viz.event_style import instruction_kind
from counterpoint.viz.markup import escape, tag
from counterpoint.viz.number_format import format_number
from counterpoint.viz.page import (
    StatCard as StatCard,
    draw_stat_cards,
    scroll_area,
    timeline_figure,
    write_page,
    write_table,
)
from counterpoint.viz.plan_comparison import PlanComparison, draw_plan_comparison
from counterpoint.viz.svg_timeline import draw_comparison, draw_timeline

MAX_EVALUATIONS = 20
MAX_PROGRAM_CHARS = 200_000


@dataclass(frozen=True, slots=True)
class ReportHeading:
    """Title and status of a report.

    Args:
        title: of the run.
        plan: the plan's text.
        ended_early: why the run ended before its last step; empty if it finished.
        note: a sentence below; may be empty.
    """

    title: str
    plan: str
    ended_early: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class EvaluationPoint:
    """Metrics on held-out data after a number of steps: ``(name, value)`` per metric."""

    step: int
    metrics: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class TrainingCurves:
    """Values per step.

    Args:
        loss: ``(step, loss)``.
        throughput: ``(step, samples per second)``.
        evaluations: metrics on held-out data.
    """

    loss: Points = ()
    throughput: Points = ()
    evaluations: tuple[EvaluationPoint, ...] = ()


@dataclass(frozen=True, slots=True)
class StepTimelines:
    """The simulated and the measured trace of one step, with a sentence about them."""

    simulated: Trace | None = None
    measured: Trace | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class ReportData:
    """Content of a report.

    Args:
        heading: title, plan and status.
        stat_cards: the most important numbers.
        curves: loss, throughput and evaluations.
        program: the rank programs.
        timelines: one step.
        configuration: text of the configuration from which the run can be repeated.
        plan_comparison: how the plan was chosen, if it was.
        built_with: libraries and instruction sets that compute the run.
    """

    heading: ReportHeading
    stat_cards: tuple[StatCard, ...]
    curves: TrainingCurves
    program: Program
    timelines: StepTimelines
    configuration: str
    plan_comparison: PlanComparison | None = None
    built_with: str = ""


def write_report(data: ReportData) -> str:
    """Return a self-contained HTML page; it loads nothing, runs nothing, and escapes all text from outside."""
    return write_page(
        data.heading.title,
        _heading_section(data.heading),
        draw_stat_cards(data.stat_cards),
        _training_section(data.curves),
        _evaluation_section(data.curves.evaluations),
        _program_section(data.program, data.timelines.simulated),
        _step_section(data.timelines),
        *(draw_plan_comparison(data.plan_comparison) if data.plan_comparison is not None else ()),
        _text_section("Configuration", data.configuration),
        _text_section("Built with", data.built_with),
    )


def _heading_section(heading: ReportHeading) -> str:
    status = (
        tag("p", escape(f"ended early: {heading.ended_early}"), class_="status bad")
        if heading.ended_early
        else tag("p", "finished", class_="status good")
    )
    plan = tag("p", tag("code", escape(heading.plan)))
    note = tag("p", escape(heading.note), class_="quiet") if heading.note else ""
    return tag("header", tag("h1", escape(heading.title)), plan, status, note)


def _training_section(curves: TrainingCurves) -> str:
    charts = []
    if curves.loss:
        held_out = tuple(
            (evaluation.step, value)
            for evaluation in curves.evaluations
            for name, value in evaluation.metrics
            if name == "loss"
        )
        lines = _with_mean("loss", curves.loss)
        if held_out:
            lines.append(ChartSeries("held out", held_out, "dots"))
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


def _with_mean(name: str, points: Points) -> list[ChartSeries]:
    """Return a line, or for many points a faint one with its moving average."""
    window = len(points) // 40
    if window < 2:
        return [ChartSeries(name, points)]
    return [ChartSeries("each step", points, "faint"), ChartSeries(f"mean of {window}", moving_average(points, window))]


def _evaluation_section(evaluations: Sequence[EvaluationPoint]) -> str:
    if not evaluations:
        return ""
    names = list(dict.fromkeys(name for evaluation in evaluations for name, _ in evaluation.metrics))
    shown = evaluations[-MAX_EVALUATIONS:]
    rows = [
        (format_number(evaluation.step), *(_format_metric(dict(evaluation.metrics).get(name)) for name in names))
        for evaluation in shown
    ]
    earlier = len(evaluations) - len(shown)
    note = tag("p", f"{earlier} earlier evaluations are not shown.", class_="quiet") if earlier else ""
    return tag("section", tag("h2", "Held-out data"), write_table(["step", *names], rows, "held-out metrics"), note)


def _format_metric(value: float | None) -> str:
    return " " if value is None else format_number(value)


def _program_section(program: Program, simulated: Trace | None) -> str:
    parts = [tag("h2", "Program"), _program_block(abbreviate_program(program, width=132), "rank programs")]
    whole = format_program(program)
    if len(whole) <= MAX_PROGRAM_CHARS:
        summary = tag("summary", f"all instructions of {program.num_ranks} ranks")
        parts.append(tag("details", summary, _program_block(whole, "all rank programs")))
    if simulated is not None:
        parts += [tag("h3", "One step, simulated"), timeline_figure(draw_timeline(simulated))]
    return tag("section", *parts)


def _program_block(text: str, name: str) -> str:
    return scroll_area("pre", "\n".join(map(_colour_line, text.splitlines())) or " ", name)


def _colour_line(line: str) -> str:
    """Return a line of instructions, each in the colour of its kind."""
    return " ".join(_colour_instruction(text) for text in line.split(" "))


def _colour_instruction(text: str) -> str:
    if not text[:1].isalpha() or not any(letter.isdigit() for letter in text):
        return escape(text)
    return tag("span", escape(text), class_=instruction_kind(text))


def _step_section(timelines: StepTimelines) -> str:
    simulated, measured = timelines.simulated, timelines.measured
    if measured is None:
        return ""
    drawing = draw_timeline(measured) if simulated is None else draw_comparison(simulated, measured)
    title = "One step, measured" if simulated is None else "One step, simulated and measured"
    note = tag("p", escape(timelines.note), class_="quiet") if timelines.note else ""
    return tag("section", tag("h2", title), note, timeline_figure(drawing))


def _text_section(title: str, text: str) -> str:
    if not text:
        return ""
    return tag("section", tag("h2", title), scroll_area("pre", escape(text), title.lower()))
