"""A connection: one socket to an authenticated peer, messages in both directions, and a single end.

State of a connection::

    CONNECTING --socket writable--> HANDSHAKE --peer authenticated--> OPEN --close()--> CLOSING --> ENDED
         |                              |                              |                  |
         +------------------------------+--- error, timeout, abort() --+------------------+-------> ENDED
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import termios
from array import array
from collections.abc import Callable
from enum import Enum
from math import inf
from typing import Final, TypeAlias

from counterpoint.errors import PeerError, ProtocolError
from counterpoint.rpc.address import RpcAddress, check_peer_credentials, shared_memory_with, start_connect
from counterpoint.rpc.buffers import ReceiveBufferPool
from counterpoint.rpc.channel import RpcChannel
from counterpoint.rpc.event_loop import READ, WRITE, EventLoop
from counterpoint.rpc.frame import DEFAULT_LIMITS, RpcLimits, RpcMessage
from counterpoint.rpc.handshake import NONCE_BYTES, JobCredentials, client_handshake

BYTES_PER_TURN = 1 << 22  # received or sent by one connection before others are served
MAX_LOW_WATERMARK_BYTES = 1 << 16  # bytes that must have arrived before the socket counts as readable


class ConnectionLostError(PeerError):
    """The connection was lost; whether the peer has received the last messages is unknown. The caller may reconnect."""


class NoListenerError(ConnectionLostError):
    """No process listens at the address, or its host is unreachable."""


class ConnectionState(Enum):
    """Phase of a connection."""

    CONNECTING = "connecting"
    HANDSHAKE = "handshake"
    OPEN = "open"
    CLOSING = "closing"
    ENDED = "ended"


class ConnectionRole(Enum):
    """Which side opened the connection."""

    CLIENT = "client"
    SERVER = "server"


OnRpcMessage: TypeAlias = Callable[["Connection", RpcMessage], None]
OnEnd: TypeAlias = Callable[["Connection", PeerError | None], None]


class Connection:
    """One side of a connection, driven by an event loop.

    Args:
        loop: event loop.
        peer: the socket.
        channel: the protocol state machine, its handshake started.
        limits: of this side.
        role: client or server.
        name: of the peer, for errors.
    """

    def __init__(
        self,
        loop: EventLoop,
        peer: socket.socket,
        channel: RpcChannel,
        limits: RpcLimits,
        *,
        role: ConnectionRole,
        name: str,
    ) -> None:
        self._loop = loop
        self._socket = peer
        self._channel = channel
        self._limits = limits
        self._role = role
        self._state = ConnectionState.CONNECTING
        self._last_progress_s = self._started_s = loop.clock()
        self._is_closing = self._is_receiving = False
        self._is_tcp, self._low_watermark_bytes = peer.family != socket.AF_UNIX, 1
        self._on_message: OnRpcMessage | None = None
        self._on_end: OnEnd | None = None
        self.name = name
        self.error: PeerError | None = None

    def start(self, on_message: OnRpcMessage | None, on_end: OnEnd | None) -> None:
        """Register with the loop; the callbacks receive messages and the end of the connection."""
        with self._loop.lock:
            self._on_message, self._on_end = on_message, on_end
            self._loop.watch(self, WRITE)

    @property
    def state(self) -> ConnectionState:
        """Current phase."""
        return self._state

    @property
    def is_ended(self) -> bool:
        """Whether the connection has ended."""
        return self._state is ConnectionState.ENDED

    @property
    def unsent_bytes(self) -> int:
        """Bytes that wait to be sent."""
        return self._channel.unsent_bytes

    @property
    def has_data_in_flight(self) -> bool:
        """Whether the peer's kernel has not received everything that was sent, or a frame is partially received."""
        if self._state is ConnectionState.ENDED:
            return False
        if self.unsent_bytes or self._channel.is_within_frame:
            return True
        num_queued = array("i", [0])
        fcntl.ioctl(self._socket, termios.TIOCOUTQ, num_queued)
        return num_queued[0] > 0

    @property
    def is_full(self) -> bool:
        """Whether the unsent data exceeds the limit; wait before sending more."""
        return self._channel.unsent_bytes > self._limits.unsent_bytes

    def send(self, message: RpcMessage) -> None:
        """Send a message; its tensors must not change until :attr:`unsent_bytes` is 0.

        Raises:
            PeerError: the connection has ended, or the message cannot be encoded.
        """
        with self._loop.lock:
            if self._is_closing or self._state is ConnectionState.ENDED:
                raise ConnectionLostError(f"the connection to {self.name} has ended; open another one") from self.error
            if not self._channel.pending_buffers():
                self._last_progress_s = self._loop.clock()
            self._channel.enqueue(message)
            if self._is_receiving or (not self.is_full and self._loop.defer(self._flush_and_watch)):
                return  # replies to messages that arrived together are sent together
            self._flush_and_watch()

    def close(self) -> None:
        """Send what is queued, then close the connection gracefully."""
        with self._loop.lock:
            if self._is_closing or self._state is ConnectionState.ENDED:
                return
            self._is_closing = True
            self._channel.enqueue_close()
            if self._state is ConnectionState.OPEN:
                self._state = ConnectionState.CLOSING
            self._flush_and_watch()

    def abort(self) -> None:
        """Close the connection immediately."""
        self._end(None)

    def fileno(self) -> int:
        """Return the socket's file descriptor."""
        return self._socket.fileno()

    @property
    def deadline(self) -> float:
        """When the peer will have taken too long."""
        if self._state in {ConnectionState.CONNECTING, ConnectionState.HANDSHAKE}:
            return self._started_s + self._limits.handshake_s
        if self._channel.has_releases and self._state is ConnectionState.OPEN:
            return -inf
        is_waiting = (
            self._channel.is_within_frame or self._channel.pending_buffers() or self._state is ConnectionState.CLOSING
        )
        return self._last_progress_s + self._limits.idle_timeout_s if is_waiting else inf

    def on_timeout(self) -> None:
        """End the connection if the peer has taken too long; send releases of shared buffers that are due."""
        if self._channel.has_releases and self._state is ConnectionState.OPEN:
            self._flush_and_watch()
            return
        if self._state is ConnectionState.CLOSING:
            self._end(None)
            return
        moved_s = self._last_progress_s
        if self._state is ConnectionState.OPEN:
            self._read()  # data below the low watermark may have arrived
        if self._state is ConnectionState.ENDED or self._last_progress_s > moved_s:
            return
        is_greeting = self._state in {ConnectionState.CONNECTING, ConnectionState.HANDSHAKE}
        limit_s, what = (
            (self._limits.handshake_s, "did not complete the handshake") if is_greeting else
            (self._limits.idle_timeout_s, f"neither received one of {self.unsent_bytes} bytes nor continued its frame")
        )  # fmt: skip
        kind = NoListenerError if self._state is ConnectionState.CONNECTING else ConnectionLostError
        self._end(kind(f"{self.name} {what} within {limit_s} s; check what it is doing, and the network"))

    def on_ready(self, events: int) -> None:
        """Read from or write to the socket."""
        if self._state is ConnectionState.CONNECTING:
            self._on_connected()
        if events & READ:
            self._read()
        self._flush_and_watch()

    def _read(self) -> None:
        """Process received bytes, or end the connection."""
        self._is_receiving = True
        try:
            self._receive()
        except ProtocolError as error:
            self._on_protocol_error(error)
        finally:
            self._is_receiving = False

    def _on_connected(self) -> None:
        """Check the outcome of connecting, and the peer's user if the kernel knows it."""
        if number := self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._end(NoListenerError(str(self._lost_error(OSError(number, os.strerror(number))))))
            return
        try:
            check_peer_credentials(self._socket)
        except PeerError as error:
            self._end(error)
            return
        self._state = ConnectionState.HANDSHAKE

    def _receive(self) -> None:
        """Receive until no data is left or the budget of this call is spent; raise ProtocolError for invalid data."""
        budget = BYTES_PER_TURN
        while budget > 0 and self._state is not ConnectionState.ENDED and not self._is_paused:
            buffers = self._channel.receive_buffers()
            try:
                num_bytes = (
                    self._socket.recv_into(buffers[0]) if len(buffers) == 1 else self._socket.recvmsg_into(buffers)[0]
                )
            except BlockingIOError:
                break
            except OSError as error:
                self._on_socket_error(error)
                return
            if not num_bytes:
                self._on_eof()
                return
            budget -= num_bytes
            self._last_progress_s = self._loop.clock()
            self._on_bytes(num_bytes)
        if self._state is not ConnectionState.ENDED:
            self._set_low_watermark()

    def _set_low_watermark(self) -> None:
        """Let the socket become readable only when the missing bytes, or enough of them, have arrived."""
        num_bytes = min(sum(map(len, self._channel.receive_buffers())), MAX_LOW_WATERMARK_BYTES)
        if self._is_tcp and num_bytes != self._low_watermark_bytes:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
            self._low_watermark_bytes = num_bytes

    @property
    def _is_paused(self) -> bool:
        """Whether a server stops reading because its replies are not being received.

        A client always reads: if both stopped, neither would continue.
        """
        return self._role is ConnectionRole.SERVER and self.is_full

    def _on_bytes(self, num_bytes: int) -> None:
        message = self._channel.on_bytes(num_bytes)
        if self._state is ConnectionState.HANDSHAKE and self._channel.is_open:
            self._state = ConnectionState.CLOSING if self._is_closing else ConnectionState.OPEN
        if message is not None and self._state is ConnectionState.OPEN and self._on_message is not None:
            self._on_message(self, message)
        if self._channel.is_closed_by_peer:
            self._end(None)

    def _on_eof(self) -> None:
        """Process that the peer closed the socket."""
        if self._state is ConnectionState.CLOSING:
            self._end(None)
            return
        try:
            self._channel.on_eof()
        except ProtocolError as error:
            self._end(ConnectionLostError(f"{self.name} closed the connection: {error}"))
        else:
            self._end(
                ConnectionLostError(
                    f"{self.name} closed the connection unexpectedly; check why it ended, then reconnect"
                )
            )

    def _flush_and_watch(self) -> None:
        """Send what can be sent, and watch the socket for the rest."""
        if self._state is ConnectionState.ENDED:
            return
        try:
            self._flush()
            has_pending = bool(self._channel.pending_buffers())
            if self._state is ConnectionState.CLOSING and not has_pending:
                self._socket.shutdown(socket.SHUT_WR)
        except OSError as error:
            self._on_socket_error(error)
            return
        self._loop.watch(self, (0 if self._is_paused else READ) | (WRITE if has_pending else 0))

    def _flush(self) -> None:
        if self._state in {ConnectionState.CONNECTING, ConnectionState.ENDED}:
            return
        budget = BYTES_PER_TURN
        while budget > 0 and (pending := self._channel.pending_buffers()):
            try:
                num_bytes = self._socket.sendmsg(pending)
            except BlockingIOError:
                return
            self._channel.on_sent(num_bytes)
            self._last_progress_s = self._loop.clock()
            budget -= num_bytes

    def _on_protocol_error(self, error: ProtocolError) -> None:
        """End the connection; during the handshake, send the pending refusal first."""
        if self._state is ConnectionState.HANDSHAKE and not self._channel.is_open:
            try:
                self._flush()
            except OSError as cause:
                error.add_note(f"the refusal could not be sent: {cause}")
        peer_error = ProtocolError(f"{self.name}: {error}")
        peer_error.__cause__ = error
        self._end(peer_error)

    def _on_socket_error(self, error: OSError) -> None:
        """End the connection; this is not an error if everything, including the close frame, had been sent."""
        is_done = self._state is ConnectionState.CLOSING and not self._channel.pending_buffers()
        self._end(None if is_done else self._lost_error(error))

    def _lost_error(self, error: OSError) -> ConnectionLostError:
        reason = (error.strerror or str(error)).lower()
        return ConnectionLostError(f"{self.name} is unreachable ({reason}); check that it runs, then reconnect")

    def _end(self, error: PeerError | None) -> None:
        if self._state is ConnectionState.ENDED:
            return
        self._state, self.error = ConnectionState.ENDED, error
        self._loop.unwatch(self)
        self._socket.close()
        self._channel.close()
        if self._on_end is not None:
            self._on_end(self, error)


UNIX_BUFFER_BYTES: Final = 1 << 22  # capped by the system's limit


def connect(
    loop: EventLoop,
    address: RpcAddress,
    credentials: JobCredentials,
    on_message: OnRpcMessage,
    *,
    on_end: OnEnd | None = None,
    limits: RpcLimits = DEFAULT_LIMITS,
) -> Connection:
    """Return a connection that is being established; messages may be sent immediately.

    Args:
        loop: event loop.
        address: of the server.
        credentials: of the job.
        on_message: called with the connection and each message.
        on_end: called once with the connection and the reason of its end; None after a graceful close.
        limits: of this side.

    Raises:
        LaunchError: the address cannot be resolved, or is of TCP without a key.
        NoListenerError: no process listens there.
    """
    try:
        peer = start_connect(address, is_keyed=credentials.key is not None)
    except OSError as error:
        raise NoListenerError(f"no process listens at {address}; check that the server runs, then reconnect") from error
    set_socket_options(peer, limits)
    handshake = client_handshake(credentials, credentials.security_mode(address), secrets.token_bytes(NONCE_BYTES))
    channel = RpcChannel(handshake, limits, ReceiveBufferPool(), shared_memory_with(peer))
    connection = Connection(loop, peer, channel, limits, role=ConnectionRole.CLIENT, name=f"server {address}")
    connection.start(on_message, on_end)
    return connection


def set_socket_options(peer: socket.socket, limits: RpcLimits) -> None:
    """Send small messages immediately, and detect a peer whose host is gone."""
    if peer.family == socket.AF_UNIX:  # fixed size, whereas TCP tunes its own
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_BUFFER_BYTES)
        return
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(limits.idle_timeout_s / 2)))
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(limits.idle_timeout_s / 6)))
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limits.idle_timeout_s * 1000))
