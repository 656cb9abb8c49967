"""Read ranges of tensors from safetensors files that other programs have written, without reading the rest.

::

    file.safetensors       8 bytes, header (JSON): name -> dtype, shape, bytes    | tensors
    a folder               model.safetensors.index.json: name -> file, or else all of its *.safetensors

Headers are read when files are opened, and checked: each tensor lies inside its file and has the bytes of its shape.
Values are read with ``pread``, so that a process has in memory what it asks for. Nothing is unpickled.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from counterpoint.checkpoint.manifest import HEADER_MAX_BYTES
from counterpoint.checkpoint.reader import is_checkpoint
from counterpoint.checkpoint.tensor_slice import DTYPES, torch_dtype
from counterpoint.errors import CheckpointError
from counterpoint.file_reader import open_regular_file, read_regular_file
from counterpoint.json_reader import parse_json_file

INDEX_SUFFIX = ".index.json"
SUFFIX = ".safetensors"
NAMES = {safetensors_name: name for name, safetensors_name in DTYPES.items()}
"""The name in a safetensors header -> torch's name of the dtype."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor is stored.

    Args:
        path: of the file.
        dtype: of the tensor.
        shape: of the tensor.
        start: its first byte in the file.
    """

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


class WeightFiles:
    """Safetensors files that together have the weights of a model.

    Args:
        path: as the user gave it, for errors.
        tensors: where each tensor is stored.
    """

    def __init__(self, path: Path, tensors: Mapping[str, StoredTensor]) -> None:
        self.path, self.tensors = path, tensors

    @staticmethod
    def open(path: str | Path) -> WeightFiles:
        """Read the headers of a file, of the files of an index, or of those in a folder.

        Args:
            path: a ``.safetensors`` file, a ``.safetensors.index.json`` as transformers writes it, or a folder of
                either.

        Raises:
            CheckpointError: there are none, one cannot be read or is damaged, or an index and its files differ.
        """
        path = Path(path)
        index = find_index(path)
        if index is not None:
            return WeightFiles(path, _read_index(index))
        tensors: dict[str, StoredTensor] = {}
        for file in [path] if path.suffix == SUFFIX and not path.is_dir() else _list_files(path):
            for name, stored in read_header(file):
                if name in tensors:
                    raise CheckpointError(
                        f"{name} is in {tensors[name].path} and in {file}; give weights={str(file)!r}, or the "
                        f"*{INDEX_SUFFIX} that says which file is meant"
                    )
                tensors[name] = stored
        return WeightFiles(path, tensors)

    def read(self, name: str, first: int, values: Tensor) -> None:
        """Read a range of a tensor.

        Args:
            name: of the tensor.
            first: its first element, flattened.
            values: contiguous on the CPU, of the tensor's dtype; gets as many elements as it has.

        Raises:
            CheckpointError: the file cannot be read, or has become shorter.
        """
        if not values.numel():
            return
        stored = self.tensors[name]
        data = values.detach().reshape(-1).view(torch.uint8).numpy().data.cast("B")
        position, done = stored.start + first * values.element_size(), 0
        try:
            with open_regular_file(stored.path) as file:
                while done < len(data) and (count := os.preadv(file.fileno(), [data[done:]], position + done)):
                    done += count
        except OSError as error:
            raise CheckpointError(f"{stored.path} cannot be read: {error.strerror}") from error
        if done < len(data):
            raise CheckpointError(f"{stored.path} ended inside {name}; it was changed while it was read")


def find_index(path: Path) -> Path | None:
    """Return the index that a path is, or that its folder has; None if there is none."""
    if path.name.endswith(INDEX_SUFFIX):
        return path
    found = sorted(path.glob(f"*{SUFFIX}{INDEX_SUFFIX}")) if path.is_dir() else []
    if len(found) > 1:
        raise CheckpointError(f"{path} has several indices, {', '.join(one.name for one in found)}; give one of them")
    return next(iter(found), None)


def _list_files(path: Path) -> list[Path]:
    """Return the safetensors files of a folder.

    Raises:
        CheckpointError: there is no such folder, or it has none.
    """
    if is_checkpoint(path) or any(path.glob("step-*")):
        raise CheckpointError(
            f"{path} has checkpoints of Counterpoint; continue from them with resume=... or step.load(...), or write "
            "their weights with `counterpoint export FOLDER --format safetensors`"
        )
    found = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else []
    if not found:
        what = "is not a *.safetensors file" if path.is_file() else "has no *.safetensors file"
        raise CheckpointError(
            f"{path} {what if path.exists() else 'does not exist'}; give such a file, a *{SUFFIX}{INDEX_SUFFIX}, or a "
            "folder of either; .bin and .pt files are pickled, which is not read: convert them with safetensors"
        )
    return found


def _read_index(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of an index.

    Raises:
        CheckpointError: the file is not an index, or a file lacks a tensor.
    """
    try:
        content = parse_json_file(read_regular_file(path, max_bytes=HEADER_MAX_BYTES))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not an index: {error}") from error
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not all(
        isinstance(file, str) and Path(file).name == file for file in files.values()
    ):
        raise CheckpointError(f"{path} is not an index: it has no weight_map from names to files of its folder")
    headers = {file: dict(read_header(path.parent / file)) for file in sorted(set(files.values()))}
    for name, file in files.items():
        if name not in headers[file]:
            raise CheckpointError(f"{path} has {name} in {file}, which lacks it; write the index and its files again")
    return {name: headers[file][name] for name, file in files.items()}


def read_header(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the name of each tensor of a safetensors file, and where it is.

    Raises:
        CheckpointError: it cannot be read, or is not such a file.
    """
    try:
        with open_regular_file(path) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= min(num_bytes - 8, HEADER_MAX_BYTES):
                raise CheckpointError(f"{path} is not a safetensors file: it has no header; it may be incomplete")
            header = parse_json_file(file.read(length))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}") from error
    entries = header.items() if isinstance(header, dict) else ()
    for name, entry in entries:
        if name != "__metadata__":
            yield name, _parse_entry(path, name, entry, 8 + length, num_bytes)


def _parse_entry(path: Path, name: str, entry: Any, front: int, num_bytes: int) -> StoredTensor:  # noqa: ANN401 - JSON
    """Return where a tensor is.

    Args:
        path: of the file.
        name: of the tensor.
        entry: of the header.
        front: the bytes before the first tensor.
        num_bytes: of the file.

    Raises:
        CheckpointError: the entry is not that of a tensor, or is outside the file, or its dtype is not known.
    """
    flaw = CheckpointError(f"{path} is damaged: {name} has no dtype, shape and bytes inside the file")
    if not isinstance(entry, dict):
        raise flaw
    shape, offsets, dtype = entry.get("shape"), entry.get("data_offsets"), entry.get("dtype")
    if not (_are_counts(shape) and _are_counts(offsets) and len(offsets) == 2):
        raise flaw
    if dtype not in NAMES:
        raise CheckpointError(f"{path} has {name} in {dtype!r}; known are {', '.join(NAMES)}: convert it to one")
    start, stop = offsets
    size = math.prod(shape) * torch_dtype(NAMES[dtype]).itemsize
    if stop - start != size or front + stop > num_bytes:
        raise flaw
    return StoredTensor(path, torch_dtype(NAMES[dtype]), tuple(shape), front + start)


def _are_counts(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
