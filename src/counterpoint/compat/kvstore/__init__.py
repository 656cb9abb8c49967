"""MXNet's KVStore on torch tensors: ``kv = counterpoint.compat.kvstore.create("dist_sync")``.

``face.py`` has the calls. Behind it ``local.py`` keeps values in this process, and ``served.py`` on servers;
``optimizers.py`` turns torch optimizers into the rules of servers, ``compression.py`` is MXNet's, ``starting.py`` finds
out which worker this is and brings it to the servers.
"""

from __future__ import annotations

from counterpoint.compat.kvstore.create import create
from counterpoint.compat.kvstore.errors import KVStoreUnsupportedError, raise_unsupported
from counterpoint.compat.kvstore.kvstore import KVStore
from counterpoint.compat.kvstore.server_store import KVStoreMember, make_job

__all__ = ["KVStoreUnsupportedError", "KVStore", "KVStoreMember", "create", "make_job"]


def __getattr__(name: str) -> object:
    """Say what there is instead of what there is not."""
    raise_unsupported(name)
