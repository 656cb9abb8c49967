"""Questions to one server that answers each in its turn, and waits with a deadline and a name."""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import Self

from counterpoint.errors import PeerError, ProtocolError
from counterpoint.rpc.address import RpcAddress
from counterpoint.rpc.connection import Connection, ConnectionLostError, ConnectionState, connect
from counterpoint.rpc.event_loop import EventLoop
from counterpoint.rpc.frame import DEFAULT_LIMITS, RpcLimits, RpcMessage
from counterpoint.rpc.handshake import JobCredentials


class PendingReply:
    """A letter that was sent, and the answer when it has come."""

    def __init__(self, client: RpcClient, kind: str) -> None:
        self._client = client
        self.kind = kind
        self.reply: RpcMessage | None = None

    def wait(self, timeout_s: float) -> RpcMessage:
        """Return the answer.

        Args:
            deadline_s: the longest that this lasts.

        Raises:
            ConnectionLostError: the server is gone; whether it has read the question is not known.
            PeerError: it has not answered.
        """
        return self._client.wait_reply(self, timeout_s)


class RpcClient:
    """Asks a server that answers every letter; see :func:`counterpoint.rpc.listener.replying`.

    Args:
        loop: that looks after the connection.
        place: where the server is.
        secret: of the job.
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
        """The server has proved that it has the key, and has not gone."""
        return self._connection.state is ConnectionState.OPEN

    def wait_open(self) -> None:
        """The server has proved that it has the key; a PeerError says why not."""
        what = f"the greeting of {self._connection.name}"
        self._loop.wait_for(lambda: self.is_open or self._connection.is_ended, 2 * self._limits.handshake_s, what)
        if self._connection.is_ended:
            raise self._end_reason("instead of a greeting")

    def request(self, message: RpcMessage) -> PendingReply:
        """Return the question, which is on its way; several may be.

        Raises:
            ConnectionLostError: the server is gone.
            PeerError: it has not taken what was sent before.
        """
        what = f"{self._connection.name} to take what was sent before {message.kind!r}"
        self._loop.wait_for(
            lambda: not self._connection.is_full or self._connection.is_ended, self._limits.idle_timeout_s, what
        )
        question = PendingReply(self, message.kind)
        with self._loop.lock:
            if self._connection.is_ended:
                raise self._end_reason(f"before {message.kind!r} was asked")
            self._pending.append(question)
            self._connection.send(message)
        return question

    def wait_reply(self, pending: PendingReply, timeout_s: float) -> RpcMessage:
        """Return the answer to a question; a PeerError says why there is none."""
        what = f"the answer of {self._connection.name} to {pending.kind!r}, {len(self._pending)} being open"
        self._loop.wait_for(lambda: pending.reply is not None or self._connection.is_ended, timeout_s, what)
        if pending.reply is None:
            raise self._end_reason(f"before it answered {pending.kind!r}")
        return pending.reply

    def close(self) -> None:
        """What was asked has been sent, and the connection is closed."""
        self._connection.close()
        what = f"{self._connection.name} to take the goodbye"
        self._loop.wait_for(lambda: self._connection.is_ended, self._limits.idle_timeout_s + 1.0, what)

    def _end_reason(self, when: str) -> PeerError:
        """Return why the connection has ended."""
        return self._connection.error or ConnectionLostError(
            f"{self._connection.name} said goodbye {when}; look at why, then call again"
        )

    def _on_message(self, _: Connection, letter: RpcMessage) -> None:
        if not self._pending:
            raise ProtocolError(f"an answer {letter.kind!r} to nothing that was asked; look at what the server runs")
        self._pending.popleft().reply = letter

    def __enter__(self) -> Self:
        self.wait_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._connection.abort()
