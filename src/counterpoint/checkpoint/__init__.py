"""Durable, verified, re-shardable state: safetensors shards and a JSON manifest, never a pickle.

A save is ``begin`` (one rank), ``write_shard`` (every rank), ``commit`` (one rank); ``save`` does all three
in one process.
Where ranks do not wait for each other it is ``join``, ``add_part`` and ``commit_whole`` on every rank.
A load is ``Checkpoint.open``; ``latest`` finds the newest intact one.

Names are imported when they are first used: ranks that train need a piece, but not what reads and checks manifests.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from counterpoint.checkpoint.apart import add_part, commit_whole, is_pending, join, rescue, tidy
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
    "add_part": "apart",
    "begin": "draft",
    "commit": "draft",
    "commit_whole": "apart",
    "fingerprint": "opened",
    "is_pending": "apart",
    "join": "apart",
    "latest": "opened",
    "load": "opened",
    "rescue": "apart",
    "save": "draft",
    "step_folders": "folders",
    "tidy": "apart",
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
    "add_part",
    "begin",
    "commit",
    "commit_whole",
    "fingerprint",
    "is_pending",
    "join",
    "latest",
    "load",
    "rescue",
    "save",
    "step_folders",
    "tidy",
    "verify",
    "whole",
    "write_shard",
]


def __getattr__(name: str) -> object:
    """Import a name when it is first used."""
    if name in _HOMES:
        return getattr(import_module(f"counterpoint.checkpoint.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'counterpoint.checkpoint' has no attribute {name!r}")
