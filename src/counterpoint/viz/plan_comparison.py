"""How a plan was chosen, as a page: the plans in a table, and the timelines of the best beside each other."""

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
        simulated: as it was predicted.
        measured: as it was on real ranks; None where it was not tried.
    """

    name: str
    simulated: Trace
    measured: Trace | None = None


@dataclass(frozen=True, slots=True)
class PlanComparison:
    """What there was to choose from.

    Args:
        sentences: what was taken, and why.
        titles: of the table's columns.
        rows: one for each plan, the first one first.
        texts: the columns that hold words, and not figures.
        steps: of the best plans.
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
        subject: what a plan is wanted for, in one sentence.
        figures: the numbers to see first.
        weighing: what there was to choose from.
    """
    header = tag("header", tag("h1", escape(title)), tag("p", escape(purpose), class_="quiet"))
    return write_page(title, header, draw_stat_cards(cards), *draw_plan_comparison(comparison))


def draw_plan_comparison(comparison: PlanComparison) -> Iterator[str]:
    """Yield the sections of a page that say how a plan was chosen."""
    said = (tag("p", escape(sentence)) for sentence in comparison.explanation)
    table = write_table(comparison.titles, comparison.rows, "plans", comparison.text_columns)
    yield tag("section", tag("h2", "Plans that were weighed"), *said, table)
    if comparison.plans:
        drawing = draw_plans([(step.name, step.simulated) for step in comparison.plans])
        yield tag(
            "section",
            tag("h2", "One step under the best plans, simulated"),
            timeline_figure(drawing, "simulated plans"),
        )
    tried = [step for step in comparison.plans if step.measured is not None]
    if tried:
        yield tag("section", tag("h2", "Predicted and measured"), *map(_draw_measured_plan, tried))


def _draw_measured_plan(step: ComparedPlan) -> str:
    """Draw a plan that was tried: its step as it was predicted, and as it was."""
    assert step.measured is not None, "it was tried"
    drawing = draw_comparison(step.simulated, step.measured)
    return tag("h3", escape(step.name)) + timeline_figure(drawing, f"timeline of {step.name}")
