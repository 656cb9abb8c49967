"""Key-value store served by one rank, for notices that are outside of any collective.

Nothing that a training step needs goes through it: a rank reads it only after a long wait, or while it is idle.
"""

from __future__ import annotations

from counterpoint.fabric.key_value_store import STORE_JOB, RemoteTable, StoreServer, StoreValues
from counterpoint.fabric.rendezvous import Address, bind_port, serve_store, store_address
from counterpoint.rpc.handshake import JobCredentials
from counterpoint.rpc.job_key import JobKey


class SharedStore:
    """Key-value store, served by one rank; the others are clients.

    Args:
        values: the table.
        port: on which it is served.
        server: of this rank, if it serves it.

    Attributes:
        is_lost: whether the serving rank has ended.
    """

    def __init__(self, values: StoreValues, port: int, server: StoreServer | None = None) -> None:
        self._values, self._server = values, server
        self.port = port
        self.is_lost = False

    @staticmethod
    def serve(host: str, key: JobKey) -> SharedStore:
        """Return a new store, served on a free port of the interface that ``host`` resolves to."""
        bound_socket = bind_port(Address(host, 0))
        port = int(bound_socket.getsockname()[1])
        server = serve_store(Address(host, port, bound_socket.detach()), key)
        return SharedStore(server.table, port, server)

    @staticmethod
    def connect(host: str, port: int, key: JobKey, timeout_s: float) -> SharedStore:
        """Return a client of the store that another rank serves at ``host:port``.

        Raises:
            PeerError: it does not serve it any more.
        """
        credentials = JobCredentials(key, STORE_JOB)
        return SharedStore(RemoteTable(store_address(Address(host, port), key), credentials, timeout_s), port)

    def set(self, key: str, value: str) -> None:
        """Set the key's value."""
        self._values.set(key, value.encode())

    def get(self, key: str) -> str | None:
        """Return the key's value; None if it is not set, or the serving rank has ended."""
        try:
            value = None if self.is_lost else self._values.get(key)
        except RuntimeError:
            self.is_lost = True
            return None
        return None if value is None else value.decode()

    def increment(self, key: str) -> int:
        """Add one to the key's counter; return the new value."""
        return self._values.add(key, 1)

    def delete(self, key: str) -> None:
        """Delete the key."""
        self._values.delete(key)
