"""``counterpoint import``: write a checkpoint of DeepSpeed's as one of this library's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from counterpoint.cli.echo import echo


def import_checkpoint(
    folder: Annotated[Path, typer.Argument(help="The folder that DeepSpeed has saved to, or one checkpoint in it.")],
    *,
    output: Annotated[Path, typer.Option(help="Folder of checkpoints.")] = Path("checkpoints"),
    tag: Annotated[str | None, typer.Option(help="Name of the checkpoint; the latest if omitted.")] = None,
) -> None:
    """Write a checkpoint of DeepSpeed's ZeRO, of stage 1, 2 or 3, as one that any plan continues from.

    Its files are read with weights_only=True: objects other than tensors and plain values are refused. Nothing is
    overwritten.
    """
    from counterpoint.compat.deepspeed.zero_import import import_checkpoint as import_files

    echo(f"wrote {import_files(folder, output, tag=tag)}; step.load({str(output)!r}) continues from it")
