"""Rows with a published and a simulated figure, and whether they agree."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FigureRow:
    """One published figure.

    Args:
        labels: what it is of, one text per column of its table.
        published: the figure as it is printed, ``31.4``; nothing behind it, so that its last digit can be told.
        simulated: ours; a text where what is published is one.
        why: the mark of the reason in its table why the two differ; empty where they agree.
        is_fitted: whether what is not published was chosen so that they agree.
    """

    labels: tuple[str, ...]
    published: str
    simulated: float | str
    why: str = ""
    is_fitted: bool = False

    @property
    def decimals(self) -> int:
        """How many digits the published figure has behind its point."""
        return len(self.published.partition(".")[2])

    def agrees(self, within: float) -> bool:
        """Tell whether both are the same to one in the last printed digit, or to a part of the published one.

        Figures are rounded in some tables and cut off in others. Of whole numbers one is at most half a hundredth.
        """
        if isinstance(self.simulated, str):
            return self.simulated == self.published
        value = float(self.published)
        digit = 10.0**-self.decimals if self.decimals else min(1.0, abs(value) / 200)
        return abs(self.simulated - value) <= max(digit * (1 + 1e-9), within * abs(value))

    @property
    def formatted(self) -> str:
        """The simulated figure with one digit more than the published one has."""
        if isinstance(self.simulated, str):
            return self.simulated
        return f"{self.simulated:.{self.decimals + 1 + (not self.decimals and self.simulated < 10)}f}"

    @property
    def difference(self) -> str:
        """By how much the simulated figure is above the published one, in hundredths."""
        if isinstance(self.simulated, str) or not float(self.published):
            return "same" if self.agrees(0) else "other"
        hundredths = round(100 * (self.simulated / float(self.published) - 1), 1)
        return f"{hundredths:+.1f} %" if hundredths else "same"


@dataclass(frozen=True, slots=True)
class FigureTable:
    """Published figures of one kind.

    Args:
        title: its heading.
        source: where it was published.
        inputs: what the simulation was told, and where that was published.
        columns: headings of the labels.
        rows: the figures.
        within: how far apart, as a part of the published figure, two figures are that agree; 0 for to the last digit.
        unit: of both figures.
        reasons: by mark, why rows miss.
    """

    title: str
    source: str
    inputs: str
    columns: tuple[str, ...]
    rows: tuple[FigureRow, ...]
    within: float = 0.0
    unit: str = ""
    reasons: tuple[tuple[str, str], ...] = ()

    def find_errors(self) -> list[str]:
        """Return what is not as the rows say: one that misses without a reason, or has a reason and agrees."""
        marks = {mark for mark, _ in self.reasons}
        found = []
        for row in self.rows:
            name = f"{self.title}: {', '.join(row.labels)}: {row.published} published, {row.formatted} simulated"
            agrees = row.agrees(self.within)
            if agrees and row.why:
                found.append(f"{name}, and needs no reason {row.why!r}")
            elif not agrees and row.why not in marks:
                found.append(f"{name}, and there is no reason {row.why!r}")
        unused = marks - {row.why for row in self.rows}
        return [*found, *(f"{self.title}: no row misses because of {mark!r}" for mark in sorted(unused))]


def split_mark(cell: str) -> tuple[str, str]:
    """Return a published figure and the mark behind it: ``1.38b`` misses because of ``b``.

    Example:
        >>> marked("1.38b"), marked("6.3")
        (('1.38', 'b'), ('6.3', ''))
    """
    return (cell[:-1], cell[-1]) if cell[-1].isalpha() else (cell, "")
