"""Blocking client of a server that replies to every message in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

from counterpoint.errors import PeerError, ProtocolError
from counterpoint.rpc.address import RpcAddress
from counterpoint.rpc.connection import Connection, ConnectionLostError, ConnectionState, NoListenerError, connect
from counterpoint.rpc.event_loop import EventLoop
from counterpoint.rpc.frame import DEFAULT_LIMITS, RpcLimits, RpcMessage
from counterpoint.rpc.handshake import JobCredentials


class PendingReply:
    """A request that was sent, and its reply once it has arrived."""

    def __init__(self, client: RpcClient, kind: str) -> None:
        self._client = client
        self.kind = kind
        self.reply: RpcMessage | None = None

    def wait(self, timeout_s: float) -> RpcMessage:
        """Return the reply.

        Args:
            timeout_s: longest wait.

        Raises:
            ConnectionLostError: the connection was lost; whether the server has received the request is unknown.
            PeerError: no reply in time.
        """
        return self._client.wait_reply(self, timeout_s)


class RpcClient:
    """Client of a server that replies to every message; see :func:`counterpoint.rpc.listener.request_handler`.

    Args:
        loop: event loop.
        address: of the server.
        credentials: of the job.
        limits: of this side.
    """

    def __init__(
        self, loop: EventLoop, address: RpcAddress, credentials: JobCredentials, limits: RpcLimits = DEFAULT_LIMITS
    ) -> None:
        self._loop = loop
        self._limits = limits
        self._pending: deque[PendingReply] = deque()
        self._connection = connect(loop, address, credentials, self._on_message, limits=limits)

    @property
    def is_open(self) -> bool:
        """Whether the connection is established and authenticated."""
        return self._connection.state is ConnectionState.OPEN

    def wait_open(self, should_cancel: Callable[[], bool] = lambda: False) -> None:
        """Wait until the connection is open; raise PeerError if it fails or the wait is cancelled."""
        what = f"the handshake with {self._connection.name}"
        self._loop.wait_for(
            lambda: self.is_open or self._connection.is_ended or should_cancel(), 2 * self._limits.handshake_s, what
        )
        if not self.is_open and not self._connection.is_ended:
            kind = NoListenerError if self._connection.state is ConnectionState.CONNECTING else ConnectionLostError
            self._connection.abort()
            raise kind(f"{self._connection.name} has not completed the handshake; check what it is doing")
        if self._connection.is_ended:
            raise self._end_reason("during the handshake")

    def request(self, message: RpcMessage) -> PendingReply:
        """Send a request; several may be outstanding.

        Raises:
            ConnectionLostError: the connection was lost.
            PeerError: the server does not receive earlier requests.
        """
        what = f"{self._connection.name} to receive what was sent before {message.kind!r}"
        self._loop.wait_for(
            lambda: not self._connection.is_full or self._connection.is_ended, self._limits.idle_timeout_s, what
        )
        pending = PendingReply(self, message.kind)
        with self._loop.lock:
            if self._connection.is_ended:
                raise self._end_reason(f"before {message.kind!r} was sent")
            self._pending.append(pending)
            self._connection.send(message)
        return pending

    def wait_reply(self, pending: PendingReply, timeout_s: float) -> RpcMessage:
        """Return the reply to a request; raise PeerError if there is none."""
        what = f"the reply of {self._connection.name} to {pending.kind!r}, {len(self._pending)} outstanding"
        self._loop.wait_for(lambda: pending.reply is not None or self._connection.is_ended, timeout_s, what)
        if pending.reply is None:
            raise self._end_reason(f"before it replied to {pending.kind!r}")
        return pending.reply

    def close(self) -> None:
        """Send what is queued, and close the connection."""
        self._connection.close()
        what = f"{self._connection.name} to close"
        self._loop.wait_for(lambda: self._connection.is_ended, self._limits.idle_timeout_s + 1.0, what)

    def _end_reason(self, when: str) -> PeerError:
        """Return why the connection has ended."""
        return self._connection.error or ConnectionLostError(
            f"{self._connection.name} closed the connection {when}; check why, then reconnect"
        )

    def _on_message(self, _: Connection, message: RpcMessage) -> None:
        if not self._pending:
            raise ProtocolError(
                f"unexpected reply {message.kind!r}: no request is outstanding; check the server's version"
            )
        self._pending.popleft().reply = message

    def __enter__(self) -> Self:
        self.wait_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._connection.abort()
