"""Tables: columns that fit a terminal, or plain lines for a pipe or a file."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from counterpoint.cli.echo import echo
from counterpoint.terminal_text import escape_line
from counterpoint.viz.number_format import format_bytes as format_bytes


@dataclass(frozen=True, slots=True)
class TableColumn:
    """One column.

    Args:
        title: its title.
        side: alignment of its cells.
        wraps: whether a long cell may be wrapped, on a terminal.
    """

    title: str
    side: Literal["left", "right"] = "left"
    wraps: bool = False


def print_table(columns: Sequence[TableColumn], rows: Iterable[Sequence[str]]) -> None:
    """Print a table: with rules and wrapped cells on a terminal, else one plain line per row."""
    if sys.stdout.isatty():
        _print_rich(columns, rows)
    else:
        echo(format_table(columns, rows))


def format_table(columns: Sequence[TableColumn], rows: Iterable[Sequence[str]]) -> str:
    """Format the table as lines with two spaces between columns; control characters are escaped.

    Example:
        >>> print(format_table([TableColumn("name"), TableColumn("s", "right")], [("a", "1.5"), ("bcdef", "10.0")]))
        name      s
        a       1.5
        bcdef  10.0
    """
    lines = [[column.title for column in columns], *([escape_line(cell) for cell in row] for row in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(columns))]
    drawn = (
        "  ".join(
            cell.rjust(width) if column.side == "right" else cell.ljust(width)
            for cell, width, column in zip(line, widths, columns, strict=True)
        )
        for line in lines
    )
    return "\n".join(line.rstrip() for line in drawn)


def _print_rich(columns: Sequence[TableColumn], rows: Iterable[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column.title, justify=column.side, no_wrap=not column.wraps)
    for row in rows:
        table.add_row(*(Text(escape_line(cell)) for cell in row))
    Console().print(table)
