"""Key-value store served by one rank, for notices that are outside of any collective.

Nothing that a training step needs goes through it: a rank reads it only after a long wait, or while it is idle.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from counterpoint.fabric.c10d import TCPStore
from counterpoint.fabric.rendezvous import Address, open_listener


class SharedStore:
    """Key-value store, served by one rank; the others are clients.

    Args:
        store: torch's store.

    Attributes:
        is_lost: whether the serving rank has ended.
    """

    def __init__(self, store: TCPStore) -> None:
        self._store = store
        self.is_lost = False

    @property
    def port(self) -> int:
        """The port on which it is served."""
        return int(self._store.port)

    @staticmethod
    def serve(host: str, timeout_s: float) -> SharedStore:
        """Return a new store, served on a free port of the interface that ``host`` resolves to."""
        listen_fd = open_listener(Address(host, 0))
        with socket.socket(fileno=listen_fd) as listener:
            port = int(listener.getsockname()[1])
            listener.detach()
        timeout = timedelta(seconds=timeout_s)
        return SharedStore(
            TCPStore(host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listen_fd)
        )

    @staticmethod
    def connect(host: str, port: int, timeout_s: float) -> SharedStore:
        """Return a client of the store that another rank serves at ``host:port``."""
        return SharedStore(TCPStore(host, port, None, False, timedelta(seconds=timeout_s), wait_for_workers=False))

    def set(self, key: str, value: str) -> None:
        """Set the key's value."""
        self._store.set(key, value)

    def get(self, key: str) -> str | None:
        """Return the key's value; None if it is not set, or the serving rank has ended."""
        try:
            return self._store.get(key).decode() if not self.is_lost and self._store.check([key]) else None
        except RuntimeError:
            self.is_lost = True
            return None

    def increment(self, key: str) -> int:
        """Add one to the key's counter; return the new value."""
        return int(self._store.add(key, 1))

    def delete(self, key: str) -> None:
        """Delete the key."""
        self._store.delete_key(key)
