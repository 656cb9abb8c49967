"""What has been sent over a connection and not been answered: saying it again there would only be in the way.

The state machines say everything again that has not been answered for a while, since a network may lose it. A
connection loses nothing but with itself, so a repeat waits until nothing is on its way there any more, neither to the
other side nor from it, then longer each time; but what has been refused for now may be said again at once.

Messages to members by name and life, over whichever connection leads there; called where there is none yet.
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
    """Requests under way over one connection.

    Args:
        first_s: how long the first repeat waits; each further one twice as long as the one before.
    """

    def __init__(self, initial_delay_s: float) -> None:
        self._initial_delay_s = initial_delay_s
        self._sent: dict[RequestKey, tuple[int, float, float]] = {}

    def should_send(self, message: PsMessage, now: float, is_moving: Callable[[], bool]) -> bool:
        """Tell whether a message is to be sent; it counts as sent then.

        Args:
            message: to be sent.
            now: what the clock says.
            is_moving: tells whether something is still on its way over the connection; asked before a repeat alone.
        """
        name = _request_key(message)
        if name is None:
            return True
        generation = message.header.generation  # type: ignore[union-attr]
        known = self._sent.get(name)
        pause_s = self._initial_delay_s
        if known is not None and known[0] == generation:
            if now < known[1]:
                return False
            if is_moving():
                self._sent[name] = (generation, now + known[2], known[2])
                return False
            pause_s = 2 * known[2]
        self._sent[name] = (generation, now + pause_s, pause_s)
        return True

    def on_reply(self, message: PsMessage) -> None:
        """What a message answers is not under way any more."""
        match message:
            case PushReply() | Ack():
                self._sent.pop(("change", message.shard, message.sequence), None)
            case PullReply():
                self._sent.pop(("pull", message.shard, message.ticket), None)
            case ReplicationAck():
                self._sent = {
                    name: sent
                    for name, sent in self._sent.items()
                    if name[:2] != ("replicate", message.shard) or name[2] >= message.position
                }
                self._sent.pop(("install", message.shard, 0), None)
            case Rejected():
                self._sent.clear()
            case _:
                pass


def _request_key(message: PsMessage) -> RequestKey | None:
    """Return what a request is called among those to one server; None for what may be said as often as one likes."""
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
"""Before somebody is called again whom no call has reached."""


class Peer:
    """Who is at the other end of a connection.

    Attributes:
        connection: to it.
        name: what it is called, as soon as it has said so.
        life: its incarnation; 0 as long as it is not known.
        address: where it was called; empty if it has called.
    """

    def __init__(self, connection: Connection, resend_s: float, name: str = "", address: str = "") -> None:
        self.connection, self.name, self.address = connection, name, address
        self.incarnation = 0
        self.assembler = MessageAssembler()
        self.batch = MessageBatch()
        self.retransmits = RetransmitFilter(resend_s)

    def flush(self) -> None:
        """What is bundled is on its way; it is lost with the connection, and whoever asked will ask again."""
        with suppress(ConnectionLostError):
            for letter in self.batch.drain():
                self.connection.send(letter)


OnMessage = Callable[[PsMessage, Peer], None]


class ConnectionPool:
    """The connections of one process of a job.

    Args:
        loop: that looks after them.
        secret: of the job.
        on_message: called with each message and whom it comes from, under the loop's lock.
        retry_s: how long to wait for an answer before a request may be said again.
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
        """Others may call here now; returns the place with the port it has got, which is what they are told.

        Raises:
            LaunchError: the place is taken, beyond loopback without a key, or none that others could call.
        """
        check_reachable(address)
        self._listener = listen(
            self._loop, address, self._credentials, self._on_rpc_message, on_end=self._on_end, limits=self._limits
        )
        return self._listener.address

    @property
    def can_send(self) -> bool:
        """More may be sent: nobody who was called has too much to take."""
        return not any(peer.connection.is_full for peer in self._outgoing.values())

    def send(self, message: PsMessage, to: Peer) -> None:
        """The message is on its way, unless it is there already, or the connection has ended."""
        connection = to.connection
        if connection.is_ended:
            return
        if not to.retransmits.should_send(message, self._loop.clock(), lambda: connection.has_data_in_flight):
            return
        if isinstance(message, JoinReply):
            to.incarnation = message.incarnation
        if isinstance(message, BATCHED_TYPES):
            if not (to.batch.add(message) and self._loop.defer(to.flush)):
                to.flush()
            return
        to.flush()  # what was said before goes before
        with suppress(ConnectionLostError):
            for letter in to_rpc_messages(message):
                connection.send(letter)

    def find_peer(self, name: str, incarnation: int, source: Peer | None) -> Peer | None:
        """Return who has this name and life and can be told something.

        Args:
            name: of the member.
            life: its incarnation; 0 for the one that has just asked, if it has the name, else the newest.
            source: who has just asked.
        """
        if source is not None and source.name == name and incarnation in {0, source.incarnation}:
            return source
        found = [
            peer
            for peer in self._peers.values()
            if peer.name == name and incarnation in {0, peer.incarnation} and not peer.connection.is_ended
        ]
        return max(found, key=lambda peer: peer.incarnation) if found else None

    def connect_peer(self, name: str, address: str) -> Peer | None:
        """Return who is at an address, called if need be; None where a call has failed a moment ago."""
        known = self._outgoing.get(address)
        if known is not None:
            return known
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
        """Nobody is called any more but at these addresses."""
        for address, peer in list(self._outgoing.items()):
            if address not in addresses:
                peer.connection.abort()

    def close(self) -> None:
        """Nobody can call any more, and everybody has been told goodbye."""
        if self._listener is not None:
            self._listener.close()
        for connection in list(self._peers):
            connection.close()

    @property
    def is_closed(self) -> bool:
        """There is no connection any more."""
        return not self._peers

    def _on_rpc_message(self, connection: Connection, letter: RpcMessage) -> None:
        peer = self._peers.get(connection)
        if peer is None:
            peer = self._peers[connection] = Peer(connection, self._resend_s)
        messages = peer.assembler.feed(letter)
        with self._loop.cork():  # what they are answered with leaves together
            for message in messages:
                self._on_message_from(message, peer)

    def _on_message_from(self, message: PsMessage, peer: Peer) -> None:
        peer.retransmits.on_reply(message)
        origin = getattr(message, "header", None)
        if origin is not None:
            peer.name, peer.incarnation = origin.member, origin.incarnation or peer.incarnation
        elif isinstance(message, JoinRequest):
            peer.name = message.name
        self._on_message(message, peer)

    def _on_end(self, connection: Connection, error: PeerError | None) -> None:
        peer = self._peers.pop(connection, None)
        if error is not None:
            self.last_error = error
        if peer is not None and self._outgoing.get(peer.address) is peer:
            del self._outgoing[peer.address]
