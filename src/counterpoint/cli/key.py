"""``counterpoint key``: make the secret key of a job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from counterpoint.cli.echo import echo
from counterpoint.rpc.job_key import new_key, write_key


def key(file: Annotated[Path, typer.Argument(help="A new file, which only you will be able to read.")]) -> None:
    """Make a new secret key and write it to a file.

    The processes of a job prove to each other that they have the key. Copy the file to every host over a secret
    channel, and pass its name with --key-file.
    """
    write_key(new_key(), file)
    echo(f"wrote a new key to {file}")
