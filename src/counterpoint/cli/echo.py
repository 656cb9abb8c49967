"""Print text of a command; names and paths in it may contain anything."""

from __future__ import annotations

import typer

from counterpoint.terminal_text import escape_text


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print text with its control characters escaped.

    Args:
        text: what to print.
        err: on standard error.
        nl: with a newline at the end.
    """
    typer.echo(escape_text(text), err=err, nl=nl)  # noqa: TID251 - here, and nowhere else
