"""How a command fails: one readable block for what went wrong on purpose, and an exit code that scripts can use."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Annotated

import typer

from counterpoint.errors import CounterpointError

FAILED = 1
INTERRUPTED = 130
TERMINATED = 143
BROKEN_PIPE = 141  # 128 + SIGPIPE, as a program that nobody reads any more ends

SHOW_TRACEBACK: ContextVar[bool] = ContextVar("WANTS_TRACEBACK", default=False)
"""Whether the command that runs was asked to show tracebacks, for those that start processes."""

Traceback = Annotated[bool, typer.Option("--traceback", help="Show where in the code an error was raised.")]


def with_error_handling(command: Callable[..., object]) -> Callable[..., object]:
    """Return the command with an option more, ``--traceback``, and its errors told instead of thrown."""

    @functools.wraps(command)
    def run(*, traceback: bool = False, **options: object) -> None:
        """Run the command, and end as it did: its errors are told on standard error, with an exit code."""
        SHOW_TRACEBACK.set(traceback)
        try:
            command(**options)
            sys.stdout.flush()
        except CounterpointError as error:
            if traceback:
                raise
            typer.echo(format_error(error), err=True)
            raise typer.Exit(FAILED) from None
        except KeyboardInterrupt as error:
            if traceback:
                raise
            typer.echo("\n".join(["stopped by Ctrl-C", *error_notes(error)]), err=True)
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            silence_stdout()
            raise typer.Exit(BROKEN_PIPE) from None

    own = inspect.signature(command, eval_str=True)
    extra = inspect.Parameter("traceback", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Traceback)
    signature = own.replace(parameters=[*own.parameters.values(), extra], return_annotation=None)
    run.__signature__ = signature  # type: ignore[attr-defined]  # what typer reads options from
    run.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    return run


def format_error(error: CounterpointError) -> str:
    """Return an error as a block of text that starts with its kind."""
    first, *rest = str(error).splitlines() or [""]
    return "\n".join([f"{type(error).__name__}: {first}", *(f"  {line}" for line in rest), *error_notes(error)])


def error_notes(error: BaseException) -> list[str]:
    """Return what was added to the error on its way: where a report of the run is, for instance."""
    return list(getattr(error, "__notes__", []))


def silence_stdout() -> None:
    """Whatever is still written goes nowhere, so that the interpreter can end without a second error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
