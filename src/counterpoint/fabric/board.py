"""Words that any rank can post and any can read, for those that wait for a rank which does something else.

Everything that a training step needs goes through the collectives of the fabric; a board is looked at only by a rank
that has waited for long, and by one that has nothing to do.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from counterpoint.fabric.gloo import TCPStore
from counterpoint.fabric.meeting import Address, listening


class Board:
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
    def keep(host: str, deadline_s: float) -> Board:
        """Return a new board that listens on a free port of the interface that ``host`` leads to."""
        listen_fd = listening(Address(host, 0))
        with socket.socket(fileno=listen_fd) as listener:
            port = int(listener.getsockname()[1])
            listener.detach()
        timeout = timedelta(seconds=deadline_s)
        return Board(TCPStore(host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listen_fd))

    @staticmethod
    def visit(host: str, port: int, deadline_s: float) -> Board:
        """Return the board that another rank keeps there."""
        return Board(TCPStore(host, port, None, False, timedelta(seconds=deadline_s), wait_for_workers=False))

    def post(self, place: str, words: str) -> None:
        """The words stand at the place."""
        self._store.set(place, words)

    def read(self, place: str) -> str | None:
        """Return what stands at the place; None where nothing does, or the rank that keeps the board has ended."""
        try:
            return self._store.get(place).decode() if not self.is_lost and self._store.check([place]) else None
        except RuntimeError:
            self.is_lost = True
            return None

    def count(self, place: str) -> int:
        """Return how many have counted at the place, this call included."""
        return int(self._store.add(place, 1))

    def clear(self, place: str) -> None:
        """Nothing stands at the place."""
        self._store.delete_key(place)
