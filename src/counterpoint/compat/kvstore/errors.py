"""Errors for unsupported names of MXNet's KVStore."""

from __future__ import annotations

from typing import NoReturn

from counterpoint.errors import PlanError


class KVStoreUnsupportedError(PlanError, AttributeError):
    """A part of MXNet's KVStore is not supported; the message names a replacement."""


UNSUPPORTED = {
    "KVStoreBase": "use create(); plug-in stores are not supported",
    "KVStoreServer": "servers do not run the script: create('dist_sync', servers=2) starts them",
    "_init_kvstore_server_module": "servers do not run the script: create('dist_sync', servers=2) starts them",
    "register": "use create(); plug-in stores are not supported",
    "_send_command_to_servers": (
        "servers take no commands; use set_optimizer, or set_updater of a local store for custom updates"
    ),
    "get_num_dead_node": "a call that waits for a lost worker or server raises an error that names it",
    "num_dead_node": "a call that waits for a lost worker or server raises an error that names it",
    "set_barrier_before_exit": "workers may exit at any time; call barrier() first to exit together",
    "run_server": "servers do not run the script: create('dist_sync', servers=2) starts them",
}
"""Replacement of each unsupported name of MXNet's."""


def raise_unsupported(name: str) -> NoReturn:
    """Raise the error for an unknown attribute, with the replacement if it is a name of MXNet's.

    Raises:
        KVStoreUnsupportedError: the name is one of MXNet's.
        AttributeError: it is not.
    """
    if name in UNSUPPORTED:
        raise KVStoreUnsupportedError(f"kvstore.{name} is not supported: {UNSUPPORTED[name]}")
    raise AttributeError(f"kvstore has no attribute {name!r}")
