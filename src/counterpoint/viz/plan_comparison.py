"""Draw how a plan was chosen as a page: a table of plans, and timelines of the best ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from counterpoint.program.trace import Trace
from counterpoint.viz.markup import escape, tag
from counterpoint.viz.page import StatCard, draw_stat_cards, timeline_figure, write_page, write_table
from counterpoint.viz.svg_timeline import draw_comparison, draw_plans


@dataclass(frozen=True, slots=True)
class ComparedPlan:
    """One step under a plan.

    Args:
        name: of the plan.
        simulated: the predicted trace.
        measured: the measured trace; None if the plan was not tried.
    """

    name: str
    simulated: Trace
    measured: Trace | None = None


@dataclass(frozen=True, slots=True)
class PlanComparison:
    """The plans that were compared.

    Args:
        explanation: sentences that say which plan was chosen, and why.
        titles: of the table's columns.
        rows: one for each plan, the best first.
        text_columns: titles of the columns that hold text instead of numbers.
        plans: the best plans with their traces.
    """

    explanation: tuple[str, ...]
    titles: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text_columns: frozenset[str] = frozenset()
    plans: tuple[ComparedPlan, ...] = ()


def write_comparison_page(title: str, purpose: str, cards: Sequence[StatCard], comparison: PlanComparison) -> str:
    """Return the choice of a plan as a self-contained HTML page; it loads nothing and runs nothing.

    Args:
        title: of the page.
        purpose: what the plan is for, in one sentence.
        cards: the most important numbers.
        comparison: the plans.
    """
    header = tag("header", tag("h1", escape(title)), tag("p", escape(purpose), class_="quiet"))
    return write_page(title, header, draw_stat_cards(cards), *draw_plan_comparison(comparison))


def draw_plan_comparison(comparison: PlanComparison) -> Iterator[str]:
    """Yield the sections of a page that show how a plan was chosen."""
    paragraphs = (tag("p", escape(sentence)) for sentence in comparison.explanation)
    table = write_table(comparison.titles, comparison.rows, "plans", comparison.text_columns)
    yield tag("section", tag("h2", "Plans that were compared"), *paragraphs, table)
    if comparison.plans:
        drawing = draw_plans([(plan.name, plan.simulated) for plan in comparison.plans])
        yield tag(
            "section",
            tag("h2", "One step under the best plans, simulated"),
            timeline_figure(drawing, "simulated plans"),
        )
    measured = [plan for plan in comparison.plans if plan.measured is not None]
    if measured:
        yield tag("section", tag("h2", "Predicted and measured"), *map(_draw_measured_plan, measured))


def _draw_measured_plan(step: ComparedPlan) -> str:
    """Draw the predicted and the measured step of a plan that was tried."""
    assert step.measured is not None, "the plan was tried"
    drawing = draw_comparison(step.simulated, step.measured)
    return tag("h3", escape(step.name)) + timeline_figure(drawing, f"timeline of {step.name}")
