"""Saves without waiting: every rank adds its part to a shared draft, and the last one commits.

The draft is one folder for all ranks of a run, named by the step and the run. A part is a shard and, written after it,
a file that describes it; a draft is complete when every rank's description is there. The rank that finds it complete
claims it by renaming it, which only one rank can do, and commits it as any other save. A complete draft of a dead run
becomes a checkpoint later: see ``recover_drafts``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

from pydantic import JsonValue

from counterpoint.checkpoint.draft import CheckpointDraft, commit, lock_draft, publish
from counterpoint.checkpoint.file_ops import LOCAL_FILES, FileOps, unreadable, write_failure, write_file
from counterpoint.checkpoint.folders import (
    is_part,
    list_drafts,
    make_root,
    parse_step,
    part_name,
    remove_dead_drafts,
    step_name,
    try_lock,
)
from counterpoint.checkpoint.manifest import MANIFEST, MANIFEST_MAX_BYTES, ShardRecord, find_json_flaw, parse_manifest
from counterpoint.checkpoint.shard import write_shard
from counterpoint.checkpoint.tensor_slice import TensorSlice
from counterpoint.errors import CheckpointError
from counterpoint.file_reader import read_regular_file
from counterpoint.json_reader import parse_json_file
from counterpoint.terminal_text import warn


@dataclass(frozen=True, slots=True)
class RankPart:
    """The part of one rank in a draft.

    Args:
        num_ranks: number of ranks that add a part.
        record: of its shard.
        state: its part of the non-tensor state.
    """

    num_ranks: int
    record: ShardRecord
    state: Mapping[str, JsonValue]


def join_draft(root: Path, step: int, run: str, *, files: FileOps = LOCAL_FILES) -> CheckpointDraft:
    """Open the draft of a run's step, which the first rank creates, and lock it for this rank.

    Args:
        root: the folder of all checkpoints of a run; created if missing.
        step: the step that is being saved.
        run: hexadecimal digits, the same on all ranks of this run and different in other runs.
        files: file operations; tests pass failing ones.

    Raises:
        CheckpointError: ``root`` cannot be written.
    """
    folder = root / f"{step_name(step)}.tmp-{run}"
    try:
        make_root(files, root)
        return lock_draft(files, step, lambda: folder)
    except OSError as error:
        raise write_failure(files, folder, 0, error) from error


def add_part(
    draft: CheckpointDraft,
    rank_of: tuple[int, int],
    slices: Sequence[TensorSlice],
    state: Mapping[str, object],
    *,
    files: FileOps = LOCAL_FILES,
) -> None:
    """Add this rank's part to the draft, durably.

    Args:
        draft: from ``join_draft``.
        rank_of: this rank, and the number of ranks that add a part.
        slices: tensor slices of this rank; every element is in exactly one slice of one rank.
        state: its part of the non-tensor state, as JSON.
        files: file operations; tests pass failing ones.

    Raises:
        CheckpointError: a slice cannot be saved, or the disk is full or failed; committed checkpoints are unchanged.
    """
    rank, num_ranks = rank_of
    flaw = find_json_flaw(dict(state))
    if flaw is not None:
        raise CheckpointError(f"{flaw}; the state of a checkpoint is plain JSON: save tensors as tensors")
    record = write_shard(draft.folder, rank, slices, files=files)
    content = {"num_ranks": num_ranks, "record": record.to_json(), "state": dict(state)}
    path = draft.folder / part_name(rank)
    temporary, data = path.with_suffix(".new"), json.dumps(content, allow_nan=False).encode()
    try:
        write_file(files, temporary, data)
        files.rename(temporary, path)  # an incomplete file never has the final name
        with suppress(FileNotFoundError):  # it has been claimed: the committing rank syncs it
            files.sync_folder(draft.folder)
    except OSError as error:
        raise write_failure(files, path, len(data), error) from error


def commit_if_complete(draft: CheckpointDraft, *, keep: int | None = None, files: FileOps = LOCAL_FILES) -> Path | None:
    """Commit the draft if this rank's part was the last one.

    Args:
        draft: from ``join_draft``, with this rank's part.
        keep: number of checkpoints to keep, including this one; None keeps all.
        files: file operations; tests pass failing ones.

    Returns:
        The checkpoint's folder; None while parts are missing, or if another rank commits.

    Raises:
        CheckpointError: as ``commit``.
    """
    if read_parts(draft.folder) is None:
        return None
    claimed = draft.folder.with_name(f"{draft.folder.name}{token_hex(4)}")
    try:
        files.rename(draft.folder, claimed)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise write_failure(files, draft.folder, 0, error) from error
    draft.folder = claimed
    return _commit_parts(draft, keep, files)


def is_pending(draft: CheckpointDraft) -> bool:
    """Tell whether a draft still waits for parts or for its commit."""
    return any(draft.folder.parent.glob(f"{draft.folder.name}*"))


def recover_drafts(root: Path, *, files: FileOps = LOCAL_FILES) -> list[Path]:
    """Commit the complete drafts of dead runs; warn of those that cannot be committed, and keep them.

    Returns:
        The folders of the new checkpoints.
    """
    recovered = []
    try:
        drafts = list_drafts(root)
    except OSError as error:
        raise unreadable(root, error) from error
    for folder in drafts:
        lock = try_lock(folder, exclusive=True)
        if lock is None:
            continue
        draft = CheckpointDraft(folder, parse_step(folder), lock, files)
        try:
            path = _commit_dead_draft(draft, files)
            recovered += [path] if path is not None else []
        except (CheckpointError, OSError) as error:
            warn(f"{folder.name} cannot be committed: {error}", RuntimeWarning, stacklevel=2)
        finally:
            draft.release()
    return recovered


def cleanup_drafts(root: Path, *, files: FileOps = LOCAL_FILES) -> None:
    """Commit the complete drafts of dead runs, and remove their other drafts."""
    recover_drafts(root, files=files)
    remove_dead_drafts(files, root)


def read_parts(folder: Path) -> list[RankPart] | None:
    """Return the parts of all ranks; None if one is missing, or the folder."""
    try:
        parts = [_read_part(path) for path in sorted(folder.iterdir()) if is_part(path)]
    except FileNotFoundError:
        return None
    ranks = [part.record.rank for part in parts]
    is_complete = len(parts) == parts[0].num_ranks if parts else False
    return parts if is_complete and sorted(ranks) == list(range(len(parts))) else None


def _read_part(path: Path) -> RankPart:
    name = f"{path.parent.name}/{path.name}"
    try:
        content = parse_json_file(read_regular_file(path, max_bytes=MANIFEST_MAX_BYTES, links="refused"))
    except FileNotFoundError:
        raise  # its folder has been claimed
    except OSError as error:
        raise CheckpointError(f"{name} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{name} is damaged: {error}") from error
    match content:
        case {"num_ranks": int(num_ranks), "record": str(record), "state": dict(state)}:
            return RankPart(num_ranks, ShardRecord.from_json(record), state)
        case _:
            raise CheckpointError(f"{name} is damaged: it is not a description of a part")


def _commit_parts(draft: CheckpointDraft, keep: int | None, files: FileOps) -> Path:
    parts = read_parts(draft.folder)
    assert parts is not None, "only a complete draft is claimed"
    state: dict[str, JsonValue] = {}
    for part in parts:
        for key, value in part.state.items():
            merged = state.get(key)
            state[key] = {**merged, **value} if isinstance(merged, dict) and isinstance(value, dict) else value
    return commit(draft, [part.record for part in parts], state=state, keep=keep, files=files)


def _commit_dead_draft(draft: CheckpointDraft, files: FileOps) -> Path | None:
    """Commit the draft of a run that died at any point; return None if parts are missing."""
    path = draft.folder / MANIFEST
    try:
        manifest = parse_manifest(path)
    except CheckpointError:  # missing or incomplete
        if read_parts(draft.folder) is None:
            return None
        if os.path.lexists(path):
            files.unlink(path)
        return _commit_parts(draft, None, files)
    return publish(draft, manifest, keep=None, files=files)
