"""What there is not, by name."""

from __future__ import annotations

from typing import NoReturn

from counterpoint.errors import PlanError


class KVStoreUnsupportedError(PlanError, AttributeError):
    """This part of MXNet's KVStore does not exist here; the message says what does."""


UNSUPPORTED = {
    "KVStoreBase": "make stores with create(); other kinds are no plug-ins here",
    "KVStoreServer": "servers run no script: create('dist_sync', servers=2) starts them",
    "_init_kvstore_server_module": "servers run no script: create('dist_sync', servers=2) starts them",
    "register": "make stores with create(); other kinds are no plug-ins here",
    "_send_command_to_servers": (
        "servers take no commands; set_optimizer says what they do, and custom updates are set_updater of a local store"
    ),
    "get_num_dead_node": "a worker or server that is gone ends the call that waits for it, with its name",
    "num_dead_node": "a worker or server that is gone ends the call that waits for it, with its name",
    "set_barrier_before_exit": "every worker may end when it likes; call barrier() before, to end together",
    "run_server": "servers run no script: create('dist_sync', servers=2) starts them",
}
"""Names of MXNet's that do not exist here, and what to write instead."""


def raise_unsupported(name: str) -> NoReturn:
    """Say what there is instead of a name.

    Raises:
        AbsentError: the name is one of MXNet's.
        AttributeError: it is nobody's.
    """
    if name in UNSUPPORTED:
        raise KVStoreUnsupportedError(f"kvstore.{name} does not exist here: {UNSUPPORTED[name]}")
    raise AttributeError(f"kvstore has no {name!r}")
