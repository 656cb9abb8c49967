"""``counterpoint verify``: verify a program that is read from a file."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from counterpoint.cli.echo import echo
from counterpoint.errors import PlanError
from counterpoint.program.program import Program
from counterpoint.program.text import parse_program
from counterpoint.program.verify.verifier import NO_BOUNDS, updated_units, verify as verify_program
from counterpoint.world.topology import format_count

_RANK_LABEL = re.compile(r"^rank \d+ ", flags=re.MULTILINE)


def verify(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A program, one line for each rank.")],
    *,
    staleness: Annotated[
        int, typer.Option(min=0, help="Updates by which a gradient may be late; 0 for a synchronous step.")
    ] = 0,
) -> None:
    """Verify a program that is read from a file: one line for each rank, as `counterpoint show` prints them.

    The rules are those of the plans: docs/reference/program-format.md. The units of the model are those that the
    program updates, and rule 8, its bytes, needs a model. To run it: cp.Trainer(..., strategy=cp.parse_program(text)).
    """
    program = read_program(file)
    symbolic = verify_program(program, replace(NO_BOUNDS, staleness=staleness))
    micros = len(program.micros)
    blocks = f"{format_count(len(updated_units(program)), 'unit')}, {micros} microbatch{'es' if micros != 1 else ''}"
    in_flight = max(symbolic.peak_in_flight)
    ranks = format_count(program.num_ranks, "rank")
    echo(f"{ranks}, {blocks}, at most {in_flight} in flight on a rank; rules 1 to 7 hold")


def read_program(file: Path) -> Program:
    """Read a program.

    Raises:
        PlanError: the file cannot be read, or has no line.
        ProgramError: it is no program.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(f"{file} cannot be read: {error.strerror}; give a file with a program") from None
    except UnicodeDecodeError:
        raise PlanError(f"{file} is not text in UTF-8; give a file with a program") from None
    if not text.strip():
        raise PlanError(f"{file} is empty; a program has one line for each rank")
    return parse_program(_RANK_LABEL.sub("", text.strip("\n")))
