"""MXNet's KVStore on torch tensors: ``kv = counterpoint.compat.kvstore.create("dist_sync")``.

``face.py`` has the calls. Behind it ``local.py`` keeps values in this process, and ``served.py`` on servers;
``optimizers.py`` turns torch optimizers into the rules of servers, ``compression.py`` is MXNet's, ``starting.py`` finds
out which worker this is and brings it to the servers.
"""

from __future__ import annotations

from counterpoint.compat.kvstore.errors import AbsentError, refuse
from counterpoint.compat.kvstore.face import KVStore
from counterpoint.compat.kvstore.served import Member, job_of
from counterpoint.compat.kvstore.starting import create

__all__ = ["AbsentError", "KVStore", "Member", "create", "job_of"]


def __getattr__(name: str) -> object:
    """Say what there is instead of what there is not."""
    refuse(name)
