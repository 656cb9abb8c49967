"""The command's front door: it knows what each command is for, and loads only the one that is asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import typer

from counterpoint.cli.error_handling import with_error_handling


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """A command before it is loaded.

    Args:
        summary: one line for the list of commands.
        settings: of its parser.
    """

    summary: str
    settings: Mapping[str, Any] = field(default_factory=dict)


COMMANDS = {
    "train": CommandEntry("Train a built-in job on real data and write a report."),
    "run": CommandEntry("Start a script on several ranks, as torchrun would.", {"allow_interspersed_args": False}),
    "launch": CommandEntry(
        "Start a script on Slurm, Ray, Kubernetes, by mpirun or torchrun, or show what would.",
        {"allow_interspersed_args": False},
    ),
    "serve": CommandEntry("Run the coordinator of a job with parameter servers, or one of these."),
    "plan": CommandEntry("List the plans that fit so many ranks, with predicted figures."),
    "profile": CommandEntry("Time a job's model piece by piece, or count what it would take."),
    "probe": CommandEntry("Measure what ranks compute and what messages take, as a cluster file."),
    "show": CommandEntry("Show the program of a plan: its text, its drawing, its cost."),
    "strategies": CommandEntry("List the strategies: what each does, what it costs, where it was published."),
    "bench": CommandEntry("Run a benchmark side by side with the peers that are installed."),
    "doctor": CommandEntry("Say what on this machine will hurt, and the fix."),
}
"""The command NAME is the function NAME of ``counterpoint.cli.JOB_NAME``."""


def app(argv: Sequence[str] | None = None) -> None:
    """The command has run; this only returns by ending the process, with 0, 1, 2 (wrong usage) or 130 (Ctrl-C)."""
    words = list(sys.argv[1:] if argv is None else argv)
    build_app(words)(args=words, prog_name="counterpoint")


def build_app(argv: Sequence[str]) -> typer.Typer:
    """Return the command line with the one command loaded that the words ask for."""
    wanted = next((word for word in argv if not word.startswith("-")), None)
    typed = typer.Typer(
        help="Train any PyTorch model under every parallelization strategy.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for name, entry in COMMANDS.items():
        run = with_error_handling(load_command(name)) if name == wanted else unloaded_command
        typed.command(name, short_help=entry.summary, context_settings=dict(entry.settings))(run)
    return typed


def load_command(name: str) -> Callable[..., object]:
    """Return the function of a command."""
    function: Callable[..., object] = getattr(importlib.import_module(f"counterpoint.cli.{name}"), name)
    return function


def unloaded_command() -> None:
    """Stand in the list of commands for one that was not asked for."""
    raise LookupError("only the command that was asked for is ever called")
