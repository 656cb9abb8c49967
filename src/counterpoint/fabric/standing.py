"""A place where ranks meet again and again: one of them keeps it for as long as it lives."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

from counterpoint.fabric.gloo import TCPStore
from counterpoint.fabric.meeting import Address, listening

STORE_S = 30.0  # that its own keeper waits for the store, which is in the same process


class StandingPlace:
    """A store that this process keeps, where ranks meet in one generation after the other; close it.

    Args:
        host: the interface to listen on; loopback for ranks of one machine.

    Attributes:
        address: where it is; the port is any that was free.

    Raises:
        LaunchError: nothing can listen there.

    Example:
        >>> from counterpoint.fabric.meeting import connect
        >>> place = StandingPlace("127.0.0.1")
        >>> [connect(0, 1, place.address, generation=generation).num_ranks for generation in (1, 2)]
        [1, 1]
        >>> place.close()
    """

    def __init__(self, host: str) -> None:
        listen_fd = listening(Address(host, 0))
        with socket.socket(fileno=os.dup(listen_fd)) as known:
            port = int(known.getsockname()[1])
        self.address = Address(host, port, kept_by="the oldest member")
        self._store: TCPStore | None = TCPStore(
            host, port, None, True, timedelta(seconds=STORE_S), wait_for_workers=False, master_listen_fd=listen_fd
        )

    def close(self) -> None:
        """Nobody meets here any more; a second call does nothing."""
        self._store = None
