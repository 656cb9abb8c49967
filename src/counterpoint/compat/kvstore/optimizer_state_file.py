"""States of optimizers in a file: tensors as safetensors, everything else as JSON in its header; no pickle."""

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
    """The file has the states; one that was there is replaced once the new one is complete.

    Args:
        path: the file.
        states: by key, what :meth:`TorchUpdater.states` returns.
        with_options: learning rates and other options are saved, too.
    """
    tensors: dict[str, Tensor] = {}
    plain = []
    for place, (key, found) in enumerate(states.items()):
        numbers = {}
        for name, value in found["state"].items():
            if isinstance(value, Tensor):
                tensors[f"{place} {name}"] = value.detach().cpu().contiguous().clone()
            else:
                numbers[name] = value
        options = {name: value for name, value in found["options"].items() if _is_plain(value)} if with_options else {}
        plain.append({"key": key, "numbers": numbers, "options": options})
    data = to_bytes(tensors, {"form": FORMAT, "keys": json.dumps(plain)})
    draft = path.with_name(f".{path.name}.draft")
    draft.unlink(missing_ok=True)
    try:
        write_file(LOCAL_FILES, draft, data)
        draft.replace(path)
        LOCAL_FILES.sync_folder(path.parent)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise CheckpointError(
            f"could not write {path}: {error.strerror or error}; nothing has been replaced"
        ) from error


def load_states(path: Path) -> dict[Any, dict[str, Any]]:
    """Return what a file has.

    Raises:
        CheckpointError: it cannot be read, or is none of these.
    """
    try:
        with safe_open(path, framework="pt") as opened:
            header = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
        if header.get("form") != FORMAT:
            raise CheckpointError(f"{path} has no states of a kvstore; give a file of save_optimizer_states")
        plain = json.loads(header["keys"])
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; give a file of save_optimizer_states") from error
    states: dict[Any, dict[str, Any]] = {
        entry["key"]: {"state": dict(entry["numbers"]), "options": _options(entry["options"])} for entry in plain
    }
    keys = [entry["key"] for entry in plain]
    for name, tensor in tensors.items():
        place, own = name.split(" ", 1)
        states[keys[int(place)]]["state"][own] = tensor
    return states


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str) or _is_pair(value)


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple | list) and all(isinstance(number, int | float) for number in value)


def _options(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
