"""MXNet's KVStore API on torch tensors: ``kv = counterpoint.compat.kvstore.create("dist_sync")``.

``kvstore.py`` has the public calls. Values are stored in this process (``local_store.py``) or on servers
(``server_store.py``). ``optimizers.py`` converts torch optimizers to the update rules of servers, ``compression.py`` is
MXNet's gradient compression, and ``create.py`` makes a store and connects this worker to the servers.
"""

from __future__ import annotations

from counterpoint.compat.kvstore.create import create
from counterpoint.compat.kvstore.errors import KVStoreUnsupportedError, raise_unsupported
from counterpoint.compat.kvstore.kvstore import KVStore
from counterpoint.compat.kvstore.server_store import KVStoreMember, make_job

__all__ = ["KVStore", "KVStoreMember", "KVStoreUnsupportedError", "create", "make_job"]


def __getattr__(name: str) -> object:
    """Raise an error that names the replacement of an unsupported name."""
    raise_unsupported(name)
