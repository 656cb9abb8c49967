"""The folder of all checkpoints of a run: names of checkpoints and drafts, locks, and removal of old ones."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import JsonValue

from counterpoint.checkpoint.file_ops import FileOps, remove_tree, unreadable
from counterpoint.checkpoint.manifest import MANIFEST, CheckpointManifest, parse_manifest
from counterpoint.checkpoint.shard import find_size_flaw
from counterpoint.errors import CheckpointError
from counterpoint.file_reader import find_file_kind
from counterpoint.terminal_text import warn

_STEP = re.compile(r"step-([0-9]{8,})")
_DRAFT = re.compile(r"step-([0-9]{8,})\.tmp-[0-9a-f]+")
_PART = re.compile(r"part-[0-9]{5,9}\.json")


def step_name(step: int) -> str:
    """Return the folder name of a step's checkpoint."""
    if step < 0:
        raise CheckpointError(f"step {step} cannot be saved; steps count from 0")
    return f"step-{step:08d}"


def step_folders(root: Path) -> list[Path]:
    """Return the committed checkpoints in ``root``, oldest first, intact or not.

    Raises:
        CheckpointError: ``root`` cannot be read.
    """
    try:
        return list_steps(root)
    except OSError as error:
        raise unreadable(root, error) from error


def list_steps(root: Path) -> list[Path]:
    """Return what :func:`step_folders` does; raise ``OSError`` if ``root`` cannot be read."""
    matches = [(match, path) for path in list_folder(root) if (match := _STEP.fullmatch(path.name))]
    return [path for _, path in sorted((int(match[1]), path) for match, path in matches if may_be_folder(path))]


def may_be_folder(path: Path) -> bool:
    """Tell whether a path leads to a folder, or to what only opening it can tell."""
    try:
        return find_file_kind(path) == "folder"
    except OSError:
        return True


def list_drafts(root: Path) -> list[Path]:
    """Return the drafts in ``root``, in progress or of dead runs, oldest first; raise ``OSError`` if that fails."""
    return sorted(path for path in list_folder(root) if _DRAFT.fullmatch(path.name))


def list_folder(folder: Path) -> list[Path]:
    """Return the entries of a folder; none if the path is not a folder. Raise ``OSError`` if it cannot be read."""
    return list(folder.iterdir()) if find_file_kind(folder) == "folder" else []


def parse_step(draft: Path) -> int:
    """Return the step of a draft."""
    match = _DRAFT.fullmatch(draft.name)
    assert match is not None, "not the name of a draft"
    return int(match[1])


def part_name(rank: int) -> str:
    """Return the name of the file that describes a rank's part of a draft."""
    return f"part-{rank:05d}.json"


def is_part(path: Path) -> bool:
    """Tell whether a file describes a rank's part of a draft."""
    return _PART.fullmatch(path.name) is not None


def find_size_flaws(folder: Path, manifest: CheckpointManifest) -> list[str]:
    """Return why the files of a checkpoint cannot be those of its manifest, without reading them."""
    return [flaw for record in manifest.files if (flaw := find_size_flaw(folder, record))]


def make_root(files: FileOps, root: Path) -> None:
    """Create a folder and its parents durably."""
    if find_file_kind(root) == "folder":
        return
    make_root(files, root.parent)
    with suppress(FileExistsError):  # another rank or run has just created it
        files.make_folder(root)
    files.sync_folder(root.parent)


def remove_dead_drafts(files: FileOps, root: Path) -> None:
    """Remove the drafts of dead runs; locked drafts are kept."""
    for path in list_drafts(root):
        lock = try_lock(path, exclusive=True)
        if lock is not None:
            try:
                with warn_on_failure(path):
                    remove_tree(files, path)
            finally:
                os.close(lock)


@contextmanager
def warn_on_failure(folder: Path) -> Iterator[None]:
    """Turn a failure to delete into a warning, because only space is lost."""
    try:
        yield
    except FileNotFoundError:
        return  # another rank has deleted it
    except OSError as error:
        warn(f"could not delete {folder}: {error.strerror or error}", RuntimeWarning, stacklevel=4)


def try_lock(folder: Path, *, exclusive: bool) -> int | None:
    """Return a descriptor with the folder's lock, or None if it is locked or missing.

    The kernel releases the lock when the process ends in any way.
    """
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(lock, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        if folder.exists():
            return lock
    except BlockingIOError:
        pass
    except OSError:
        if not exclusive:
            return lock  # a file system without locks: no other run can remove this draft either
    os.close(lock)
    return None


def prune(files: FileOps, root: Path, step: int, keep: int, run_id: JsonValue) -> None:
    """Keep the ``keep`` newest intact checkpoints of a run up to ``step``; remove its older ones.

    Args:
        files: file operations.
        root: the folder of all checkpoints.
        step: of the newest one.
        keep: how many stay.
        run_id: of the run; checkpoints of other runs are neither counted nor removed.
    """
    kept, folders = 0, list[Path]()
    with warn_on_failure(root):
        folders = list_steps(root)
    for folder in reversed([path for path in folders if int(path.name.removeprefix("step-")) <= step]):
        try:
            manifest: CheckpointManifest | None = parse_manifest(folder / MANIFEST)
        except CheckpointError:
            manifest = None
        if (None if manifest is None else manifest.state.get("run_id")) != run_id:
            continue
        if kept >= keep:
            trash = root / f"{folder.name}.tmp-{secrets.token_hex(4)}"
            with warn_on_failure(folder):
                files.rename(folder, trash)  # an incomplete checkpoint never has the name of a complete one
                files.sync_folder(root)
                remove_tree(files, trash)
        elif manifest is not None and not find_size_flaws(folder, manifest):
            kept += 1
