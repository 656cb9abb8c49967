"""Durable, verified, re-shardable state: safetensors shards and a JSON manifest, never a pickle.

A save is ``begin`` (one rank), ``write_shard`` (every rank), ``commit`` (one rank); ``save`` does all three
in one process.
If ranks do not wait for each other, it is ``join_draft``, ``add_part`` and ``commit_if_complete`` on every rank.
A load is ``Checkpoint.open``; ``latest`` finds the newest intact checkpoint.

::

    root/step-00000100.tmp-1f3a/   draft: shards are written here, invisible to readers
         step-00000100/            checkpoint: the draft after one rename
             manifest.json             written last; has the checksums of all files
             shard-00000.safetensors   tensor slices of rank 0

Names are imported on first use, because ranks that train do not need the modules that read and verify.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from counterpoint.checkpoint.draft import CheckpointDraft, begin, commit, save
    from counterpoint.checkpoint.folders import step_folders
    from counterpoint.checkpoint.manifest import ShardRecord, State
    from counterpoint.checkpoint.per_rank_save import (
        add_part,
        cleanup_drafts,
        commit_if_complete,
        is_pending,
        join_draft,
        recover_drafts,
    )
    from counterpoint.checkpoint.reader import (
        Checkpoint,
        SkippedCheckpoint,
        VerificationReport,
        fingerprint,
        is_checkpoint,
        latest,
        load,
        verify,
    )
    from counterpoint.checkpoint.shard import write_shard
    from counterpoint.checkpoint.tensor_slice import TensorSlice, whole_tensor

_MODULES = {
    "Checkpoint": "reader",
    "CheckpointDraft": "draft",
    "TensorSlice": "tensor_slice",
    "VerificationReport": "reader",
    "ShardRecord": "manifest",
    "SkippedCheckpoint": "reader",
    "State": "manifest",
    "add_part": "per_rank_save",
    "begin": "draft",
    "commit": "draft",
    "commit_if_complete": "per_rank_save",
    "fingerprint": "reader",
    "is_checkpoint": "reader",
    "is_pending": "per_rank_save",
    "join_draft": "per_rank_save",
    "latest": "reader",
    "load": "reader",
    "recover_drafts": "per_rank_save",
    "save": "draft",
    "step_folders": "folders",
    "cleanup_drafts": "per_rank_save",
    "verify": "reader",
    "whole_tensor": "tensor_slice",
    "write_shard": "shard",
}

__all__ = [
    "Checkpoint",
    "CheckpointDraft",
    "ShardRecord",
    "SkippedCheckpoint",
    "State",
    "TensorSlice",
    "VerificationReport",
    "add_part",
    "begin",
    "cleanup_drafts",
    "commit",
    "commit_if_complete",
    "fingerprint",
    "is_checkpoint",
    "is_pending",
    "join_draft",
    "latest",
    "load",
    "recover_drafts",
    "save",
    "step_folders",
    "verify",
    "whole_tensor",
    "write_shard",
]


def __getattr__(name: str) -> object:
    """Import a name when it is first used."""
    if name in _MODULES:
        return getattr(import_module(f"counterpoint.checkpoint.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'counterpoint.checkpoint' has no attribute {name!r}")
