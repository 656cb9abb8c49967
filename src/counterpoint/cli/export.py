"""``counterpoint export``: write a checkpoint as files of plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from counterpoint.cli.echo import echo
from counterpoint.viz.number_format import format_bytes


def export(
    folder: Annotated[Path, typer.Argument(help="A run's folder, a folder of checkpoints, or a checkpoint.")],
    *,
    file_format: Annotated[
        Literal["pt", "safetensors", "deepspeed"],
        typer.Option("--format", help="Format of the weights; deepspeed is its universal checkpoint."),
    ] = "pt",
    output: Annotated[Path, typer.Option(help="Folder for the files.")] = Path("export"),
    step: Annotated[int | None, typer.Option(min=0, help="Step of the checkpoint; the newest if omitted.")] = None,
    weights_only: Annotated[
        bool, typer.Option("--weights-only/--optimizer", help="Whether to omit the optimizer's state.")
    ] = False,
) -> None:
    """Write a checkpoint, saved under any plan, as the state_dict of the model and of the optimizer.

    model.pt and optimizer.pt are read by torch.load(..., weights_only=True), model.safetensors by safetensors and by
    transformers. Nothing is overwritten.
    """
    from counterpoint.training.checkpointing.export import open_checkpoint, write_torch_files

    checkpoint = open_checkpoint(folder, step)
    files = write_torch_files(checkpoint, output, file_format, "weights" if weights_only else "all")
    echo(f"step {checkpoint.step} of {checkpoint.folder}, saved under {checkpoint.state['plan']}")
    for file in files:
        echo(f"{file.path}: {file.num_tensors} tensors, {format_bytes(file.num_bytes)}")
