"""The ``counterpoint`` command: its list of subcommands, each loaded only when it is run."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import typer
from typer.core import TyperCommand

from counterpoint.cli.error_handling import with_error_handling
from counterpoint.optim.validation import renamed_hint


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """A command that is not loaded yet.

    Args:
        summary: one line for the list of commands.
        settings: settings of its parser.
        function: the name of its function and module, if a function cannot have the command's.
    """

    summary: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    function: str = ""


COMMANDS = {
    "train": CommandEntry("Train a built-in job on real data and write a report."),
    "run": CommandEntry("Start a script on several ranks, as torchrun does.", {"allow_interspersed_args": False}),
    "launch": CommandEntry(
        "Start a script on Slurm, Ray, Kubernetes, with mpirun or torchrun.",
        {"allow_interspersed_args": False},
    ),
    "key": CommandEntry("Make the secret key of a job."),
    "serve": CommandEntry("Run the coordinator of a parameter-server job, or one of its servers."),
    "parity": CommandEntry("Check that a script trains the same under every plan."),
    "plan": CommandEntry("List the plans for a number of ranks, with predicted times."),
    "profile": CommandEntry("Profile the model of a script or a job layer by layer."),
    "export": CommandEntry("Write a checkpoint as the state_dict of the model and of the optimizer."),
    "import": CommandEntry("Write a checkpoint of DeepSpeed's as one of this library's.", function="import_checkpoint"),
    "probe": CommandEntry("Measure compute speed and links of ranks, and write a cluster file."),
    "show": CommandEntry("Show the program of a plan, or of the plan of a script: text, timeline and cost."),
    "verify": CommandEntry("Verify a program that is read from a file, or the checkpoints in a folder."),
    "strategies": CommandEntry("List the strategies: what each does, its cost, its source."),
    "bench": CommandEntry("Run a benchmark side by side with the peers that are installed."),
    "doctor": CommandEntry("Find problems of this machine for training, and their fixes."),
}
"""The command NAME is the function NAME of ``counterpoint.cli.NAME``, or that which its entry names."""

RENAMED_FLAGS = {"--again": "--remeasure", "--cut": "--snapshot", "--deadline": "--timeout", "--timing": "--profile"}
"""Present names of options of commands by the names that they had before."""


class RenamingCommand(TyperCommand):
    """A command whose error about an option's earlier name has the present one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - typer's class for it is private
        """Parse the arguments.

        Raises:
            UsageError: an option does not exist, or a value is missing or wrong.
        """
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            old = getattr(error, "option_name", "")  # of NoSuchOption, which typer does not export
            if any(RENAMED_FLAGS.get(old) in param.opts for param in self.params):
                error.message += renamed_hint(old, RENAMED_FLAGS)  # type: ignore[attr-defined]
            raise


def app(argv: Sequence[str] | None = None) -> None:
    """Run the command and exit the process: with 0, 1, 2 (wrong usage) or 130 (Ctrl-C)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    build_app(argv)(args=argv, prog_name="counterpoint")


def build_app(argv: Sequence[str]) -> typer.Typer:
    """Return the command line with the one command loaded that the arguments name."""
    requested = next((argument for argument in argv if not argument.startswith("-")), None)
    typer_app = typer.Typer(
        help="Train any PyTorch model under every parallelization strategy.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for name, entry in COMMANDS.items():
        command = with_error_handling(load_command(name)) if name == requested else unloaded_command
        typer_app.command(name, cls=RenamingCommand, short_help=entry.summary, context_settings=dict(entry.settings))(
            command
        )
    return typer_app


def load_command(name: str) -> Callable[..., object]:
    """Return the function of a command."""
    name = COMMANDS[name].function or name
    function: Callable[..., object] = getattr(importlib.import_module(f"counterpoint.cli.{name}"), name)
    return function


def unloaded_command() -> None:
    """Stand for a command that is not run in the list of commands."""
    raise LookupError("only the command that was asked for is ever called")
