"""The folder of all checkpoints of a run: which stand there, which go, and whose draft is still alive."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from counterpoint.checkpoint.file_ops import FileOps, remove_tree
from counterpoint.checkpoint.manifest import MANIFEST, parse_manifest
from counterpoint.checkpoint.shard import find_size_flaw
from counterpoint.errors import CheckpointError

_STEP = re.compile(r"step-(\d{8,})")
_DRAFT = re.compile(r"step-(\d{8,})\.tmp-[0-9a-f]+")
_PART = re.compile(r"part-\d{5,9}\.json")


def step_name(step: int) -> str:
    """Return the folder name of a step."""
    if step < 0:
        raise CheckpointError(f"step {step} cannot be saved; steps count from 0")
    return f"step-{step:08d}"


def step_folders(root: Path) -> list[Path]:
    """Return the committed step folders in ``root``, oldest first, intact or not."""
    if not root.is_dir():
        return []
    found = [
        (int(match[1]), path) for path in root.iterdir() if (match := _STEP.fullmatch(path.name)) and path.is_dir()
    ]
    return [path for _, path in sorted(found)]


def list_drafts(root: Path) -> list[Path]:
    """Return the folders of saves that were not committed, in progress or left by a dead run, oldest first."""
    return sorted(path for path in root.iterdir() if _DRAFT.fullmatch(path.name)) if root.is_dir() else []


def parse_step(draft: Path) -> int:
    """Return the step that a draft is of."""
    match = _DRAFT.fullmatch(draft.name)
    assert match is not None, "it is the name of a draft"
    return int(match[1])


def part_name(rank: int) -> str:
    """Return the name of the file that says what a rank has added to a draft apart from the others."""
    return f"part-{rank:05d}.json"


def is_part(path: Path) -> bool:
    """Tell whether a file is one of these."""
    return _PART.fullmatch(path.name) is not None


def find_quick_flaws(folder: Path) -> list[str]:
    """Return what is wrong with a checkpoint as far as its manifest and the sizes of its files tell."""
    try:
        manifest = parse_manifest(folder / MANIFEST)
    except CheckpointError as error:
        return [str(error)]
    return [flaw for record in manifest.files if (flaw := find_size_flaw(folder, record))]


def make_root(files: FileOps, root: Path) -> None:
    """The folder and those above it stand there and would survive a power cut."""
    if root.is_dir():
        return
    make_root(files, root.parent)
    with suppress(FileExistsError):  # another rank or run made it in between
        files.make_folder(root)
    files.sync_folder(root.parent)


def remove_dead_drafts(files: FileOps, root: Path) -> None:
    """Drafts whose run is dead are gone; a draft that is still locked stays."""
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
    """A failure to delete is a warning: what was saved is safe, only space is lost."""
    try:
        yield
    except FileNotFoundError:
        return  # another rank has deleted it
    except OSError as error:
        warnings.warn(f"could not delete {folder}: {error.strerror}", RuntimeWarning, stacklevel=4)


def try_lock(folder: Path, *, exclusive: bool) -> int | None:
    """Return a descriptor that holds the folder's lock, or None where another holds it or the folder is gone.

    The kernel drops the lock with the process, however it dies.
    """
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(lock, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        if folder.exists():
            return lock
    except OSError:
        if not exclusive:
            return lock  # a file system without locks: nobody can sweep this draft either
    os.close(lock)
    return None


def prune(files: FileOps, root: Path, step: int, keep: int) -> None:
    """Of the checkpoints up to ``step``, the ``keep`` newest intact ones stay; older ones are gone."""
    kept = 0
    for folder in reversed([path for path in step_folders(root) if int(path.name.removeprefix("step-")) <= step]):
        if kept >= keep:
            trash = root / f"{folder.name}.tmp-{secrets.token_hex(4)}"
            with warn_on_failure(folder):
                files.rename(folder, trash)  # never half a checkpoint under the name of a whole one
                files.sync_folder(root)
                remove_tree(files, trash)
        elif not find_quick_flaws(folder):
            kept += 1
