"""Durable, verified, re-shardable state: safetensors shards and a JSON manifest, never a pickle.

A save is ``begin`` (one rank), ``write_shard`` (every rank), ``commit`` (one rank); ``save`` does all three
in one process.
A load is ``Checkpoint.open``; ``latest`` finds the newest intact one.

Names are imported when they are first used: ranks that train need a piece, but not what reads and checks manifests.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from counterpoint.checkpoint.draft import Draft, begin, commit, save
    from counterpoint.checkpoint.folders import step_folders
    from counterpoint.checkpoint.manifest import ShardRecord, State
    from counterpoint.checkpoint.opened import Checkpoint, Report, Skipped, fingerprint, latest, load, verify
    from counterpoint.checkpoint.piece import Piece, whole
    from counterpoint.checkpoint.shard import write_shard

_HOMES = {
    "Checkpoint": "opened",
    "Draft": "draft",
    "Piece": "piece",
    "Report": "opened",
    "ShardRecord": "manifest",
    "Skipped": "opened",
    "State": "manifest",
    "begin": "draft",
    "commit": "draft",
    "fingerprint": "opened",
    "latest": "opened",
    "load": "opened",
    "save": "draft",
    "step_folders": "folders",
    "verify": "opened",
    "whole": "piece",
    "write_shard": "shard",
}

__all__ = [
    "Checkpoint",
    "Draft",
    "Piece",
    "Report",
    "ShardRecord",
    "Skipped",
    "State",
    "begin",
    "commit",
    "fingerprint",
    "latest",
    "load",
    "save",
    "step_folders",
    "verify",
    "whole",
    "write_shard",
]


def __getattr__(name: str) -> object:
    """Import a name when it is first used."""
    if name in _HOMES:
        return getattr(import_module(f"counterpoint.checkpoint.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'counterpoint.checkpoint' has no attribute {name!r}")
