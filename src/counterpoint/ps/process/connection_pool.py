"""Connections of a process to other members: send to a member by name and incarnation, connecting if necessary.

The state machines resend requests that have had no reply for some time, since a network may lose messages. A connection
loses messages only when it breaks, so a resend on the same connection waits until nothing is in flight in either
direction, then twice as long each time. After a rejection, everything may be resent immediately.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

from counterpoint.errors import CounterpointError, LaunchError, PeerError
from counterpoint.ps.message_codec import PsMessage
from counterpoint.ps.messages import (
    Ack,
    InitRequest,
    InstallSnapshot,
    JoinClock,
    JoinReply,
    JoinRequest,
    LeaveClock,
    PullReply,
    PullRequest,
    PushReply,
    PushRequest,
    Rejected,
    ReplicateEntry,
    ReplicationAck,
)
from counterpoint.ps.process.message_framing import BATCHED_TYPES, MessageAssembler, MessageBatch, to_rpc_messages
from counterpoint.rpc.address import RpcAddress, check_reachable, parse_address
from counterpoint.rpc.connection import Connection, ConnectionLostError, connect
from counterpoint.rpc.event_loop import EventLoop
from counterpoint.rpc.frame import DEFAULT_LIMITS, RpcLimits, RpcMessage
from counterpoint.rpc.handshake import JobCredentials
from counterpoint.rpc.listener import Listener, listen

RequestKey: TypeAlias = tuple[str, int, int]


class RetransmitFilter:
    """Requests outstanding on one connection.

    Args:
        initial_delay_s: delay before the first resend; each further one doubles it.
    """

    def __init__(self, initial_delay_s: float) -> None:
        self._initial_delay_s = initial_delay_s
        self._sent: dict[RequestKey, tuple[int, float, float]] = {}

    def should_send(self, message: PsMessage, now: float, is_moving: Callable[[], bool]) -> bool:
        """Tell whether to send a message now; it is then counted as sent.

        Args:
            message: to be sent.
            now: current time.
            is_moving: tells whether data is in flight on the connection; called only before a resend.
        """
        key = _request_key(message)
        if key is None:
            return True
        generation = message.header.generation  # type: ignore[union-attr]
        previous = self._sent.get(key)
        delay_s = self._initial_delay_s
        if previous is not None and previous[0] == generation:
            if now < previous[1]:
                return False
            if is_moving():
                self._sent[key] = (generation, now + previous[2], previous[2])
                return False
            delay_s = 2 * previous[2]
        self._sent[key] = (generation, now + delay_s, delay_s)
        return True

    def on_reply(self, message: PsMessage) -> None:
        """Forget the request that a message answers."""
        match message:
            case PushReply() | Ack():
                self._sent.pop(("change", message.shard, message.sequence), None)
            case PullReply():
                self._sent.pop(("pull", message.shard, message.ticket), None)
            case ReplicationAck():
                self._sent = {
                    key: entry
                    for key, entry in self._sent.items()
                    if key[:2] != ("replicate", message.shard) or key[2] >= message.position
                }
                self._sent.pop(("install", message.shard, 0), None)
            case Rejected():
                self._sent.clear()
            case _:
                pass


def _request_key(message: PsMessage) -> RequestKey | None:
    """Return the key of a request among those to one server; None if it may be sent at any time."""
    match message:
        case InitRequest() | PushRequest() | JoinClock() | LeaveClock():
            return "change", message.shard, message.header.sequence
        case PullRequest():
            return "pull", message.shard, message.ticket
        case ReplicateEntry():
            return "replicate", message.shard, message.position
        case InstallSnapshot():
            return "install", message.shard, 0
        case _:
            return None


RECONNECT_DELAY_S = 0.2
"""Delay before another attempt to connect to an unreachable address."""


class Peer:
    """The other end of a connection.

    Attributes:
        connection: to it.
        name: its member name, once known.
        incarnation: 0 until known.
        address: at which it was connected; empty if it connected to this process.
    """

    def __init__(self, connection: Connection, resend_s: float, name: str = "", address: str = "") -> None:
        self.connection, self.name, self.address = connection, name, address
        self.incarnation = 0
        self.assembler = MessageAssembler()
        self.batch = MessageBatch()
        self.retransmits = RetransmitFilter(resend_s)

    def flush(self) -> None:
        """Send the current batch; if the connection is lost, the sender of each request will resend it."""
        with suppress(ConnectionLostError):
            for rpc_message in self.batch.drain():
                self.connection.send(rpc_message)


OnMessage = Callable[[PsMessage, Peer], None]


class ConnectionPool:
    """Connections of one process of a job.

    Args:
        loop: event loop of the connections.
        credentials: of the job.
        on_message: called with each message and its sender, with the loop's lock held.
        resend_s: delay before an unanswered request may be resent.
        limits: for each connection.
    """

    def __init__(
        self,
        loop: EventLoop,
        credentials: JobCredentials,
        on_message: OnMessage,
        resend_s: float,
        limits: RpcLimits = DEFAULT_LIMITS,
    ) -> None:
        self._loop, self._credentials, self._limits = loop, credentials, limits
        self._on_message = on_message
        self._resend_s = resend_s
        self._peers: dict[Connection, Peer] = {}
        self._outgoing: dict[str, Peer] = {}
        self._reconnect_at: dict[str, float] = {}
        self._listener: Listener | None = None
        self.last_error: CounterpointError | None = None

    def listen(self, address: RpcAddress) -> RpcAddress:
        """Accept connections at an address; return it with the actual port.

        Raises:
            LaunchError: the address is in use, is of TCP without a key, or cannot be reached by others.
        """
        check_reachable(address)
        self._listener = listen(
            self._loop, address, self._credentials, self._on_rpc_message, on_end=self._on_end, limits=self._limits
        )
        return self._listener.address

    @property
    def can_send(self) -> bool:
        """Whether no connection that was opened here has too much unsent data."""
        return not any(peer.connection.is_full for peer in self._outgoing.values())

    def send(self, message: PsMessage, peer: Peer) -> None:
        """Send a message, unless it is already in flight, or the connection has ended."""
        connection = peer.connection
        if connection.is_ended:
            return
        if not peer.retransmits.should_send(message, self._loop.clock(), lambda: connection.has_data_in_flight):
            return
        if isinstance(message, JoinReply):
            peer.incarnation = message.incarnation
        if isinstance(message, BATCHED_TYPES):
            if not (peer.batch.add(message) and self._loop.defer(peer.flush)):
                peer.flush()
            return
        peer.flush()  # keep the order of messages
        with suppress(ConnectionLostError):
            for rpc_message in to_rpc_messages(message):
                connection.send(rpc_message)

    def find_peer(self, name: str, incarnation: int, source: Peer | None) -> Peer | None:
        """Return a connected peer with this name and incarnation; None if there is none.

        Args:
            name: of the member.
            incarnation: 0 for the sender of the current request, if it has the name, else for the newest.
            source: sender of the current request.
        """
        if source is not None and source.name == name and incarnation in {0, source.incarnation}:
            return source
        candidates = [
            peer
            for peer in self._peers.values()
            if peer.name == name and incarnation in {0, peer.incarnation} and not peer.connection.is_ended
        ]
        return max(candidates, key=lambda peer: peer.incarnation) if candidates else None

    def connect_peer(self, name: str, address: str) -> Peer | None:
        """Return the peer at an address, connecting if necessary; None shortly after a failed attempt."""
        connected = self._outgoing.get(address)
        if connected is not None:
            return connected
        if self._loop.clock() < self._reconnect_at.get(address, 0.0):
            return None
        self._reconnect_at[address] = self._loop.clock() + RECONNECT_DELAY_S
        try:
            connection = connect(
                self._loop,
                parse_address(address),
                self._credentials,
                self._on_rpc_message,
                on_end=self._on_end,
                limits=self._limits,
            )
        except (ConnectionLostError, LaunchError) as error:
            self.last_error = error
            return None
        peer = self._peers[connection] = self._outgoing[address] = Peer(connection, self._resend_s, name, address)
        return peer

    def disconnect_except(self, addresses: set[str]) -> None:
        """Close connections to all other addresses."""
        for address, peer in list(self._outgoing.items()):
            if address not in addresses:
                peer.connection.abort()

    def close(self) -> None:
        """Stop listening, and close all connections gracefully."""
        if self._listener is not None:
            self._listener.close()
        for connection in list(self._peers):
            connection.close()

    @property
    def is_closed(self) -> bool:
        """Whether there are no connections left."""
        return not self._peers

    def _on_rpc_message(self, connection: Connection, rpc_message: RpcMessage) -> None:
        peer = self._peers.get(connection)
        if peer is None:
            peer = self._peers[connection] = Peer(connection, self._resend_s)
        messages = peer.assembler.feed(rpc_message)
        with self._loop.cork():  # send their replies together
            for message in messages:
                self._on_message_from(message, peer)

    def _on_message_from(self, message: PsMessage, peer: Peer) -> None:
        peer.retransmits.on_reply(message)
        header = getattr(message, "header", None)
        if header is not None:
            peer.name, peer.incarnation = header.member, header.incarnation or peer.incarnation
        elif isinstance(message, JoinRequest):
            peer.name = message.name
        self._on_message(message, peer)

    def _on_end(self, connection: Connection, error: PeerError | None) -> None:
        peer = self._peers.pop(connection, None)
        if error is not None:
            self.last_error = error
        if peer is not None and self._outgoing.get(peer.address) is peer:
            del self._outgoing[peer.address]
