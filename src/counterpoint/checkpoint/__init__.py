"""Durable, verified, re-shardable state: safetensors shards and a JSON manifest, never a pickle.

A save is ``begin`` (one rank), ``write_shard`` (every rank), ``commit`` (one rank); ``save`` does all three
in one process.
A load is ``Checkpoint.open``; ``latest`` finds the newest intact one.
"""

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
