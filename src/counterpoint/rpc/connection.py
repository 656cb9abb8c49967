"""A connection: one socket to a peer that has the key, letters both ways, and one end that everybody hears of.

The end of the wire that calls.
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

BYTES_PER_TURN = 1 << 22  # that one connection receives or sends before others have their turn
MAX_LOW_WATERMARK_BYTES = 1 << 16  # of what is missing, so many are there before a side looks: packets come one by one


class ConnectionLostError(PeerError):
    """The connection is gone; whether the peer has read what was sent last is not known. A caller may call again."""


class ConnectionState(Enum):
    """How far a connection has come."""

    CONNECTING = "calling"
    HANDSHAKE = "greeting"
    OPEN = "open"
    CLOSING = "closing"
    ENDED = "ended"


class ConnectionRole(Enum):
    """Which part a side has."""

    CLIENT = "asks"
    SERVER = "answers"


OnRpcMessage: TypeAlias = Callable[["Connection", RpcMessage], None]
OnEnd: TypeAlias = Callable[["Connection", PeerError | None], None]


class Connection:
    """One side of a connection, looked after by a loop.

    Args:
        loop: that looks after it.
        peer: the socket.
        channel: the state machine, its greeting begun.
        limits: of this side.
        side: which it is.
        name: of the other side, for errors.
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
        """The loop looks after the connection, and these hear of its letters and of its end."""
        with self._loop.lock:
            self._on_message, self._on_end = on_message, on_end
            self._loop.watch(self, WRITE)

    @property
    def state(self) -> ConnectionState:
        """How far it has come."""
        return self._state

    @property
    def is_ended(self) -> bool:
        """There is no connection any more."""
        return self._state is ConnectionState.ENDED

    @property
    def unsent_bytes(self) -> int:
        """How much waits for the peer to take it."""
        return self._channel.unsent_bytes

    @property
    def has_data_in_flight(self) -> bool:
        """Something is on its way: the peer's system has not taken all that was sent, or half of a frame has come."""
        if self._state is ConnectionState.ENDED:
            return False
        if self.unsent_bytes or self._channel.is_within_frame:
            return True
        waiting = array("i", [0])
        fcntl.ioctl(self._socket, termios.TIOCOUTQ, waiting)
        return waiting[0] > 0

    @property
    def is_full(self) -> bool:
        """More waits than this side wants to keep; send when it does not."""
        return self._channel.unsent_bytes > self._limits.unsent_bytes

    def send(self, message: RpcMessage) -> None:
        """The letter is on its way, or will be; its tensors must stay as they are until :attr:`unsent_bytes` is 0.

        Raises:
            PeerError: the connection has ended, or the letter cannot travel.
        """
        with self._loop.lock:
            if self._is_closing or self._state is ConnectionState.ENDED:
                raise ConnectionLostError(f"the connection to {self.name} has ended; open another one") from self.error
            if not self._channel.pending_buffers():
                self._last_progress_s = self._loop.clock()
            self._channel.enqueue(message)
            if self._is_receiving or (not self.is_full and self._loop.defer(self._flush_and_watch)):
                return  # answers to what has come together leave together
            self._flush_and_watch()

    def close(self) -> None:
        """What was sent before will arrive, and then the other side hears that nothing follows."""
        with self._loop.lock:
            if self._is_closing or self._state is ConnectionState.ENDED:
                return
            self._is_closing = True
            self._channel.enqueue_close()
            if self._state is ConnectionState.OPEN:
                self._state = ConnectionState.CLOSING
            self._flush_and_watch()

    def abort(self) -> None:
        """The connection is gone, at once."""
        self._end(None)

    def fileno(self) -> int:
        """Return the socket's descriptor."""
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
        """The peer has taken too long, or should hear what it gets back."""
        if self._channel.has_releases and self._state is ConnectionState.OPEN:
            self._flush_and_watch()
            return
        if self._state is ConnectionState.CLOSING:
            self._end(None)
            return
        moved_s = self._last_progress_s
        if self._state is ConnectionState.OPEN:
            self._read()  # what has come may be less than what it sleeps for
        if self._state is ConnectionState.ENDED or self._last_progress_s > moved_s:
            return
        is_greeting = self._state in {ConnectionState.CONNECTING, ConnectionState.HANDSHAKE}
        limit_s, what = (
            (self._limits.handshake_s, "did not greet") if is_greeting else
            (self._limits.idle_timeout_s, f"neither took one of {self.unsent_bytes} bytes nor went on with its frame")
        )  # fmt: skip
        self._end(
            ConnectionLostError(f"{self.name} {what} within {limit_s} s; look at what it does, or at the network")
        )

    def on_ready(self, events: int) -> None:
        """The socket can be read or written."""
        if self._state is ConnectionState.CONNECTING:
            self._on_connected()
        if events & READ:
            self._read()
        self._flush_and_watch()

    def _read(self) -> None:
        """What has come has been heard, or the connection has ended."""
        self._is_receiving = True
        try:
            self._receive()
        except ProtocolError as error:
            self._on_protocol_error(error)
        finally:
            self._is_receiving = False

    def _on_connected(self) -> None:
        """The peer is there, and of the same user where the kernel knows, or the connection has ended."""
        if number := self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._end(self._lost_error(OSError(number, os.strerror(number))))
            return
        try:
            check_peer_credentials(self._socket)
        except PeerError as error:
            self._end(error)
            return
        self._state = ConnectionState.HANDSHAKE

    def _receive(self) -> None:
        """What has come, or enough of it, has been read; a ProtocolError where it may not come."""
        left = BYTES_PER_TURN
        while left > 0 and self._state is not ConnectionState.ENDED and not self._is_paused:
            wanted = self._channel.receive_buffers()
            try:
                num_bytes = (
                    self._socket.recv_into(wanted[0]) if len(wanted) == 1 else self._socket.recvmsg_into(wanted)[0]
                )
            except BlockingIOError:
                break
            except OSError as error:
                self._on_socket_error(error)
                return
            if not num_bytes:
                self._on_eof()
                return
            left -= num_bytes
            self._last_progress_s = self._loop.clock()
            self._on_bytes(num_bytes)
        if self._state is not ConnectionState.ENDED:
            self._set_low_watermark()

    def _set_low_watermark(self) -> None:
        """The socket counts as readable when what is missing has come, or enough of it, or its end."""
        num_bytes = min(sum(map(len, self._channel.receive_buffers())), MAX_LOW_WATERMARK_BYTES)
        if self._is_tcp and num_bytes != self._low_watermark_bytes:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
            self._low_watermark_bytes = num_bytes

    @property
    def _is_paused(self) -> bool:
        """This side answers, and reads nothing more before its answers have gone.

        The side that asks always reads: if both stopped, neither would go on.
        """
        return self._role is ConnectionRole.SERVER and self.is_full

    def _on_bytes(self, num_bytes: int) -> None:
        """So many bytes have come."""
        letter = self._channel.on_bytes(num_bytes)
        if self._state is ConnectionState.HANDSHAKE and self._channel.is_open:
            self._state = ConnectionState.CLOSING if self._is_closing else ConnectionState.OPEN
        if letter is not None and self._state is ConnectionState.OPEN and self._on_message is not None:
            self._on_message(self, letter)
        if self._channel.is_closed_by_peer:
            self._end(None)

    def _on_eof(self) -> None:
        """The other side has closed the connection."""
        if self._state is ConnectionState.CLOSING:
            self._end(None)
            return
        try:
            self._channel.on_eof()
        except ProtocolError as error:
            self._end(ConnectionLostError(f"{self.name} is gone: {error}"))
        else:
            self._end(
                ConnectionLostError(f"{self.name} is gone without a goodbye; look at why it ended, then call again")
            )

    def _flush_and_watch(self) -> None:
        """What can be sent has been, and the loop watches for what is left."""
        if self._state is ConnectionState.ENDED:
            return
        try:
            self._flush()
            is_left = bool(self._channel.pending_buffers())
            if self._state is ConnectionState.CLOSING and not is_left:
                self._socket.shutdown(socket.SHUT_WR)
        except OSError as error:
            self._on_socket_error(error)
            return
        self._loop.watch(self, (0 if self._is_paused else READ) | (WRITE if is_left else 0))

    def _flush(self) -> None:
        if self._state in {ConnectionState.CONNECTING, ConnectionState.ENDED}:
            return
        left = BYTES_PER_TURN
        while left > 0 and (pending := self._channel.pending_buffers()):
            try:
                num_bytes = self._socket.sendmsg(pending)
            except BlockingIOError:
                return
            self._channel.on_sent(num_bytes)
            self._last_progress_s = self._loop.clock()
            left -= num_bytes

    def _on_protocol_error(self, error: ProtocolError) -> None:
        """The peer has broken a rule: it hears the last words of a greeting, if there are any, and no more."""
        if self._state is ConnectionState.HANDSHAKE and not self._channel.is_open:
            try:
                self._flush()
            except OSError as cause:
                error.add_note(f"it could not be told: {cause}")
        named = ProtocolError(f"{self.name}: {error}")
        named.__cause__ = error
        self._end(named)

    def _on_socket_error(self, error: OSError) -> None:
        """The connection is gone; that is no loss if this side has said goodbye, and all before it."""
        is_done = self._state is ConnectionState.CLOSING and not self._channel.pending_buffers()
        self._end(None if is_done else self._lost_error(error))

    def _lost_error(self, error: OSError) -> ConnectionLostError:
        why = (error.strerror or str(error)).lower()
        return ConnectionLostError(f"{self.name} is gone ({why}); look at whether it runs, then call again")

    def _end(self, error: PeerError | None) -> None:
        if self._state is ConnectionState.ENDED:
            return
        self._state, self.error = ConnectionState.ENDED, error
        self._loop.unwatch(self)
        self._socket.close()
        self._channel.close()
        if self._on_end is not None:
            self._on_end(self, error)


UNIX_BUFFER_BYTES: Final = 1 << 22  # or as much as the system allows


def connect(
    loop: EventLoop,
    address: RpcAddress,
    credentials: JobCredentials,
    on_message: OnRpcMessage,
    *,
    on_end: OnEnd | None = None,
    limits: RpcLimits = DEFAULT_LIMITS,
) -> Connection:
    """Return a connection that is on its way; letters may be sent at once, and leave when the server has greeted.

    Args:
        loop: that looks after it.
        place: where the server is.
        secret: of the job.
        on_letter: called with the connection and each letter that comes.
        on_end: called once, with the connection and why it ended; None after a goodbye.
        limits: of this side.

    Raises:
        LaunchError: the place leads nowhere, or is beyond loopback and there is no key.
        ConnectionLostError: nobody listens there.
    """
    try:
        peer = start_connect(address, is_keyed=credentials.key is not None)
    except OSError as error:
        raise ConnectionLostError(
            f"nobody listens at {address}; look at whether the server runs, then call again"
        ) from error
    set_socket_options(peer, limits)
    greeting = client_handshake(credentials, credentials.security_mode(address), secrets.token_bytes(NONCE_BYTES))
    channel = RpcChannel(greeting, limits, ReceiveBufferPool(), shared_memory_with(peer))
    connection = Connection(loop, peer, channel, limits, role=ConnectionRole.CLIENT, name=f"server {address}")
    connection.start(on_message, on_end)
    return connection


def set_socket_options(peer: socket.socket, limits: RpcLimits) -> None:
    """Small letters leave at once, and a peer whose host is gone is found out."""
    if peer.family == socket.AF_UNIX:  # it keeps the size that it begins with, TCP finds a better one
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_BUFFER_BYTES)
        return
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(limits.idle_timeout_s / 2)))
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(limits.idle_timeout_s / 6)))
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limits.idle_timeout_s * 1000))
