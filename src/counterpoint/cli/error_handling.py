"""Errors of commands: one readable block of text, and an exit code for scripts."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Annotated

import typer

from counterpoint.cli.echo import echo
from counterpoint.errors import CounterpointError

FAILED = 1
INTERRUPTED = 130
BROKEN_PIPE = 141  # 128 + SIGPIPE, the exit code of a program whose output pipe is closed

SHOW_TRACEBACK: ContextVar[bool] = ContextVar("WANTS_TRACEBACK", default=False)
"""Whether the running command was asked to show tracebacks, for commands that start processes."""

Traceback = Annotated[bool, typer.Option("--traceback", help="Show where in the code an error was raised.")]


def with_error_handling(command: Callable[..., object]) -> Callable[..., object]:
    """Return the command with an option ``--traceback``, and with its errors printed instead of raised."""

    @functools.wraps(command)
    def run(*, traceback: bool = False, **options: object) -> None:
        """Run the command; print errors on standard error and exit with a code."""
        SHOW_TRACEBACK.set(traceback)
        try:
            command(**options)
            sys.stdout.flush()
        except CounterpointError as error:
            if traceback:
                raise
            echo(format_error(error), err=True)
            raise typer.Exit(FAILED) from None
        except KeyboardInterrupt as error:
            if traceback:
                raise
            echo("\n".join(["stopped by Ctrl-C", *error_notes(error)]), err=True)
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            silence_stdout()
            raise typer.Exit(BROKEN_PIPE) from None
        except OSError as error:  # of the standard output, or of the folder for temporary files
            if traceback:
                raise
            if error.filename is None:  # the standard output is full, and would fail again when it is closed
                silence_stdout()
            place = f"{error.filename}: " if error.filename is not None else ""
            echo(f"the system refused what the command needs: {place}{error.strerror or error}", err=True)
            raise typer.Exit(FAILED) from None

    signature_of_command = inspect.signature(command, eval_str=True)
    option = inspect.Parameter("traceback", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Traceback)
    signature = signature_of_command.replace(
        parameters=[*signature_of_command.parameters.values(), option], return_annotation=None
    )
    run.__signature__ = signature  # type: ignore[attr-defined]  # typer reads the options from it
    run.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    return run


def format_error(error: CounterpointError) -> str:
    """Format an error as a block of text that starts with its type."""
    first, *rest = str(error).splitlines() or [""]
    return "\n".join([f"{type(error).__name__}: {first}", *(f"  {line}" for line in rest), *error_notes(error)])


def error_notes(error: BaseException) -> list[str]:
    """Return the notes added to an error, for example where the report of the run is."""
    return list(map(str, getattr(error, "__notes__", [])))


def silence_stdout() -> None:
    """Redirect standard output to nowhere, so that the interpreter can exit without a second error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
