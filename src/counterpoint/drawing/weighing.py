"""How a plan was chosen, as a page: the plans in a table, and the timelines of the best beside each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from counterpoint.drawing.figures import Figure, draw_figures
from counterpoint.drawing.markup import escape, tag
from counterpoint.drawing.page import timeline, write_page, write_table
from counterpoint.drawing.svg import draw_beside, draw_plans
from counterpoint.program.trace import Trace


@dataclass(frozen=True, slots=True)
class Weighed:
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
class Weighing:
    """What there was to choose from.

    Args:
        sentences: what was taken, and why.
        titles: of the table's columns.
        rows: one for each plan, the first one first.
        texts: the columns that hold words, and not figures.
        steps: of the best plans.
    """

    sentences: tuple[str, ...]
    titles: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    texts: frozenset[str] = frozenset()
    steps: tuple[Weighed, ...] = ()


def write_weighing(title: str, subject: str, figures: Sequence[Figure], weighing: Weighing) -> str:
    """Return the choice of a plan as a self-contained HTML page; it loads nothing and runs nothing.

    Args:
        title: of the page.
        subject: what a plan is wanted for, in one sentence.
        figures: the numbers to see first.
        weighing: what there was to choose from.
    """
    header = tag("header", tag("h1", escape(title)), tag("p", escape(subject), class_="quiet"))
    return write_page(title, header, draw_figures(figures), *draw_weighing(weighing))


def draw_weighing(weighing: Weighing) -> Iterator[str]:
    """Yield the sections of a page that say how a plan was chosen."""
    said = (tag("p", escape(sentence)) for sentence in weighing.sentences)
    table = write_table(weighing.titles, weighing.rows, "plans", weighing.texts)
    yield tag("section", tag("h2", "Plans that were weighed"), *said, table)
    if weighing.steps:
        drawing = draw_plans([(step.name, step.simulated) for step in weighing.steps])
        yield tag(
            "section", tag("h2", "One step under the best plans, simulated"), timeline(drawing, "simulated plans")
        )
    tried = [step for step in weighing.steps if step.measured is not None]
    if tried:
        yield tag("section", tag("h2", "Predicted and measured"), *map(_pair, tried))


def _pair(step: Weighed) -> str:
    """Draw a plan that was tried: its step as it was predicted, and as it was."""
    assert step.measured is not None, "it was tried"
    drawing = draw_beside(step.simulated, step.measured)
    return tag("h3", escape(step.name)) + timeline(drawing, f"timeline of {step.name}")
