r"""Key-value store of a job, through which its ranks meet: one process serves it, the others are clients.

::

    rank 0: table <-- request_handler <-- Listener <--- handshake, records ---> RpcClient :rank 1
                                          (event loop thread)              \--> RpcClient :rank 2

A client is admitted after the handshake of :mod:`counterpoint.rpc.handshake`: over TCP both sides prove that they have
the job's key, and everything that follows is encrypted; without a key the store has a UNIX socket, whose kernel tells
each side the user of the other. Requests are JSON; sizes and numbers of keys are limited.
"""

from __future__ import annotations

import socket
import time
import weakref
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from threading import RLock
from typing import TypeAlias

from torch.distributed import DistNetworkError, DistStoreError

from counterpoint.errors import PeerError, ProtocolError
from counterpoint.fabric.c10d import PrefixStore, Store
from counterpoint.json_reader import JsonValue
from counterpoint.rpc.address import RpcAddress, TcpAddress
from counterpoint.rpc.client import RpcClient
from counterpoint.rpc.connection import Connection
from counterpoint.rpc.event_loop import EventLoop
from counterpoint.rpc.frame import RpcLimits, RpcMessage
from counterpoint.rpc.handshake import JobCredentials, KeyMismatchError
from counterpoint.rpc.listener import listen, request_handler

MAX_KEYS = 1 << 18
MAX_KEY_CHARACTERS = 512
MAX_VALUE_BYTES = 1 << 19
MAX_TOTAL_BYTES = 1 << 28
MAX_AMOUNT = 1 << 62
MAX_REFUSALS = 4
MAX_NUMBER_CHARACTERS = 20
STORE_LIMITS = RpcLimits(payload_bytes=0, max_connections=4096, max_unauthenticated=256)
STORE_JOB = "rendezvous"
POLL_S = 0.002


class KeyValueTable:
    """Keys and values of a store; its methods may be called from several threads.

    Attributes:
        refusals: who was not admitted because of its key, and why; the first few.
    """

    def __init__(self) -> None:
        self.refusals: list[str] = []
        self._values: dict[str, bytes] = {}
        self._num_bytes = 0
        self._lock = RLock()

    def set(self, key: str, value: bytes) -> None:
        """Set the key's value.

        Raises:
            ProtocolError: it exceeds the limits of the store.
        """
        with self._lock:
            old = self._values.get(key)
            num_bytes = self._num_bytes + len(value) + (len(key) if old is None else -len(old))
            num_keys = len(self._values) + (old is None)
            if len(key) > MAX_KEY_CHARACTERS or len(value) > MAX_VALUE_BYTES:
                raise ProtocolError(
                    f"a key of {len(key)} characters and a value of {len(value)} bytes; the store takes "
                    f"{MAX_KEY_CHARACTERS} and {MAX_VALUE_BYTES}"
                )
            if num_keys > MAX_KEYS or num_bytes > MAX_TOTAL_BYTES:
                raise ProtocolError(
                    f"{num_keys} keys with {num_bytes} bytes; the store holds {MAX_KEYS} and {MAX_TOTAL_BYTES}"
                )
            self._values[key], self._num_bytes = value, num_bytes

    def get(self, key: str) -> bytes | None:
        """Return the key's value; None if it is not set."""
        return self._values.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are set."""
        return all(key in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Add to the key's number, which is 0 at first; return the sum.

        Raises:
            ProtocolError: the value is not a number.
        """
        with self._lock:
            text = self._values.get(key, b"0")
            if len(text) > MAX_NUMBER_CHARACTERS or not text.removeprefix(b"-").isdigit():
                raise ProtocolError(f"the value of {key!r} is not a number, and nothing can be added to it")
            total = int(text) + amount
            self.set(key, str(total).encode())
            return total

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set the key's value if it is ``expected``, or not set and that is empty; return the value afterwards."""
        with self._lock:
            value = self._values.get(key)
            if value == expected or (value is None and not expected):
                self.set(key, desired)
                return desired
            return expected if value is None else value

    def delete(self, key: str) -> bool:
        """Delete the key; return whether it was set."""
        with self._lock:
            value = self._values.pop(key, None)
            if value is not None:
                self._num_bytes -= len(key) + len(value)
            return value is not None

    def reply(self, request: RpcMessage) -> RpcMessage:
        """Return the reply to a client's request.

        Raises:
            ProtocolError: it is malformed, or exceeds the limits.
        """
        match request.kind, list(request.fields.values()):
            case "set", [str(key), str(value)]:
                self.set(key, from_text(value))
                result: JsonValue = None
            case "get", [str(key)]:
                found = self.get(key)
                result = None if found is None else to_text(found)
            case "check", [[*keys]] if all(isinstance(key, str) for key in keys):
                result = self.check(keys)
            case "add", [str(key), int(amount)] if abs(amount) < MAX_AMOUNT:
                result = self.add(key, amount)
            case "compare_set", [str(key), str(expected), str(desired)]:
                result = to_text(self.compare_set(key, from_text(expected), from_text(desired)))
            case "delete", [str(key)]:
                result = self.delete(key)
            case "refusals", []:
                result = list(self.refusals)
            case _:
                raise ProtocolError(f"{request.kind!r} is not a request to a store; check the client's version")
        return RpcMessage("done", {"result": result})


def to_text(value: bytes) -> str:
    """Return bytes as text."""
    return b64encode(value).decode("ascii")


def from_text(text: str) -> bytes:
    """Return the bytes of a text of :func:`to_text`.

    Raises:
        ProtocolError: it is not one.
    """
    try:
        return b64decode(text, validate=True)
    except ValueError as error:
        raise ProtocolError("a value is not in base64; check the client's version") from error


class RemoteTable:
    """Keys and values of another process's :class:`StoreServer`. Disconnects when it is freed.

    Args:
        address: of the server.
        credentials: of the job.
        timeout_s: longest wait for a reply.
        should_cancel: whether to stop connecting.

    Raises:
        ConnectionLostError: no process answers there.
        PeerError: another program or user answers, or connecting was cancelled.
        LaunchError: the address cannot be resolved, or there is no key beyond loopback.
    """

    def __init__(
        self,
        address: RpcAddress,
        credentials: JobCredentials,
        timeout_s: float,
        should_cancel: Callable[[], bool] = lambda: False,
    ) -> None:
        loop = EventLoop()
        self._timeout_s = timeout_s
        self._disconnect = weakref.finalize(self, loop.close)
        try:
            self._client = RpcClient(loop, address, credentials, STORE_LIMITS)
            self._client.wait_open(should_cancel)
        except BaseException:
            self._disconnect()
            raise

    def set(self, key: str, value: bytes) -> None:
        """Set the key's value."""
        self._request("set", key=key, value=to_text(value))

    def get(self, key: str) -> bytes | None:
        """Return the key's value; None if it is not set."""
        text = self._request("get", key=key)
        return None if text is None else from_text(text)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are set."""
        return bool(self._request("check", keys=list(keys)))

    def add(self, key: str, amount: int) -> int:
        """Add to the key's number, which is 0 at first; return the sum."""
        return int(self._request("add", key=key, amount=amount))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set the key's value if it is ``expected``; return the value afterwards."""
        return from_text(self._request("compare_set", key=key, expected=to_text(expected), desired=to_text(desired)))

    def delete(self, key: str) -> bool:
        """Delete the key; return whether it was set."""
        return bool(self._request("delete", key=key))

    @property
    def refusals(self) -> list[str]:
        """Who was not admitted because of its key, and why; the first few."""
        return [str(refusal) for refusal in self._request("refusals")]

    def _request(self, kind: str, **fields: JsonValue) -> JsonValue:
        """Return the server's result.

        Raises:
            DistNetworkError: the server is gone; torch's own stores raise it, too.
        """
        try:
            reply = self._client.request(RpcMessage(kind, fields)).wait(self._timeout_s)
        except PeerError as error:
            raise DistNetworkError(str(error)) from error
        return reply.fields.get("result")


class StoreServer:
    """Serves a table to clients that have the job's credentials, from a thread of its own; closed when it is freed.

    Args:
        address: to listen at.
        credentials: of the job.
        bound_socket: bound to the port, and taken over; with a UNIX socket it only keeps the port from other jobs,
            and may be None.

    Attributes:
        address: with the actual port.
        table: what it serves.

    Raises:
        LaunchError: cannot listen there.
    """

    def __init__(self, address: RpcAddress, credentials: JobCredentials, bound_socket: socket.socket | None) -> None:
        loop = EventLoop()
        self._finalize = weakref.finalize(self, close_server, loop, bound_socket)
        self.table = KeyValueTable()
        self.address = listen(
            loop,
            address,
            credentials,
            request_handler(self.table.reply),
            on_end=partial(note_refusal, self.table),
            limits=STORE_LIMITS,
            bound_socket=bound_socket if isinstance(address, TcpAddress) else None,
        ).address
        loop.start()

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._finalize()


def note_refusal(table: KeyValueTable, connection: Connection, error: PeerError | None) -> None:
    """Note who has ended because of its key: it may be a rank that the others wait for."""
    del connection
    if error is not None and isinstance(error.__cause__, KeyMismatchError) and len(table.refusals) < MAX_REFUSALS:
        table.refusals.append(str(error))


def close_server(loop: EventLoop, bound_socket: socket.socket | None) -> None:
    """Close all connections of a server, and what it listens on."""
    loop.close()
    if bound_socket is not None:
        bound_socket.close()


StoreValues: TypeAlias = KeyValueTable | RemoteTable


class KeyValueStore(Store):
    """A table as a ``torch.distributed.Store``; whoever gives it to C++ keeps it alive.

    Args:
        values: the table.
        timeout_s: longest wait for a key.
        prefix: of all keys.
        server: kept alive, if it is this process's.
    """

    def __init__(
        self, values: StoreValues, timeout_s: float, prefix: str = "", server: StoreServer | None = None
    ) -> None:
        super().__init__()
        self._values, self._timeout_s, self._prefix, self._server = values, timeout_s, prefix, server

    def with_prefix(self, prefix: str) -> KeyValueStore:
        """Return a store of the keys that start with the prefix, on the same table."""
        return KeyValueStore(self._values, self._timeout_s, f"{self._prefix}{prefix}/", self._server)

    def set(self, key: str, value: str | bytes) -> None:
        """Set the key's value."""
        self._values.set(self._prefix + key, as_bytes(value))

    def get(self, key: str) -> bytes:
        """Return the key's value, once it is set; raise DistStoreError if it is not in time."""
        self.wait([key])
        value = self._values.get(self._prefix + key)
        if value is None:
            raise DistStoreError(f"{key} was deleted")
        return value

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are set."""
        return self._values.check([self._prefix + key for key in keys])

    def add(self, key: str, amount: int) -> int:
        """Add to the key's number, which is 0 at first; return the sum."""
        return self._values.add(self._prefix + key, amount)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set the key's value if it is ``expected``; return the value afterwards."""
        return self._values.compare_set(self._prefix + key, as_bytes(expected), as_bytes(desired))

    def delete_key(self, key: str) -> bool:
        """Delete the key; return whether it was set."""
        return self._values.delete(self._prefix + key)

    def refusals(self) -> list[str]:
        """Return who was not admitted because of its key, and why; the first few."""
        return self._values.refusals

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set; raise DistStoreError if they are not in time."""
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        end = time.monotonic() + timeout_s
        while not self.check(keys):
            if time.monotonic() > end:
                raise DistStoreError(f"waited {timeout_s} s for {', '.join(keys)}")
            time.sleep(POLL_S)


def as_bytes(value: str | bytes) -> bytes:
    """Return a value as bytes."""
    return value.encode() if isinstance(value, str) else bytes(value)


def with_prefix(store: Store, prefix: str) -> Store:
    """Return a store of the keys that start with the prefix; torch's own would not keep ours alive."""
    return store.with_prefix(prefix) if isinstance(store, KeyValueStore) else PrefixStore(prefix, store)
