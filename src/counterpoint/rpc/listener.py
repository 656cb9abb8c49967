"""Accept connections at an address."""

from __future__ import annotations

import errno
import secrets
import socket
from collections.abc import Callable
from math import inf
from typing import Final, TypeAlias

from counterpoint.errors import PeerError
from counterpoint.rpc.address import RpcAddress, UnixAddress, open_listen_socket, peer_credentials, shared_memory_with
from counterpoint.rpc.buffers import ReceiveBufferPool
from counterpoint.rpc.channel import RpcChannel
from counterpoint.rpc.connection import (
    Connection,
    ConnectionRole,
    ConnectionState,
    OnEnd,
    OnRpcMessage,
    set_socket_options,
)
from counterpoint.rpc.event_loop import READ, EventLoop
from counterpoint.rpc.frame import DEFAULT_LIMITS, RpcLimits, RpcMessage
from counterpoint.rpc.handshake import NONCE_BYTES, JobCredentials, server_handshake

ACCEPTS_PER_TURN: Final = 16
ACCEPT_RETRY_S: Final = 1.0  # pause of accepting when this process has no file descriptor left
OUT_OF_RESOURCES: Final = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}

ReplyFunction: TypeAlias = Callable[[RpcMessage], RpcMessage]


def listen(  # noqa: PLR0913 - most by keyword
    loop: EventLoop,
    address: RpcAddress,
    credentials: JobCredentials,
    on_message: OnRpcMessage,
    *,
    on_end: OnEnd | None = None,
    limits: RpcLimits = DEFAULT_LIMITS,
    bound_socket: socket.socket | None = None,
) -> Listener:
    """Return a listener; its ``address`` has the actual port.

    Args:
        loop: event loop.
        address: to listen at.
        credentials: of the job.
        on_message: called with the connection and each message; a ProtocolError from it ends the connection.
        on_end: called with each connection that ends, unauthenticated ones included, and the reason; None after a
            graceful close.
        limits: for each connection.
        bound_socket: a TCP socket that is bound to the address already, taken over; None to bind one.

    Raises:
        LaunchError: the address is in use, or of TCP without a key.
    """
    listener, actual_address = open_listen_socket(
        address, is_keyed=credentials.key is not None, bound_socket=bound_socket
    )
    with loop.lock:
        server = Listener(loop, listener, actual_address, credentials, limits)
        server.on_message, server.on_end = on_message, on_end
        loop.watch(server, READ)
    return server


def request_handler(reply: ReplyFunction) -> OnRpcMessage:
    """Return a message callback that replies to every message, in order."""
    return lambda connection, message: connection.send(reply(message))


class Listener:
    """A listening socket and the connections accepted from it.

    Args:
        loop: event loop.
        listen_socket: the socket.
        address: its address.
        credentials: of the job.
        limits: for its connections.
    """

    def __init__(
        self,
        loop: EventLoop,
        listen_socket: socket.socket,
        address: RpcAddress,
        credentials: JobCredentials,
        limits: RpcLimits,
    ) -> None:
        self._loop = loop
        self._socket = listen_socket
        self._credentials = credentials
        self._limits = limits
        self._pool = ReceiveBufferPool()
        self._connections: dict[Connection, None] = {}  # in order of arrival
        self._count = 0
        self.on_message: OnRpcMessage | None = None
        self.on_end: OnEnd | None = None
        self.address = address
        self.deadline = inf

    @property
    def connections(self) -> list[Connection]:
        """Authenticated connections that have not ended."""
        return [
            connection
            for connection in self._connections
            if connection.state in {ConnectionState.OPEN, ConnectionState.CLOSING}
        ]

    @property
    def num_unauthenticated(self) -> int:
        """Number of connections that are not authenticated yet."""
        return len(self._connections) - len(self.connections)

    def close(self) -> None:
        """Stop listening, drop unauthenticated connections, and close the others gracefully."""
        with self._loop.lock:
            self._stop_listening()
            for connection in list(self._connections):
                if connection.state is ConnectionState.OPEN:
                    connection.close()
                else:
                    connection.abort()

    def abort(self) -> None:
        """Stop listening; connections end on their own."""
        self._stop_listening()

    def _stop_listening(self) -> None:
        self._loop.unwatch(self)
        self._socket.close()

    def fileno(self) -> int:
        """Return the socket's file descriptor."""
        return self._socket.fileno()

    def on_ready(self, events: int) -> None:
        """Accept new connections."""
        del events
        for _ in range(ACCEPTS_PER_TURN):
            try:
                peer, address = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in OUT_OF_RESOURCES:
                    self.deadline = self._loop.clock() + ACCEPT_RETRY_S
                    self._loop.watch(self, 0)
                return  # or the client has closed already
            self._accept(peer, address)

    def on_timeout(self) -> None:
        """Accept connections again."""
        self.deadline = inf
        self._loop.watch(self, READ)

    def _accept(self, peer: socket.socket, address: object) -> None:
        """Start the handshake with a new connection; drop the oldest unauthenticated one if there are too many."""
        if len(self._connections) - self.num_unauthenticated >= self._limits.max_connections:
            peer.close()
            return
        if self.num_unauthenticated >= self._limits.max_unauthenticated:
            next(
                connection
                for connection in self._connections
                if connection.state in {ConnectionState.CONNECTING, ConnectionState.HANDSHAKE}
            ).abort()
        self._count += 1
        name = (
            f"client {self._count} (pid {peer_credentials(peer)[0]}) at {self.address}"
            if isinstance(self.address, UnixAddress)
            else f"client {_format_address(address)}"
        )
        peer.setblocking(False)
        set_socket_options(peer, self._limits)
        handshake = server_handshake(
            self._credentials, self._credentials.security_mode(self.address), secrets.token_bytes(NONCE_BYTES)
        )
        channel = RpcChannel(handshake, self._limits, self._pool, shared_memory_with(peer))
        connection = Connection(self._loop, peer, channel, self._limits, role=ConnectionRole.SERVER, name=name)
        self._connections[connection] = None
        connection.start(self.on_message, self._on_end)

    def _on_end(self, connection: Connection, error: PeerError | None) -> None:
        del self._connections[connection]
        if self.on_end is not None:
            self.on_end(connection, error)


def _format_address(address: object) -> str:
    return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "of a socket"
