"""The page of published figures, generated from the tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from textwrap import fill

from benchmarks.published.bubbles import bubble_table, throughput_table
from benchmarks.published.collectives import all_reduce_table
from benchmarks.published.configurations import configuration_table
from benchmarks.published.gpus import megatron_table, torchtitan_ratio_table, torchtitan_table
from benchmarks.published.memory import largest_table, memory_table, volume_table
from benchmarks.published.not_simulated import MISSING
from benchmarks.published.overlap import overlap_table
from benchmarks.published.pipedream import communication_table, speed_table
from benchmarks.published.scaling import horovod_table, tensorflow_table
from benchmarks.published.table import FigureRow, FigureTable
from benchmarks.published.torchgpipe import torchgpipe_table

WIDTH = 120
TABLES = (
    memory_table,
    largest_table,
    volume_table,
    bubble_table,
    throughput_table,
    torchgpipe_table,
    all_reduce_table,
    configuration_table,
    communication_table,
    speed_table,
    overlap_table,
    horovod_table,
    tensorflow_table,
    torchtitan_table,
    torchtitan_ratio_table,
    megatron_table,
)
HEAD = """\
# Published figures

Figures that papers and projects have published, next to what Counterpoint's programs, planner and simulator give for
the same inputs, using only what was published. `make golden` writes this page, and a test fails if it differs from what
the code computes. A figure *agrees* if both are equal to one in the last printed digit, or within the tolerance of its
table; a figure that *misses* has a mark that is explained below its table; for a *fitted* figure an unpublished
quantity was chosen so that it agrees, and the table says which. `counterpoint bench published` prints the same.
"""


def all_tables() -> tuple[FigureTable, ...]:
    """Return every table."""
    return tuple(build() for build in TABLES)


def render_page() -> str:
    """Return the page as Markdown."""
    tables = all_tables()
    parts = [HEAD, render_summary(tables), *("\n".join(render_section(table)) for table in tables)]
    rows = ["| what | published | what is missing |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in MISSING)]
    text = "Figures that cannot be compared, because what they depend on was not published or is not available."
    return "\n".join([*parts, "## What cannot be simulated\n", f"{text}\n", *rows]) + "\n"


def render_summary(tables: Iterable[FigureTable]) -> str:
    """Return the number of figures that agree, by table."""
    lines = ["| table | figures | agree | miss | fitted | tolerance |", "|---|--:|--:|--:|--:|---|"]
    for table in tables:
        misses, fitted = sum(bool(row.why) for row in table.rows), sum(row.is_fitted for row in table.rows)
        counts = (len(table.rows), len(table.rows) - misses - fitted, misses, fitted)
        anchor = "".join(one for one in table.title.lower().replace(" ", "-") if one.isalnum() or one == "-")
        cells = (f"[{table.title}](#{anchor})", *map(str, counts), format_tolerance(table))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def format_tolerance(table: FigureTable) -> str:
    """Return the tolerance of a table as text."""
    if table.within:
        return f"{100 * table.within:g} %"
    return "the same text" if isinstance(table.rows[0].simulated, str) else "the last digit"


def render_section(table: FigureTable) -> Iterator[str]:
    """Yield the lines of one table."""
    yield f"## {table.title}\n"
    yield fill(f"Published: {table.source}", WIDTH, break_long_words=False, break_on_hyphens=False) + "\n"
    yield fill(f"Simulated: {table.inputs}", WIDTH, break_long_words=False, break_on_hyphens=False) + "\n"
    unit = f", {table.unit}" if table.unit else ""
    yield f"| {' | '.join(table.columns)} | published{unit} | simulated | difference |"
    yield f"|{'---|' * len(table.columns)}--:|--:|--:|"
    for row in table.rows:
        yield f"| {' | '.join(format_cells(row))} |"
    if table.reasons:
        yield "\nMisses:\n"
    for mark, why in table.reasons:
        yield fill(f"* ({mark}) {why}.", WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    yield ""


def format_cells(row: FigureRow) -> tuple[str, ...]:
    """Return the cells of a row."""
    return (*row.labels, row.published, row.formatted, f"{row.difference} ({row.why})" if row.why else row.difference)
