"""Rows with a published and a simulated figure, and their agreement."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FigureRow:
    """One published figure.

    Args:
        labels: of the figure, one text per column of its table.
        published: the figure as printed, ``31.4``, so that its last digit is known.
        simulated: ours; a text if the published one is a text.
        why: mark of the reason for a difference; empty if they agree.
        is_fitted: whether an unpublished input was chosen so that they agree.
    """

    labels: tuple[str, ...]
    published: str
    simulated: float | str
    why: str = ""
    is_fitted: bool = False

    @property
    def decimals(self) -> int:
        """The number of decimals of the published figure."""
        return len(self.published.partition(".")[2])

    def agrees(self, within: float) -> bool:
        """Return whether both are equal to one unit of the last printed digit, or within a relative tolerance.

        Figures are rounded in some tables and truncated in others. For integers the tolerance is at most half a
        percent.
        """
        if isinstance(self.simulated, str):
            return self.simulated == self.published
        value = float(self.published)
        digit = 10.0**-self.decimals if self.decimals else min(1.0, abs(value) / 200)
        return abs(self.simulated - value) <= max(digit * (1 + 1e-9), within * abs(value))

    @property
    def formatted(self) -> str:
        """The simulated figure with one more digit than the published one."""
        if isinstance(self.simulated, str):
            return self.simulated
        return f"{self.simulated:.{self.decimals + 1 + (not self.decimals and self.simulated < 10)}f}"

    @property
    def difference(self) -> str:
        """The difference of the simulated figure in percent."""
        if isinstance(self.simulated, str) or not float(self.published):
            return "same" if self.agrees(0) else "other"
        hundredths = round(100 * (self.simulated / float(self.published) - 1), 1)
        return f"{hundredths:+.1f} %" if hundredths else "same"


@dataclass(frozen=True, slots=True)
class FigureTable:
    """Published figures of one kind.

    Args:
        title: its heading.
        source: of the publication.
        inputs: of the simulation, and where they were published.
        columns: headings of the labels.
        rows: the figures.
        within: relative tolerance; 0 for the last digit.
        unit: of both figures.
        reasons: for differences, by mark.
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
        """Return rows that differ without a reason, or agree although they have one."""
        marks = {mark for mark, _ in self.reasons}
        found = []
        for row in self.rows:
            name = f"{self.title}: {', '.join(row.labels)}: {row.published} published, {row.formatted} simulated"
            agrees = row.agrees(self.within)
            if agrees and row.why:
                found.append(f"{name}, but has the reason {row.why!r}")
            elif not agrees and row.why not in marks:
                found.append(f"{name}, without a reason {row.why!r}")
        unused = marks - {row.why for row in self.rows}
        return [*found, *(f"{self.title}: no row has the reason {mark!r}" for mark in sorted(unused))]


def split_mark(cell: str) -> tuple[str, str]:
    """Return a published figure and the mark after it: ``1.38b`` differs because of ``b``.

    Example:
        >>> split_mark("1.38b"), split_mark("6.3")
        (('1.38', 'b'), ('6.3', ''))
    """
    return (cell[:-1], cell[-1]) if cell[-1].isalpha() else (cell, "")
