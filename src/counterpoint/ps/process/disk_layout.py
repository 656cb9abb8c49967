"""Files of a process: write-ahead logs and snapshots, and how a job restarts from them.

Layout of a folder::

    coordinator.log          decisions of the coordinator
    shard-0.log              changes of a shard without a backup
    shard-0.000002-57.log    the same, after snapshot 2 saved the state of 57 entries; the log before it is obsolete
    snapshots/000002/shard-0 a shard in snapshot 2; the snapshot is complete when the coordinator's log says so

The log segment that follows a snapshot is created, empty, before the snapshot of the shard is written. It is in use
from the moment at which the snapshot with its number of entries exists, so a server may die between the two steps.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from counterpoint.errors import CheckpointError, PeerError
from counterpoint.file_reader import open_regular_file
from counterpoint.ps.coordinator import COORDINATOR_LOG
from counterpoint.ps.coordinator_state import CoordinatorState
from counterpoint.ps.job_config import JobConfig
from counterpoint.ps.messages import ShardState
from counterpoint.ps.replication import shard_log_name
from counterpoint.ps.write_ahead_log import CoordinatorRecord, JobResumed, decode_log, decode_one, encode_chunks

SNAPSHOT_TYPES = {"shardstate": ShardState}
_SEGMENT = re.compile(r"\.([0-9]{6,18})-([0-9]{1,18})\.log")
_SHARD = re.compile(r"shard-([0-9]{1,18})")


SegmentBase: TypeAlias = tuple[int, int]
"""The snapshot that a log segment follows, and the number of entries that it contains."""


def log_path(folder: Path, log: str, base: SegmentBase | None = None) -> Path:
    """Return the path of a log, or of its segment that follows a snapshot."""
    return folder / (f"{log}.log" if base is None else f"{log}.{base[0]:06d}-{base[1]}.log")


def log_segments(folder: Path, log: str) -> list[SegmentBase]:
    """Return the snapshots that segments of this log follow, newest first."""
    matches = (_SEGMENT.fullmatch(path.name.removeprefix(log)) for path in folder.glob(f"{log}.*-*.log"))
    return sorted(((int(match[1]), int(match[2])) for match in matches if match), reverse=True)


def snapshot_path(folder: Path, snapshot: int, shard: int) -> Path:
    """Return the path of a shard in a snapshot."""
    return folder / "snapshots" / f"{snapshot:06d}" / f"shard-{shard}"


def recover_log(folder: Path, log: str, base: SegmentBase | None = None) -> list[Any]:
    """Return the records of a log that is not in use; truncate a record torn by a crash.

    Raises:
        CheckpointError: the log is damaged otherwise, or cannot be read.
    """
    path = log_path(folder, log, base)
    records, size = read_records(path)
    if path.exists() and size < path.stat().st_size:
        os.truncate(path, size)
    return records


def recover_shard(folder: Path, shard: int) -> tuple[ShardState | None, list[Any]]:
    """Return the last saved state of a shard without a backup, and the log records after it.

    Raises:
        CheckpointError: the log or the saved state is damaged or missing.
    """
    log = shard_log_name(shard)
    for base in log_segments(folder, log):
        part, path = snapshot_path(folder, base[0], shard), log_path(folder, log, base)
        state = read_shard_state(part) if part.exists() else None
        if state is not None and state.position == base[1]:
            return state, recover_log(folder, log, base)
        if path.stat().st_size:
            raise CheckpointError(
                f"{path} continues after {base[1]} entries, but {part} is not a snapshot of them; restore that file, "
                "or restart from an earlier copy of the folder"
            )
        path.unlink()  # its server died before it had written the part
    return None, recover_log(folder, log)


def read_records(path: Path) -> tuple[list[Any], int]:
    """Return the complete records of a log, which may be in use, and their length in bytes.

    Raises:
        CheckpointError: the log is damaged, or cannot be read.
    """
    try:
        with open_regular_file(path, links="refused") as file:
            return decode_log(file.read())
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}; check the disk") from error


def write_chunks(path: Path, chunks: list[Tensor]) -> None:
    """Write these bytes to a file, durably, replacing the file atomically; create its folder if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        write_all(fd, chunks)
        os.fsync(fd)
    finally:
        os.close(fd)
    draft.replace(path)
    for folder in (path.parent, path.parent.parent):
        sync_folder(folder)


def write_all(fd: int, chunks: list[Tensor]) -> None:
    """Append all the bytes to a file descriptor."""
    for chunk in chunks:
        remaining = memoryview(chunk.numpy())  # type: ignore[arg-type]
        while remaining:
            remaining = remaining[os.write(fd, remaining) :]


def sync_folder(folder: Path) -> None:
    """Make the directory entries of a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_shard_state(path: Path) -> ShardState:
    """Return the state of a shard in a snapshot.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    try:
        with open_regular_file(path, links="refused") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        state: ShardState = decode_one(SNAPSHOT_TYPES, torch.frombuffer(mapping, dtype=torch.uint8))
    except (OSError, ValueError, PeerError) as error:
        raise CheckpointError(
            f"{path} is not a complete shard snapshot: {error}; restart from an earlier snapshot, and check the disk"
        ) from error
    return state


class SnapshotShards(Mapping[int, ShardState]):
    """The shards of a snapshot, each read when it is accessed.

    Args:
        folder: of the job.
        snapshot: its number.
    """

    def __init__(self, folder: Path, snapshot: int) -> None:
        self._folder, self._snapshot = folder, snapshot

    def __getitem__(self, shard: int) -> ShardState:
        if shard not in set(self):
            raise KeyError(shard)
        return read_shard_state(snapshot_path(self._folder, self._snapshot, shard))

    def __iter__(self) -> Iterator[int]:
        paths = snapshot_path(self._folder, self._snapshot, 0).parent.glob("shard-*")
        return iter(sorted(int(match[1]) for path in paths if (match := _SHARD.fullmatch(path.name))))

    def __len__(self) -> int:
        return len(list(iter(self)))


def resume(folder: Path, job: JobConfig) -> int | None:
    """Prepare the folder of a stopped job for a restart; return the snapshot that it restarts from.

    A server without a backup that keeps a log has lost nothing and continues from it: then None is returned. Otherwise
    everything after the last complete snapshot is discarded, tasks included.

    Args:
        folder: of the job, not in use.
        job: configuration, unchanged.

    Raises:
        CheckpointError: there is no complete snapshot, or it is damaged.
    """
    if job.num_servers == 1 and job.is_logged:
        return None
    records = recover_log(folder, COORDINATOR_LOG)
    state, ends = _replay_coordinator_log(job, records)
    if not ends:
        raise CheckpointError(
            f"there is no complete snapshot in {folder}, and the servers' memory is lost; start again in an empty "
            "folder, and let a worker request checkpoints"
        )
    snapshot = len(ends) - 1  # snapshots are numbered from 0
    for shard in range(job.num_shards):
        read_shard_state(snapshot_path(folder, snapshot, shard))
    remaining = [*records[: ends[-1]], JobResumed(snapshot, state.generation, state.incarnation)]
    write_chunks(log_path(folder, COORDINATOR_LOG), [chunk for record in remaining for chunk in encode_chunks(record)])
    return snapshot


def complete_snapshots(folder: Path, job: JobConfig) -> list[int]:
    """Return the complete snapshots of a job, oldest first; the job may be running."""
    records, _ = read_records(log_path(folder, COORDINATOR_LOG))
    return list(range(len(_replay_coordinator_log(job, records)[1])))


def _replay_coordinator_log(job: JobConfig, records: Sequence[CoordinatorRecord]) -> tuple[CoordinatorState, list[int]]:
    """Return the state after all records, and after how many records each snapshot was complete."""
    state, ends = CoordinatorState(job), list[int]()
    for end, record in enumerate(records, 1):
        state.apply(record)
        if len(state.snapshots) > len(ends):
            ends.append(end)
    return state, ends
