"""A process's folder: logs that grow line by line, and the parts of cuts; what is in it survives the process.

coordinator.log          what the coordinator has decided
shard-0.log              what a server that keeps its shard alone has counted
shard-0.000002-57.log    the same, after cut 2 saved what 57 entries had made; then the log before it is not needed
cuts/000002/shard-0      a shard as of a cut; the cut is whole when the coordinator's log says so

A log that goes on after a cut is there, and empty, before the part of the cut is: it counts from the moment on at which
the part has its number of entries. So a server may die at any time between the two, and save the same cut again.

Going on from a cut after everybody has died: the coordinator's log ends with it, and nobody belongs to the job.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from counterpoint.errors import CheckpointError, PeerError
from counterpoint.ps.coordinator import COORDINATOR_LOG
from counterpoint.ps.coordinator_state import CoordinatorState
from counterpoint.ps.job_config import JobConfig
from counterpoint.ps.messages import ShardState
from counterpoint.ps.replication import shard_log_name
from counterpoint.ps.write_ahead_log import CoordinatorRecord, JobResumed, decode_log, decode_one, encode_chunks

SNAPSHOT_TYPES = {"shardstate": ShardState}


SegmentBase: TypeAlias = tuple[int, int]
"""The cut after which a log goes on, and how many entries its shard had counted by then."""


def log_path(folder: Path, log: str, base: SegmentBase | None = None) -> Path:
    """Return where a log is, or the one that goes on after a cut."""
    return folder / (f"{log}.log" if base is None else f"{log}.{base[0]:06d}-{base[1]}.log")


def log_segments(folder: Path, log: str) -> list[SegmentBase]:
    """Return after which cuts the logs with this name go on, the newest first."""
    found = (path.name.split(".")[-2].split("-") for path in folder.glob(f"{log}.*-*.log"))
    return sorted(((int(cut), int(position)) for cut, position in found), reverse=True)


def snapshot_path(folder: Path, snapshot: int, shard: int) -> Path:
    """Return where a shard's part of a cut is."""
    return folder / "cuts" / f"{snapshot:06d}" / f"shard-{shard}"


def recover_log(folder: Path, log: str, base: SegmentBase | None = None) -> list[Any]:
    """Return the lines of a log that nobody writes to; what a crash has torn off its end is gone.

    Raises:
        CheckpointError: the log is damaged otherwise, or cannot be read.
    """
    path = log_path(folder, log, base)
    lines, size = read_records(path)
    if path.exists() and size < path.stat().st_size:
        os.truncate(path, size)
    return lines


def recover_shard(folder: Path, shard: int) -> tuple[ShardState | None, list[Any]]:
    """Return what a server that keeps a shard alone has on its disk: the shard as saved last, and what came then.

    Raises:
        CheckpointError: the log or the saved shard is damaged, or there is a log of a shard that is not there.
    """
    log = shard_log_name(shard)
    for base in log_segments(folder, log):
        part, path = snapshot_path(folder, base[0], shard), log_path(folder, log, base)
        state = read_shard_state(part) if part.exists() else None
        if state is not None and state.position == base[1]:
            return state, recover_log(folder, log, base)
        if path.stat().st_size:
            raise CheckpointError(
                f"{path} goes on after {base[1]} entries, but {part} is not the shard that they made; give back the "
                "file that was there, or go on from an earlier copy of the folder"
            )
        path.unlink()  # its server died before it had written the part
    return None, recover_log(folder, log)


def read_records(path: Path) -> tuple[list[Any], int]:
    """Return the whole lines of a log, to which somebody may be writing, and how many bytes they are.

    Raises:
        CheckpointError: the log is damaged, or cannot be read.
    """
    try:
        return decode_log(path.read_bytes() if path.exists() else b"")
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}; look at the disk") from error


def write_durably(path: Path, value: object) -> None:
    """A file holds the value, and would survive a power cut; whatever was there is replaced in one step.

    Args:
        path: of the file; its folder is made if need be.
        value: see :func:`counterpoint.ps.write_ahead_log.pieces`.
    """
    write_chunks(path, encode_chunks(value))


def write_chunks(path: Path, chunks: list[Tensor]) -> None:
    """A file holds these bytes, as :func:`write_durably` says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        write_all(fd, chunks)
        os.fsync(fd)
    finally:
        os.close(fd)
    draft.replace(path)
    for folder in (path.parent, path.parent.parent):
        sync_folder(folder)


def write_all(fd: int, chunks: list[Tensor]) -> None:
    """All the bytes are appended to the file."""
    for piece in chunks:
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


def read_shard_state(path: Path) -> ShardState:
    """Return the shard that a part of a cut is.

    Raises:
        CheckpointError: it is not there, or damaged.
    """
    try:
        with path.open("rb") as file:
            room = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        state: ShardState = decode_one(SNAPSHOT_TYPES, torch.frombuffer(room, dtype=torch.uint8))
    except (OSError, ValueError, PeerError) as error:
        raise CheckpointError(
            f"{path} is not a whole part of a cut: {error}; go on from an earlier cut, and look at the disk"
        ) from error
    return state


class SnapshotShards(Mapping[int, ShardState]):
    """The shards of a cut, each read when it is asked for.

    Args:
        folder: of the job.
        cut: which.
    """

    def __init__(self, folder: Path, snapshot: int) -> None:
        self._folder, self._snapshot = folder, snapshot

    def __getitem__(self, shard: int) -> ShardState:
        if shard not in set(self):
            raise KeyError(shard)
        return read_shard_state(snapshot_path(self._folder, self._snapshot, shard))

    def __iter__(self) -> Iterator[int]:
        found = snapshot_path(self._folder, self._snapshot, 0).parent.glob("shard-*")
        return iter(sorted(int(path.name.removeprefix("shard-")) for path in found))

    def __len__(self) -> int:
        return len(list(iter(self)))


def resume(folder: Path, job: JobConfig) -> int | None:
    """The job can be started from this folder again; returns the cut that it goes on from.

    A server that keeps its shard alone and writes everything down has lost nothing, and goes on from where it was:
    then None is returned. Otherwise everything after the last whole cut is forgotten, tasks included.

    Args:
        folder: of the job, in which nobody works any more.
        job: as it was.

    Raises:
        CheckpointError: there is no whole cut, or a part of it is damaged.
    """
    if job.num_servers == 1 and job.is_logged:
        return None
    lines = recover_log(folder, COORDINATOR_LOG)
    book, ends = _replay_coordinator_log(job, lines)
    if not ends:
        raise CheckpointError(
            f"there is no whole cut in {folder}, and what servers knew died with them; begin anew in an empty folder, "
            "and let a worker ask for checkpoints"
        )
    cut = len(ends) - 1  # they are numbered from 0 in their order
    for shard in range(job.num_shards):
        read_shard_state(snapshot_path(folder, cut, shard))
    kept = [*lines[: ends[-1]], JobResumed(cut, book.generation, book.incarnation)]
    write_chunks(log_path(folder, COORDINATOR_LOG), [piece for line in kept for piece in encode_chunks(line)])
    return cut


def complete_snapshots(folder: Path, job: JobConfig) -> list[int]:
    """Return the cuts in the folder of a job that are whole, oldest first; the job may be at work."""
    lines, _ = read_records(log_path(folder, COORDINATOR_LOG))
    return list(range(len(_replay_coordinator_log(job, lines)[1])))


def _replay_coordinator_log(job: JobConfig, lines: Sequence[CoordinatorRecord]) -> tuple[CoordinatorState, list[int]]:
    """Return the book after all lines, and after how many each cut was whole."""
    book, ends = CoordinatorState(job), list[int]()
    for end, line in enumerate(lines, 1):
        book.apply(line)
        if len(book.snapshots) > len(ends):
            ends.append(end)
    return book, ends
