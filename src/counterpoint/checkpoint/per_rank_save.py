"""A save that nobody waits for: every rank adds its part when it has come there, and whoever is last commits.

The draft is one folder for all ranks of a run, named by the step and the run. A part is a shard and, written behind it,
a file that says what is in it; a draft is whole when every rank has such a file there. The rank that finds it whole
claims it by renaming it, which only one can do, and commits it as any other save. A draft that a dead run left whole is
a checkpoint all the same: see ``rescue``.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

from pydantic import JsonValue

from counterpoint.checkpoint.draft import CheckpointDraft, commit, publish
from counterpoint.checkpoint.file_ops import LOCAL_FILES, FileOps, write_failure, write_file
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
from counterpoint.checkpoint.manifest import MANIFEST, ShardRecord, find_json_flaw, parse_manifest
from counterpoint.checkpoint.shard import write_shard
from counterpoint.checkpoint.tensor_slice import TensorSlice
from counterpoint.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class RankPart:
    """What one rank has added to a draft.

    Args:
        num_ranks: how many ranks add a part.
        record: of its shard.
        state: its share of everything that is not a tensor.
    """

    num_ranks: int
    record: ShardRecord
    state: Mapping[str, JsonValue]


def join_draft(root: Path, step: int, run: str, *, files: FileOps = LOCAL_FILES) -> CheckpointDraft:
    """The draft of a run's step stands in ``root``, made by the rank that comes first; this rank's lock is on it.

    Args:
        root: the folder of all checkpoints of a run; made if it is not there.
        step: the step that is being saved.
        run: some hexadecimal digits that all ranks of this run have, and no other run.
        files: the file operations; tests pass some that fail.

    Raises:
        CheckpointError: ``root`` cannot be written.
    """
    folder = root / f"{step_name(step)}.tmp-{run}"
    try:
        make_root(files, root)
        while True:
            with suppress(FileExistsError):
                files.make_folder(folder)
            lock = try_lock(folder, exclusive=False)
            if lock is not None:  # else another run has swept the folder before it was locked
                return CheckpointDraft(folder, step, lock, files)
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
    """What this rank holds is in the draft, durable, and counts from now on.

    Args:
        draft: from ``join``.
        place_of: this rank, and how many ranks add a part.
        pieces: what this rank holds; over all ranks every element exactly once.
        state: its share of everything that is not a tensor, as JSON.
        files: the file operations; tests pass some that fail.

    Raises:
        CheckpointError: a piece cannot be saved, or the disk is full or failed; nothing committed is touched.
    """
    rank, num_ranks = rank_of
    flaw = find_json_flaw(dict(state))
    if flaw is not None:
        raise CheckpointError(f"{flaw}; a checkpoint's state is plain JSON: tensors go among the tensors")
    record = write_shard(draft.folder, rank, slices, files=files)
    content = {"num_ranks": num_ranks, "record": record.to_json(), "state": dict(state)}
    path = draft.folder / part_name(rank)
    fresh, data = path.with_suffix(".new"), json.dumps(content, allow_nan=False).encode()
    try:
        write_file(files, fresh, data)
        files.rename(fresh, path)  # never half a part under the name of a whole one
        with suppress(FileNotFoundError):  # it has been claimed: whoever commits it syncs it
            files.sync_folder(draft.folder)
    except OSError as error:
        raise write_failure(files, path, len(data), error) from error


def commit_if_complete(draft: CheckpointDraft, *, keep: int | None = None, files: FileOps = LOCAL_FILES) -> Path | None:
    """The draft is the checkpoint of its step, if this rank's part was the last one.

    Args:
        draft: from ``join``, with this rank's part.
        keep: how many checkpoints stay, this one included; None keeps all.
        files: the file operations; tests pass some that fail.

    Returns:
        The checkpoint's folder; None while parts are missing, and where another rank commits.

    Raises:
        CheckpointError: as ``commit`` does.
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
    """Tell whether a draft still waits for parts, or for the rank that commits it."""
    return any(draft.folder.parent.glob(f"{draft.folder.name}*"))


def recover_drafts(root: Path, *, files: FileOps = LOCAL_FILES) -> list[Path]:
    """The drafts that dead runs left whole are checkpoints; what cannot be one is told in a warning, and stays a draft.

    Returns:
        The folders of these checkpoints.
    """
    found = []
    for folder in list_drafts(root):
        lock = try_lock(folder, exclusive=True)
        if lock is None:
            continue
        draft = CheckpointDraft(folder, parse_step(folder), lock, files)
        try:
            path = _commit_dead_draft(draft, files)
            found += [path] if path is not None else []
        except (CheckpointError, OSError) as error:
            warnings.warn(f"{folder.name} is no checkpoint: {error}", RuntimeWarning, stacklevel=2)
        finally:
            draft.release()
    return found


def cleanup_drafts(root: Path, *, files: FileOps = LOCAL_FILES) -> None:
    """The drafts that dead runs left whole are checkpoints, and their other drafts are gone."""
    recover_drafts(root, files=files)
    remove_dead_drafts(files, root)


def read_parts(folder: Path) -> list[RankPart] | None:
    """Return the parts of all ranks; None where one is missing, or the folder."""
    try:
        parts = [_read_part(path) for path in sorted(folder.iterdir()) if is_part(path)]
    except FileNotFoundError:
        return None
    ranks = [part.record.rank for part in parts]
    return parts if parts and sorted(ranks) == list(range(parts[0].num_ranks)) else None


def _read_part(path: Path) -> RankPart:
    try:
        content = json.loads(path.read_bytes())
        return RankPart(int(content["num_ranks"]), ShardRecord.from_json(content["record"]), dict(content["state"]))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path.parent.name}/{path.name} is damaged: {error}") from error


def _commit_parts(draft: CheckpointDraft, keep: int | None, files: FileOps) -> Path:
    parts = read_parts(draft.folder)
    assert parts is not None, "they are what it was claimed for"
    state: dict[str, JsonValue] = {}
    for part in parts:
        for key, value in part.state.items():
            known = state.get(key)
            state[key] = {**known, **value} if isinstance(known, dict) and isinstance(value, dict) else value
    return commit(draft, [part.record for part in parts], state=state, keep=keep, files=files)


def _commit_dead_draft(draft: CheckpointDraft, files: FileOps) -> Path | None:
    """Commit a draft at whatever point its run has died; None where parts are missing."""
    path = draft.folder / MANIFEST
    try:
        manifest = parse_manifest(path)
    except CheckpointError:  # there is none yet, or half of one
        if read_parts(draft.folder) is None:
            return None
        if os.path.lexists(path):
            files.unlink(path)
        return _commit_parts(draft, None, files)
    return publish(draft, manifest, keep=None, files=files)
