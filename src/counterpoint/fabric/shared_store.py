"""Words that any rank can post and any can read, for those that wait for a rank which does something else.

Everything that a training step needs goes through the collectives of the fabric; a board is looked at only by a rank
that has waited for long, and by one that has nothing to do.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from counterpoint.fabric.c10d import TCPStore
from counterpoint.fabric.rendezvous import Address, open_listener


class SharedStore:
    """A board, kept by one rank and visited by the others.

    Args:
        store: where the words are.

    Attributes:
        is_lost: whether the rank that keeps it has ended.
    """

    def __init__(self, store: TCPStore) -> None:
        self._store = store
        self.is_lost = False

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._store.port)

    @staticmethod
    def serve(host: str, timeout_s: float) -> SharedStore:
        """Return a new board that listens on a free port of the interface that ``host`` leads to."""
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
        """Return the board that another rank keeps there."""
        return SharedStore(TCPStore(host, port, None, False, timedelta(seconds=timeout_s), wait_for_workers=False))

    def set(self, key: str, value: str) -> None:
        """The words stand at the place."""
        self._store.set(key, value)

    def get(self, key: str) -> str | None:
        """Return what stands at the place; None where nothing does, or the rank that keeps the board has ended."""
        try:
            return self._store.get(key).decode() if not self.is_lost and self._store.check([key]) else None
        except RuntimeError:
            self.is_lost = True
            return None

    def increment(self, key: str) -> int:
        """Return how many have counted at the place, this call included."""
        return int(self._store.add(key, 1))

    def delete(self, key: str) -> None:
        """Nothing stands at the place."""
        self._store.delete_key(key)
