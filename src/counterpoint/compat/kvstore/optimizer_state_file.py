"""Optimizer states in a file: tensors as safetensors, everything else as JSON in its header; no pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from counterpoint.checkpoint.file_ops import LOCAL_FILES, write_file
from counterpoint.errors import CheckpointError

FORMAT = "counterpoint kvstore states 1"


def save_states(path: Path, states: Mapping[Any, dict[str, Any]], *, with_options: bool) -> None:
    """Write the states to a file; an existing file is replaced when the new one is complete.

    Args:
        path: of the file.
        states: by key, from :meth:`TorchUpdater.states`.
        with_options: also save the learning rate and other options.
    """
    tensors: dict[str, Tensor] = {}
    entries = []
    for index, (key, saved) in enumerate(states.items()):
        scalars = {}
        for name, value in saved["state"].items():
            if isinstance(value, Tensor):
                tensors[f"{index} {name}"] = value.detach().cpu().contiguous().clone()
            else:
                scalars[name] = value
        options = {name: value for name, value in saved["options"].items() if _is_plain(value)} if with_options else {}
        entries.append({"key": key, "numbers": scalars, "options": options})
    data = to_bytes(tensors, {"form": FORMAT, "keys": json.dumps(entries)})
    draft = path.with_name(f".{path.name}.draft")
    draft.unlink(missing_ok=True)
    try:
        write_file(LOCAL_FILES, draft, data)
        draft.replace(path)
        LOCAL_FILES.sync_folder(path.parent)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise CheckpointError(
            f"could not write {path}: {error.strerror or error}; the previous file is unchanged"
        ) from error


def load_states(path: Path) -> dict[Any, dict[str, Any]]:
    """Return the states in a file.

    Raises:
        CheckpointError: it cannot be read, or has another format.
    """
    try:
        with safe_open(path, framework="pt") as opened:
            header = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
        if header.get("form") != FORMAT:
            raise CheckpointError(f"{path} has no kvstore states; give a file written by save_optimizer_states")
        entries = json.loads(header["keys"])
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}; give a file written by save_optimizer_states"
        ) from error
    states: dict[Any, dict[str, Any]] = {
        entry["key"]: {"state": dict(entry["numbers"]), "options": _options(entry["options"])} for entry in entries
    }
    keys = [entry["key"] for entry in entries]
    for name, tensor in tensors.items():
        index, state_name = name.split(" ", 1)
        states[keys[int(index)]]["state"][state_name] = tensor
    return states


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str) or _is_pair(value)


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple | list) and all(isinstance(number, int | float) for number in value)


def _options(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
