"""A process's folder: logs that grow line by line, and the parts of cuts; what is in it survives the process.

coordinator.log          what the coordinator has decided
shard-0.log              what a server that keeps its shard alone has counted
shard-0.000002-57.log    the same, after cut 2 saved what 57 entries had made; then the log before it is not needed
cuts/000002/shard-0      a shard as of a cut; the cut is whole when the coordinator's log says so

A log that goes on after a cut is there, and empty, before the part of the cut is: it counts from the moment on at which
the part has its number of entries. So a server may die at any time between the two, and save the same cut again.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from counterpoint.errors import CheckpointError, PeerError
from counterpoint.server.holding import log_of
from counterpoint.server.log import pieces, read_log, read_whole
from counterpoint.server.states import ShardState

STATES = {"shardstate": ShardState}


Base: TypeAlias = tuple[int, int]
"""The cut after which a log goes on, and how many entries its shard had counted by then."""


def log_path(folder: Path, log: str, base: Base | None = None) -> Path:
    """Return where a log is, or the one that goes on after a cut."""
    return folder / (f"{log}.log" if base is None else f"{log}.{base[0]:06d}-{base[1]}.log")


def bases_of(folder: Path, log: str) -> list[Base]:
    """Return after which cuts the logs with this name go on, the newest first."""
    found = (path.name.split(".")[-2].split("-") for path in folder.glob(f"{log}.*-*.log"))
    return sorted(((int(cut), int(position)) for cut, position in found), reverse=True)


def part_path(folder: Path, cut: int, shard: int) -> Path:
    """Return where a shard's part of a cut is."""
    return folder / "cuts" / f"{cut:06d}" / f"shard-{shard}"


def recovered_log(folder: Path, log: str, base: Base | None = None) -> list[Any]:
    """Return the lines of a log that nobody writes to; what a crash has torn off its end is gone.

    Raises:
        CheckpointError: the log is damaged otherwise, or cannot be read.
    """
    path = log_path(folder, log, base)
    lines, size = lines_of(path)
    if path.exists() and size < path.stat().st_size:
        os.truncate(path, size)
    return lines


def recovered_shard(folder: Path, shard: int) -> tuple[ShardState | None, list[Any]]:
    """Return what a server that keeps a shard alone has on its disk: the shard as saved last, and what came then.

    Raises:
        CheckpointError: the log or the saved shard is damaged, or there is a log of a shard that is not there.
    """
    log = log_of(shard)
    for base in bases_of(folder, log):
        part, path = part_path(folder, base[0], shard), log_path(folder, log, base)
        state = read_state(part) if part.exists() else None
        if state is not None and state.position == base[1]:
            return state, recovered_log(folder, log, base)
        if path.stat().st_size:
            raise CheckpointError(
                f"{path} goes on after {base[1]} entries, but {part} is not the shard that they made; give back the "
                "file that was there, or go on from an earlier copy of the folder"
            )
        path.unlink()  # its server died before it had written the part
    return None, recovered_log(folder, log)


def lines_of(path: Path) -> tuple[list[Any], int]:
    """Return the whole lines of a log, to which somebody may be writing, and how many bytes they are.

    Raises:
        CheckpointError: the log is damaged, or cannot be read.
    """
    try:
        return read_log(path.read_bytes() if path.exists() else b"")
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}; look at the disk") from error


def write_durably(path: Path, value: object) -> None:
    """A file holds the value, and would survive a power cut; whatever was there is replaced in one step.

    Args:
        path: of the file; its folder is made if need be.
        value: see :func:`counterpoint.server.log.pieces`.
    """
    write_pieces(path, pieces(value))


def write_pieces(path: Path, flat: list[Tensor]) -> None:
    """A file holds these bytes, as :func:`write_durably` says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        write_all(fd, flat)
        os.fsync(fd)
    finally:
        os.close(fd)
    draft.replace(path)
    for folder in (path.parent, path.parent.parent):
        sync_folder(folder)


def write_all(fd: int, flat: list[Tensor]) -> None:
    """All the bytes are appended to the file."""
    for piece in flat:
        left = memoryview(piece.numpy())  # type: ignore[arg-type]
        while left:
            left = left[os.write(fd, left) :]


def sync_folder(folder: Path) -> None:
    """The names in a folder survive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_state(path: Path) -> ShardState:
    """Return the shard that a part of a cut is.

    Raises:
        CheckpointError: it is not there, or damaged.
    """
    try:
        with path.open("rb") as file:
            room = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        state: ShardState = read_whole(STATES, torch.frombuffer(room, dtype=torch.uint8))
    except (OSError, ValueError, PeerError) as error:
        raise CheckpointError(
            f"{path} is not a whole part of a cut: {error}; go on from an earlier cut, and look at the disk"
        ) from error
    return state


class Parts(Mapping[int, ShardState]):
    """The shards of a cut, each read when it is asked for.

    Args:
        folder: of the job.
        cut: which.
    """

    def __init__(self, folder: Path, cut: int) -> None:
        self._folder, self._cut = folder, cut

    def __getitem__(self, shard: int) -> ShardState:
        if shard not in set(self):
            raise KeyError(shard)
        return read_state(part_path(self._folder, self._cut, shard))

    def __iter__(self) -> Iterator[int]:
        found = part_path(self._folder, self._cut, 0).parent.glob("shard-*")
        return iter(sorted(int(path.name.removeprefix("shard-")) for path in found))

    def __len__(self) -> int:
        return len(list(iter(self)))
