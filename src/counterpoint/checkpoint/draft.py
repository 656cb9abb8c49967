"""A save: shards are written to a draft folder, the manifest last; a rename publishes it, then old ones are removed."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import cast

import torch
from pydantic import JsonValue
from torch import Tensor

from counterpoint.checkpoint.file_ops import LOCAL_FILES, FileOps, check_space, remove_tree, write_failure, write_file
from counterpoint.checkpoint.folders import is_part, make_root, prune, remove_dead_drafts, step_name, try_lock
from counterpoint.checkpoint.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    CheckpointManifest,
    ShardRecord,
    check_model_saved,
    check_records,
    find_json_flaw,
    format_manifest,
    parse_manifest,
)
from counterpoint.checkpoint.shard import find_shard_flaws, find_size_flaw, write_shard
from counterpoint.checkpoint.tensor_slice import whole_tensor
from counterpoint.errors import CheckpointError, CheckpointWriteError
from counterpoint.file_reader import find_file_kind
from counterpoint.terminal_text import warn

DRAFT_LOCK_S = 5.0
DRAFT_POLL_S = 0.01


class CheckpointDraft:
    """A save in progress: a folder that readers ignore, locked so that no other run removes it.

    As a context manager it removes the folder on exit unless it was committed. It owns the lock, and is therefore
    mutable.
    """

    def __init__(self, folder: Path, step: int, lock: int, files: FileOps) -> None:
        self.folder = folder
        self.step = step
        self._lock: int | None = lock
        self._files = files

    def __enter__(self) -> CheckpointDraft:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()

    def discard(self) -> None:
        """Remove the draft's folder, unless it was committed, and release the lock."""
        if self._lock is None:
            return
        try:
            if self.folder.is_dir():
                with suppress(OSError):  # an exception may be active already; the next save removes the rest
                    remove_tree(self._files, self.folder)
        finally:
            self.release()

    def release(self) -> None:
        """Release the lock; a folder that is still a draft may be removed by the next save."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def begin(root: Path, step: int, *, needed_bytes: int = 0, files: FileOps = LOCAL_FILES) -> CheckpointDraft:
    """Create a draft folder in ``root``, and remove the drafts of dead runs. One rank calls this.

    Args:
        root: the folder of all checkpoints of a run; created if missing.
        step: the step that is being saved.
        needed_bytes: size of the checkpoint over all ranks, if known, for which there must be space.
        files: file operations; tests pass failing ones.

    Raises:
        CheckpointError: ``root`` is a file, cannot be written, or has not enough space.
    """
    root = Path(root)
    try:
        if find_file_kind(root) == "file":
            raise CheckpointError(f"{root} is a file, but checkpoints need a folder; choose another path")
        make_root(files, root)
        remove_dead_drafts(files, root)
        check_space(files, root, needed_bytes)
        return lock_draft(files, step, lambda: root / f"{step_name(step)}.tmp-{secrets.token_hex(4)}")
    except OSError as error:
        raise write_failure(files, root, needed_bytes, error) from error


def lock_draft(files: FileOps, step: int, make_name: Callable[[], Path]) -> CheckpointDraft:
    """Create a draft folder, unless another rank has created it, and lock it for this rank.

    Args:
        files: file operations.
        step: the step that is being saved.
        make_name: returns the name of the folder at each attempt; another run may have removed it before it was locked.

    Raises:
        CheckpointWriteError: another process keeps it locked; every process that can open a folder can lock it.
        OSError: it cannot be created.
    """
    end_s = time.monotonic() + DRAFT_LOCK_S
    while True:
        folder = make_name()
        with suppress(FileExistsError):
            files.make_folder(folder)
        lock = try_lock(folder, exclusive=False)
        if lock is not None:
            return CheckpointDraft(folder, step, lock, files)
        if time.monotonic() >= end_s:
            raise CheckpointWriteError(
                f"{folder} has been locked for {DRAFT_LOCK_S:.0f} s by a process that does not belong to this run; "
                "nothing was saved and earlier checkpoints are untouched: deny other users access "
                f"to the folder (chmod 700 {folder.parent}), or end that process"
            )
        time.sleep(DRAFT_POLL_S)


def commit(
    draft: CheckpointDraft,
    records: Sequence[ShardRecord],
    *,
    state: Mapping[str, object],
    model: Mapping[str, str] | None = None,
    keep: int | None = None,
    files: FileOps = LOCAL_FILES,
) -> Path:
    """Make the draft the checkpoint of its step, durably. One rank calls this.

    Args:
        draft: from ``begin``.
        records: from ``write_shard``, one per rank with a shard.
        state: the non-tensor state, as JSON.
        model: ``fingerprint(model.state_dict())``, to detect another model on loading.
        keep: number of checkpoints to keep, including this one; None keeps all.
        files: file operations; tests pass failing ones.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: the slices do not cover the tensors, the state is not JSON, the disk failed, or
            another checkpoint of this step exists. Earlier checkpoints are unchanged.
    """
    if keep is not None and keep < 1:
        raise CheckpointError(
            f"keep={keep} would delete the checkpoint that is being saved; keep at least 1, or None for all"
        )
    manifest = _build_manifest(draft.step, records, state, model)
    try:
        _check_draft(draft.folder, manifest, files)
    except OSError as error:
        raise write_failure(files, draft.folder, len(format_manifest(manifest)), error) from error
    return publish(draft, manifest, keep=keep, files=files)


def publish(draft: CheckpointDraft, manifest: CheckpointManifest, *, keep: int | None, files: FileOps) -> Path:
    """Rename a draft with a manifest to the checkpoint of its step, and remove the part descriptions in it.

    Raises:
        CheckpointError: the disk failed, or another checkpoint of this step exists.
    """
    root, target = draft.folder.parent, draft.folder.parent / step_name(draft.step)
    try:
        _remove_parts(draft.folder, files)
        if _is_already_saved(files, target, manifest):
            draft.discard()
            return target
        files.rename(draft.folder, target)
        files.sync_folder(root)
    except OSError as error:
        raise write_failure(files, draft.folder, len(format_manifest(manifest)), error) from error
    draft.release()
    if keep is not None:
        prune(files, root, draft.step, keep, manifest.state.get("run_id"))
    return target


def save(
    root: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, object],
    *,
    model: Mapping[str, str] | None = None,
    keep: int | None = None,
) -> Path:
    """Save ``tensors`` and ``state`` from a single process; return the checkpoint's folder.

    Its errors are those of ``begin``, ``write_shard`` and ``commit``.
    """
    needed_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    with begin(root, step, needed_bytes=needed_bytes) as draft:
        record = write_shard(draft.folder, 0, [whole_tensor(name, tensor) for name, tensor in tensors.items()])
        return commit(draft, [record], state=state, model=model, keep=keep)


def _build_manifest(
    step: int, records: Sequence[ShardRecord], state: Mapping[str, object], model: Mapping[str, str] | None
) -> CheckpointManifest:
    flaw = find_json_flaw(dict(state))
    if flaw is not None:
        raise CheckpointError(
            f"{flaw}; the state of a checkpoint is plain JSON: save tensors as tensors, and tuples as lists"
        )
    ordered = tuple(sorted(records, key=lambda record: record.rank))
    check_records(ordered)
    check_model_saved(model or {}, ordered)
    return CheckpointManifest(
        format="counterpoint-checkpoint",
        version=FORMAT_VERSION,
        step=step,
        libraries={"torch": str(torch.__version__)},
        model=dict(model or {}),
        state=cast("dict[str, JsonValue]", dict(state)),  # verified by find_json_flaw
        files=ordered,
    )


def _check_draft(folder: Path, manifest: CheckpointManifest, files: FileOps) -> None:
    """Write the manifest; check that all shards have their size, and that the manifest reads back unchanged."""
    for record in manifest.files:
        flaw = find_size_flaw(folder, record)
        if flaw is not None:
            raise CheckpointWriteError(f"{flaw}; do all ranks write to the same folder, on a disk they share?")
    unknown = {path.name for path in folder.iterdir() if not is_part(path)} - {record.file for record in manifest.files}
    if unknown:
        raise CheckpointError(
            f"{folder.name} has {', '.join(sorted(unknown))}, but no record of it was given; pass every rank's record"
        )
    write_file(files, folder / MANIFEST, format_manifest(manifest))
    files.sync_folder(folder)
    try:
        is_intact = replace(parse_manifest(folder / MANIFEST), sha256=manifest.sha256) == manifest
    except CheckpointError:
        is_intact = False
    if not is_intact:
        raise CheckpointWriteError(
            f"{folder.name}/{MANIFEST} reads back differently than it was written; nothing was committed: check the "
            "disk"
        )


def _remove_parts(folder: Path, files: FileOps) -> None:
    """Remove the part descriptions, which the manifest replaces, and sync."""
    parts = [path for path in sorted(folder.iterdir()) if is_part(path)]
    for path in parts:
        files.unlink(path)
    if parts:
        files.sync_folder(folder)


def _is_already_saved(files: FileOps, target: Path, manifest: CheckpointManifest) -> bool:
    """Tell whether ``target`` is this very checkpoint already; move a damaged one to another name."""
    if not os.path.lexists(target):
        return False
    try:
        existing = parse_manifest(target / MANIFEST)
        flaws = [flaw for record in existing.files for flaw in find_shard_flaws(target, record, existing.step)]
    except CheckpointError as error:
        flaws = [str(error)]
    if flaws:
        moved = target.with_name(f"{target.name}.damaged-{secrets.token_hex(4)}")
        files.rename(target, moved)
        warn(f"{target} was damaged ({flaws[0]}); it was renamed to {moved.name}", RuntimeWarning, stacklevel=4)
        return False
    same_run = {**existing.state, "run_id": manifest.state.get("run_id", "")}
    if replace(existing, libraries=manifest.libraries, sha256=manifest.sha256, state=same_run) == replace(
        manifest, state={"run_id": "", **manifest.state}
    ):
        return True
    raise CheckpointError(
        f"{target} exists and differs from what is being saved; a checkpoint is never overwritten: "
        f"save to another folder, or move the existing one"
    )
