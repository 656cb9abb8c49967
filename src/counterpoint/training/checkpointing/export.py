"""Read a checkpoint as plain torch state, and write it for programs that do not know this library.

A ``.pt`` file is written by ``torch.save``, which pickles; what is in it are tensors and plain values only, so that
``torch.load(..., weights_only=True)`` reads it. This library reads none of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any, Literal, TypeAlias, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor

from counterpoint.checkpoint import Checkpoint, step_folders
from counterpoint.errors import CheckpointError
from counterpoint.file_writer import replace_file
from counterpoint.optim.validation import checked_call
from counterpoint.runtime.state_dict import decode_scalar
from counterpoint.terminal_text import warn
from counterpoint.training.callbacks.run_folder import find_checkpoints
from counterpoint.training.checkpointing.save_restore import CheckpointReader, find_checkpoint, read_buffer
from counterpoint.training.checkpointing.universal_files import universal_files
from counterpoint.training.optimizer_state import torch_state_dict

ExportFormat: TypeAlias = Literal["pt", "safetensors", "deepspeed"]


@dataclass(frozen=True, slots=True)
class ExportedFile:
    """A file that was written.

    Args:
        path: its path.
        num_tensors: the tensors in it.
        num_bytes: its size.
    """

    path: Path
    num_tensors: int
    num_bytes: int


@checked_call
def export_checkpoint(
    folder: str | Path,
    output: str | Path,
    *,
    step: int | None = None,
    file_format: ExportFormat = "pt",
    contents: Literal["all", "weights"] = "all",
) -> tuple[ExportedFile, ...]:
    """Write a checkpoint, saved under any plan, as files of plain torch.

    ``model.pt`` is what ``model.state_dict()`` returns, and ``model.safetensors`` the same as transformers writes it,
    in which tied parameters are once. ``optimizer.pt`` is what the ``state_dict()`` of the optimizer returns that has
    trained the model in a plain loop. The format ``deepspeed`` is its universal checkpoint instead, with Adam's state,
    which DeepSpeed loads at any stage and number of ranks under ``"checkpoint": {"load_universal": true}``.

    Args:
        folder: a run's folder, a folder of checkpoints, of which the newest intact one is taken, or a checkpoint.
        output: folder for the files; created if it does not exist.
        step: the step of the checkpoint, instead of the newest.
        file_format: of the weights.
        contents: ``weights`` omits the optimizer.

    Returns:
        The files.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or a file exists already or cannot be written.

    Example:
        >>> import tempfile, torch, counterpoint as cp
        >>> model = torch.nn.Linear(2, 1)
        >>> data = torch.utils.data.TensorDataset(torch.randn(8, 2), torch.randn(8, 1))
        >>> folder = tempfile.mkdtemp()
        >>> with cp.Trainer(model, loss=torch.nn.functional.mse_loss, optimizer=torch.optim.Adam) as trainer:
        ...     history = trainer.fit(data, batch_size=4, checkpoint_dir=folder)
        >>> [file.path.name for file in cp.export_checkpoint(folder, f"{folder}/plain")]
        ['model.pt', 'optimizer.pt']
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> optimizer.load_state_dict(torch.load(f"{folder}/plain/optimizer.pt", weights_only=True))
    """
    if file_format not in get_args(ExportFormat):
        raise CheckpointError(f"there is no format {file_format!r}; give pt, safetensors or deepspeed")
    return write_torch_files(open_checkpoint(Path(folder), step), Path(output), file_format, contents)


def write_torch_files(
    checkpoint: Checkpoint, output: Path, file_format: ExportFormat, contents: Literal["all", "weights"]
) -> tuple[ExportedFile, ...]:
    """Write an open checkpoint, as :func:`export_checkpoint` does.

    Raises:
        CheckpointError: it is damaged, or a file exists already or cannot be written.
    """
    if file_format == "deepspeed":
        return _write_deepspeed_files(checkpoint, output, contents)
    writers: dict[str, Callable[[Path], object]] = {}
    weights = read_state_dict(checkpoint)
    if file_format == "pt":
        writers["model.pt"] = lambda path: torch.save(weights, path)
    else:
        unique = {id(tensor): name for name, tensor in reversed(weights.items())}
        stored = {name: tensor for name, tensor in weights.items() if unique[id(tensor)] == name}
        writers["model.safetensors"] = lambda path: save_file(stored, path, {"format": "pt"})
    num_tensors = {name: len(weights) if file_format == "pt" else len(stored) for name in writers}
    if contents == "all":
        optimizer = read_optimizer_state(checkpoint)
        writers["optimizer.pt"] = lambda path: torch.save(optimizer, path)
        num_tensors["optimizer.pt"] = sum(len(state) for state in optimizer["state"].values())
    _require_new(output, writers)
    return tuple(write_file(output / name, write, num_tensors[name]) for name, write in writers.items())


def _require_new(output: Path, names: Iterable[str]) -> None:
    """Check that no file would be overwritten.

    Raises:
        CheckpointError: one exists.
    """
    for path in map(output.joinpath, names):
        if os.path.lexists(path):
            raise CheckpointError(
                f"{path} exists and is not overwritten; give another output folder, or remove the file"
            )


def _write_deepspeed_files(
    checkpoint: Checkpoint, output: Path, contents: Literal["all", "weights"]
) -> tuple[ExportedFile, ...]:
    """Write a universal checkpoint of DeepSpeed's.

    Raises:
        CheckpointError: the optimizer is not Adam, or is to be omitted; or a file exists already or cannot be written.
    """
    if contents == "weights":
        raise CheckpointError(
            "the format deepspeed has weights and optimizer state; for the weights alone give pt, which "
            "model.load_state_dict reads before deepspeed.initialize"
        )
    latest, tag = "latest_universal", f"global_step{checkpoint.step}"
    _require_new(output, [tag, latest])
    files = universal_files(checkpoint, read_state_dict(checkpoint), read_optimizer_state(checkpoint))
    num_tensors = {
        name: len(content.get("module", "1")) for name, content in files.items() if isinstance(content, dict)
    }
    written = [
        write_file(output / name, partial(torch.save, content), num_tensors.get(name, 1))
        for name, content in files.items()
    ]
    return (*written, write_file(output / latest, lambda path: replace_file(path, tag), 0))


def open_checkpoint(folder: Path, step: int | None = None) -> Checkpoint:
    """Return a checkpoint of a run, the newest intact one or that of a step.

    Args:
        folder: a run's folder, a folder of checkpoints, or a checkpoint.
        step: of the checkpoint; None for the newest.

    Raises:
        CheckpointError: there is none, or it is damaged, or it was not written by a training run.
    """
    root = find_checkpoints(folder)
    if step is None:
        return find_checkpoint(root)
    steps = {int(path.name.removeprefix("step-")): path for path in step_folders(root)}
    if step not in steps:
        known = f"it has those of {', '.join(map(str, steps))}" if steps else "it has none"
        raise CheckpointError(f"{root} has no checkpoint of step {step}; {known}: give another step, or none")
    return find_checkpoint(steps[step])


def read_state_dict(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return the weights and buffers of a checkpoint as the model's ``state_dict()`` would; tied ones are one tensor.

    Raises:
        CheckpointError: a tensor is damaged.
    """
    state: Any = checkpoint.state
    reader, found = CheckpointReader.open(checkpoint), set(checkpoint.names())
    buffers = {entry.removeprefix("buffer:").split("~")[0] for entry in found if entry.startswith("buffer:")}
    names: Mapping[str, str] = state.get("state_dict", {name: name for name in state["model"]})
    tensors: dict[str, Tensor] = {}
    for name in dict.fromkeys(names.values()):
        if f"frozen:{name}" in found:
            tensors[name] = checkpoint.read(f"frozen:{name}")
        elif name in buffers:
            tensors[name] = read_buffer(checkpoint, name)
        else:
            tensors[name] = reader.read("model", name)
    return {name: tensors[stored] for name, stored in names.items()}


def read_optimizer_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the optimizer's state of a checkpoint in torch's own layout, for ``optimizer.load_state_dict``.

    Raises:
        CheckpointError: it has no parameter groups, or a tensor is damaged.
    """
    state: Any = checkpoint.state
    if "optimizer" not in state:
        raise CheckpointError(
            f"{checkpoint.folder} was saved by a version that did not keep the order of the optimizer's parameters; "
            "export the weights alone, or resume from it once and save again"
        )
    if state.get("delayed_grads", {"replicas": 0})["replicas"]:
        warn(
            f"{state['plan']} had delayed the gradient of step {state['step'] - 1}, which torch's optimizers do not "
            "have, so it is not exported",
            RuntimeWarning,
            stacklevel=2,
        )
    reader = CheckpointReader.open(checkpoint)
    scalars, keys = reader.scalars(state["scalars"]), reader.optimizer_keys()
    states: dict[str, dict[str, Any]] = {}
    for name in (name for group in state["optimizer"]["param_groups"] for name in group["params"]):
        entries = {key: decode_scalar(value) for key, value in scalars.get(name, {}).items()}
        tensors = {
            key: tensor for key in keys if (tensor := reader.read_optional(f"optimizer.{key}", name)) is not None
        }
        if entries or tensors:
            states[name] = {**entries, **tensors}
    return torch_state_dict(state["optimizer"]["param_groups"], states)


def write_file(path: Path, write: Callable[[Path], object], num_tensors: int) -> ExportedFile:
    """Write a file under another name, and rename it when it is complete.

    Raises:
        CheckpointError: it cannot be written.
    """
    draft = path.with_name(f".{path.name}.{token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.touch()
        mode = draft.stat().st_mode
        write(draft)
        draft.chmod(mode)  # of a new file here: safetensors makes files that only their owner can read
        draft.replace(path)
    except (OSError, RuntimeError) as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise CheckpointError(f"{path} cannot be written: {error}; give another output folder") from error
    return ExportedFile(path, num_tensors, path.stat().st_size)
