"""Optimizer states in a file, as :mod:`counterpoint.value_codec` encodes them; no pickle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from counterpoint.checkpoint.file_ops import LOCAL_FILES, write_file
from counterpoint.errors import CheckpointError, ProtocolError
from counterpoint.file_reader import open_regular_file
from counterpoint.value_codec import decode_value, encode_value

FORMAT = "counterpoint kvstore states 2"


def save_states(path: Path, states: Mapping[Any, dict[str, Any]], *, with_options: bool) -> None:
    """Write the states to a file; an existing file is replaced when the new one is complete.

    Args:
        path: of the file.
        states: by key, from :meth:`TorchUpdater.states`.
        with_options: also save the learning rate and other options.
    """
    content = {
        key: {**saved, "options": _plain_options(saved) if with_options else {}} for key, saved in states.items()
    }
    data = encode_value({FORMAT: content}, "states", _unsupported)
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
        with open_regular_file(path) as file:
            content = decode_value(file.read())
    except (OSError, ProtocolError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}; give a file written by save_optimizer_states"
        ) from error
    states = content.get(FORMAT) if isinstance(content, dict) and len(content) == 1 else None
    if not isinstance(states, dict) or not all(map(_is_saved_state, states.values())):
        raise CheckpointError(f"{path} has no kvstore states; give a file written by save_optimizer_states")
    return states


def _is_saved_state(saved: object) -> bool:
    match saved:
        case {"state": dict(state), "options": dict(options)} if len(saved) == 2:  # type: ignore[arg-type]
            is_named = all(isinstance(name, str) for name in (*state, *options))
            return is_named and all(map(_is_plain, options.values()))
        case _:
            return False


def _plain_options(saved: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in saved["options"].items() if _is_plain(value)}


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str) or _is_pair(value)


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple | list) and all(isinstance(number, int | float) for number in value)


def _unsupported(name: str, part: object) -> CheckpointError:
    return CheckpointError(
        f"{name} is a {type(part).__name__}, which cannot be saved; convert it to numbers or a tensor"
    )
