"""Numbers to see first: each on a card of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from counterpoint.drawing.markup import escape, tag
from counterpoint.drawing.scale import format_number


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a run, such as ``Figure("throughput", 812.4, "samples/s")``."""

    name: str
    value: float | str
    unit: str = ""


def draw_figures(figures: Sequence[Figure]) -> str:
    """Return the figures as a list of cards; nothing where there are none."""
    if not figures:
        return ""
    cards = [
        tag(
            "div",
            tag("dt", escape(figure.name)),
            tag(
                "dd",
                escape(format_number(figure.value)),
                f" {tag('small', escape(figure.unit))}" if figure.unit else "",
            ),
        )
        for figure in figures
    ]
    return tag("dl", *cards, class_="figures")
