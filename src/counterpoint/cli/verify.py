"""``counterpoint verify``: verify a program that is read from a file, or the checkpoints in a folder."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from counterpoint.cli.echo import echo
from counterpoint.cli.error_handling import FAILED
from counterpoint.errors import CheckpointError, PlanError
from counterpoint.file_reader import find_file_kind, read_regular_text
from counterpoint.program.program import Program
from counterpoint.program.text import parse_program
from counterpoint.program.verify.verifier import NO_BOUNDS, verify as verify_program
from counterpoint.viz.number_format import format_bytes
from counterpoint.world.topology import format_count

_RANK_LABEL = re.compile(r"^rank \d+ ", flags=re.MULTILINE)


def verify(
    path: Annotated[
        Path,
        typer.Argument(metavar="PATH", help="A program, one line for each rank; or a run's folder, or checkpoints."),
    ],
    *,
    staleness: Annotated[
        int, typer.Option(min=0, help="Updates by which a gradient may be late; 0 for a synchronous step.")
    ] = 0,
) -> None:
    """Verify a program that is read from a file, or every byte of the checkpoints in a folder.

    A program has one line for each rank, as `counterpoint show` prints them. The rules are those of the plans:
    docs/reference/program-format.md. The units of the model are those that the program updates, and rule 8, its bytes,
    needs a model. To run it: cp.Trainer(..., strategy=cp.parse_program(text)).

    Of a run's folder, a folder of checkpoints or one checkpoint, checksums, sizes and state are compared with the
    manifests. A line for each checkpoint says whether it is intact, else why not, and the last line names the newest
    intact one. The exit code is 1 if one is damaged.
    """
    try:
        kind = find_file_kind(path)
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror}; give a program, or a folder") from None
    if kind == "folder":
        verify_checkpoints(path)
        return
    program = read_program(path)
    symbolic = verify_program(program, replace(NO_BOUNDS, staleness=staleness))
    echo(symbolic.finding)


def verify_checkpoints(folder: Path) -> None:
    """Print which checkpoints are intact.

    Args:
        folder: a run's folder, a folder of checkpoints, or a checkpoint.

    Raises:
        CheckpointError: there is none.
        Exit: one is damaged.
    """
    from counterpoint.checkpoint import is_checkpoint, step_folders
    from counterpoint.checkpoint.reader import verify as verify_checkpoint
    from counterpoint.training.callbacks.run_folder import find_checkpoints
    from counterpoint.training.checkpointing.train_state import check_known_state

    root = find_checkpoints(folder)
    named = is_checkpoint(root)
    folders = [root] if named else step_folders(root)
    if not folders:
        raise CheckpointError(f"{root} has no checkpoints; give a run's folder, or a folder with step-…/manifest.json")
    intact, num_damaged = "", 0
    for checkpoint in folders:
        report = verify_checkpoint(checkpoint, check_state=check_known_state, links="followed" if named else "refused")
        size = f", {format_bytes(report.num_bytes)}" if report.step is not None else ""
        echo(f"{checkpoint.name}: {'damaged' if report.problems else 'intact'}{size}")
        for problem in report.problems:
            echo(f"  {problem}")
        intact, num_damaged = (intact, num_damaged + 1) if report.problems else (checkpoint.name, num_damaged)
    newest = f"the newest intact one is {intact}" if intact else "none is intact: restore one from a backup"
    echo(f"{num_damaged} of {format_count(len(folders), 'checkpoint')} damaged; {newest}")
    if num_damaged:
        raise typer.Exit(FAILED)


def read_program(file: Path) -> Program:
    """Read a program.

    Raises:
        PlanError: the file cannot be read, or has no line.
        ProgramError: it is not a program.
    """
    try:
        text = read_regular_text(file)
    except OSError as error:
        raise PlanError(f"{file} cannot be read: {error.strerror}; give a file with a program") from None
    except UnicodeDecodeError:
        raise PlanError(f"{file} is not text in UTF-8; give a file with a program") from None
    if not text.strip():
        raise PlanError(f"{file} is empty; a program has one line for each rank")
    return parse_program(_RANK_LABEL.sub("", text.strip("\n")))
