"""The folder of a run's checkpoints: locked for one run, and tried by all ranks before the first step."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import cast

from counterpoint.checkpoint import cleanup_drafts, step_folders
from counterpoint.checkpoint.file_ops import LOCAL_FILES, FileOps, remove_tree, write_file
from counterpoint.checkpoint.folder_lock import FolderLock, lock_folder
from counterpoint.checkpoint.folders import make_root
from counterpoint.errors import CheckpointError
from counterpoint.fabric.fabric import Fabric
from counterpoint.training.ranks.local_ranks import LocalRanks

PROBE = ".probe-"
REMEDY = "give another checkpoint_dir"


@dataclass(slots=True)
class CheckpointDir:
    """A folder to which this run may write checkpoints.

    Args:
        path: of the folder.
        run_id: identifies the run, also after it was resumed; only its own checkpoints are removed.
        draft_id: identifies this start of the run: the ranks' independent saves never mix with those of an earlier one.
        lock: held by the first rank until the fit ends.
        files: file operations; tests pass failing ones.
    """

    path: Path
    run_id: str = ""
    draft_id: str = ""
    lock: FolderLock | None = None
    files: FileOps = LOCAL_FILES

    def require_held(self) -> None:
        """Check that no other run has taken the folder.

        Raises:
            CheckpointWriteError: one has.
        """
        if self.lock is not None:
            self.lock.require_held()

    def release(self) -> None:
        """Let other runs use the folder."""
        if self.lock is not None:
            self.lock.release()


def claim_checkpoint_dir(
    local_ranks: LocalRanks, path: Path, run_id: str, *, is_new: bool, files: FileOps = LOCAL_FILES
) -> CheckpointDir:
    """Create and lock the folder of a run's checkpoints, and check that every rank can write there; a collective call.

    What runs have left there that died while saving is completed or removed.

    Args:
        local_ranks: the ranks.
        path: of the folder.
        run_id: of a run that continues; empty for one that starts.
        is_new: whether the run has taken no step yet, so that no checkpoint there can be its own.
        files: file operations.

    Raises:
        CheckpointError: it cannot be created or written, is not a folder that all ranks share, has no space for the
            model, is used by another run, or has the checkpoints of another one.
    """
    claim = CheckpointDir(path, run_id or token_hex(6), token_hex(4), None, files)
    first = local_ranks.world.fabrics[0].rank
    model_bytes = sum(t.nbytes for t in (*local_ranks.trained.parameters(), *local_ranks.trained.buffers()))

    def work(fabric: Fabric) -> str:
        """Claim the folder together; return why that is impossible."""
        failure, everyone = "", tuple(range(fabric.num_ranks))
        if fabric.rank == 0:
            failure = open_dir(claim, model_bytes, is_new=is_new)
        own = [claim.run_id, claim.draft_id, failure]
        given = cast("list[list[str]]", fabric.gather_values("checkpoint folder", own, everyone))
        claim.run_id, claim.draft_id, failure = given[0]
        if failure:
            return failure
        flaw = probe_dir(files, path, claim.draft_id, fabric.rank) if fabric.rank == first else ""
        found = cast("list[list[str]]", fabric.gather_values("probes", [socket.gethostname(), flaw], everyone))
        if fabric.rank == 0:
            remove_probes(files, path)
        return format_flaws(path, found)

    failure = local_ranks.world.run(work)[0]
    if failure:
        claim.release()
        raise CheckpointError(failure)
    return claim


def open_dir(claim: CheckpointDir, model_bytes: int, *, is_new: bool) -> str:
    """Create and lock the folder, and write the probe of the first rank; return why that is impossible."""
    problem = lock_and_probe(claim, model_bytes, is_new=is_new)
    if problem and claim.lock is not None:  # what another run has written there is its own
        with suppress(OSError):
            remove_probes(claim.files, claim.path)
    return problem


def lock_and_probe(claim: CheckpointDir, model_bytes: int, *, is_new: bool) -> str:
    """Create and lock the folder, and write the probe of the first rank, which stays there if something else fails."""
    path, files = claim.path, claim.files
    try:
        make_root(files, path)
    except OSError as error:
        return f"the folder {path} for checkpoints cannot be created: {error.strerror}; choose another path"
    try:
        claim.lock = lock_folder(path, claim.run_id, REMEDY)
        if is_new:
            require_no_other_run(path)
        cleanup_drafts(path, files=files)
        remove_probes(files, path)
        start_probes(files, path, claim.draft_id)
        require_space(path, model_bytes, free_bytes=files.free_bytes(path))
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        return (
            f"the folder {path} for checkpoints cannot be written: {error.strerror or error}; choose another path, or "
            "give this user the right to write there"
        )
    return ""


def start_probes(files: FileOps, path: Path, token: str) -> None:
    """Write the folder in which ranks leave their probes, as a checkpoint is written: under another name, and renamed.

    Raises:
        CheckpointError: folders cannot be renamed here.
    """
    draft, probes = path / f"{PROBE}{token}.new", path / f"{PROBE}{token}"
    files.make_folder(draft)
    write_file(files, draft / "token", token.encode())
    try:
        files.rename(draft, probes)
    except OSError as error:
        raise CheckpointError(
            f"a folder in {path} cannot be renamed ({error.strerror or error}), and a checkpoint is published by one "
            "rename, so that it is complete or absent; choose a folder on another file system"
        ) from error
    files.sync_folder(path)


def probe_dir(files: FileOps, path: Path, token: str, rank: int) -> str:
    """Find what the first rank has written, write and read back a file; return what is wrong."""
    probes, data = path / f"{PROBE}{token}", f"{token} of rank {rank}".encode()
    try:
        is_shared = (probes / "token").read_bytes() == token.encode()
    except OSError:
        is_shared = False
    if not is_shared:
        return "does not find there what rank 0 has just written, so that it is another folder"
    try:
        write_file(files, probes / f"rank-{rank}", data)
        if (probes / f"rank-{rank}").read_bytes() != data:
            return "reads back other bytes than it has written"
    except OSError as error:
        return f"cannot write there: {error.strerror or error}"
    return ""


def remove_probes(files: FileOps, path: Path) -> None:
    """Remove the probes of all ranks, of this start or an earlier one."""
    for probes in sorted(path.glob(f"{PROBE}*")):
        remove_tree(files, probes)


def format_flaws(path: Path, found: Sequence[Sequence[str]]) -> str:
    """Return why ranks cannot use a folder; empty if all can.

    Args:
        path: of the folder.
        found: the host of each rank, and what is wrong there.
    """
    flaws = [f"rank {rank} on host {host} {flaw}" for rank, (host, flaw) in enumerate(found) if flaw]
    if not flaws:
        return ""
    return (
        f"not every rank can save to {path}: {'; '.join(flaws)}; every rank writes its part of a checkpoint: give a "
        "folder on a file system that all hosts share, and where this user may write"
    )


def require_space(folder: Path, model_bytes: int, *, free_bytes: int) -> None:
    """Check that a model fits into a folder; the optimizer's state, of the same size or twice, comes on top.

    Raises:
        CheckpointError: it does not.
    """
    if free_bytes < model_bytes:
        raise CheckpointError(
            f"the model has {model_bytes} bytes, but {folder} has only {free_bytes} free, so no checkpoint could be "
            "written; free some space, or choose another path"
        )


def require_no_other_run(path: Path) -> None:
    """Check that a folder for the checkpoints of a new run has none of another run.

    Raises:
        CheckpointError: it has.
    """
    folders = step_folders(path)
    if folders:
        raise CheckpointError(
            f"{path} holds {len(folders)} checkpoints of another run, the last {folders[-1].name}, which are "
            "never overwritten; give another checkpoint_dir, or continue that run with resume='auto'"
        )
