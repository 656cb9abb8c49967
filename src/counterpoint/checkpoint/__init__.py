"""Durable, verified, re-shardable state: safetensors shards and a JSON manifest, never a pickle.

A save is ``begin`` (one rank), ``write_shard`` (every rank), ``commit`` (one rank); ``save`` does all three
in one process.
Where ranks do not wait for each other it is ``join``, ``add_part`` and ``commit_whole`` on every rank.
A load is ``Checkpoint.open``; ``latest`` finds the newest intact one.
"""

from counterpoint.checkpoint.apart import add_part, commit_whole, is_pending, join, rescue, tidy
from counterpoint.checkpoint.commit import Draft, begin, commit, save
from counterpoint.checkpoint.folders import step_folders
from counterpoint.checkpoint.manifest import ShardRecord, State
from counterpoint.checkpoint.opened import Checkpoint, Report, Skipped, fingerprint, latest, load, verify
from counterpoint.checkpoint.piece import Piece, whole
from counterpoint.checkpoint.shard import write_shard

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
