"""Messages to members by name and life, over whichever connection leads there; called where there is none yet."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from counterpoint.errors import CounterpointError, LaunchError, PeerError
from counterpoint.server.calls import Hello, Welcome
from counterpoint.server.form import Message
from counterpoint.server.hosting.parcel import BUNDLED, Bundle, Gathering, letters
from counterpoint.server.hosting.repeats import Repeats
from counterpoint.server.wire.connect import connect
from counterpoint.server.wire.connection import Connection, ConnectionLostError
from counterpoint.server.wire.greeting import Secret
from counterpoint.server.wire.letter import Letter
from counterpoint.server.wire.limits import DEFAULTS, Limits
from counterpoint.server.wire.loop import Loop
from counterpoint.server.wire.place import Place, parse_place, require_address
from counterpoint.server.wire.server import Server, serve

REST_S = 0.2
"""Before somebody is called again whom no call has reached."""


class Peer:
    """Who is at the other end of a connection.

    Attributes:
        connection: to it.
        name: what it is called, as soon as it has said so.
        life: its incarnation; 0 as long as it is not known.
        address: where it was called; empty if it has called.
    """

    def __init__(self, connection: Connection, retry_s: float, name: str = "", address: str = "") -> None:
        self.connection, self.name, self.address = connection, name, address
        self.life = 0
        self.gathering = Gathering()
        self.bundle = Bundle()
        self.repeats = Repeats(retry_s)

    def leave(self) -> None:
        """What is bundled is on its way; it is lost with the connection, and whoever asked will ask again."""
        with suppress(ConnectionLostError):
            for letter in self.bundle.taken():
                self.connection.send(letter)


OnMessage = Callable[[Message, Peer], None]


class Post:
    """The connections of one process of a job.

    Args:
        loop: that looks after them.
        secret: of the job.
        on_message: called with each message and whom it comes from, under the loop's lock.
        retry_s: how long to wait for an answer before a request may be said again.
        limits: for each connection.
    """

    def __init__(
        self, loop: Loop, secret: Secret, on_message: OnMessage, retry_s: float, limits: Limits = DEFAULTS
    ) -> None:
        self._loop, self._secret, self._limits = loop, secret, limits
        self._on_message = on_message
        self._retry_s = retry_s
        self._peers: dict[Connection, Peer] = {}
        self._called: dict[str, Peer] = {}
        self._rest_until: dict[str, float] = {}
        self._server: Server | None = None
        self.last_error: CounterpointError | None = None

    def listen(self, place: Place) -> Place:
        """Others may call here now; returns the place with the port it has got, which is what they are told.

        Raises:
            LaunchError: the place is taken, beyond loopback without a key, or none that others could call.
        """
        require_address(place)
        self._server = serve(self._loop, place, self._secret, self._take, on_end=self._ended, limits=self._limits)
        return self._server.place

    @property
    def has_room(self) -> bool:
        """More may be sent: nobody who was called has too much to take."""
        return not any(peer.connection.is_full for peer in self._called.values())

    def send(self, message: Message, to: Peer) -> None:
        """The message is on its way, unless it is there already, or the connection has ended."""
        connection = to.connection
        if connection.is_ended:
            return
        if not to.repeats.may_send(message, self._loop.clock(), lambda: connection.is_moving):
            return
        if isinstance(message, Welcome):
            to.life = message.incarnation
        if isinstance(message, BUNDLED):
            if not (to.bundle.add(message) and self._loop.defers(to.leave)):
                to.leave()
            return
        to.leave()  # what was said before goes before
        with suppress(ConnectionLostError):
            for letter in letters(message):
                connection.send(letter)

    def towards(self, name: str, life: int, source: Peer | None) -> Peer | None:
        """Return who has this name and life and can be told something.

        Args:
            name: of the member.
            life: its incarnation; 0 for the one that has just asked, if it has the name, else the newest.
            source: who has just asked.
        """
        if source is not None and source.name == name and life in {0, source.life}:
            return source
        found = [
            peer
            for peer in self._peers.values()
            if peer.name == name and life in {0, peer.life} and not peer.connection.is_ended
        ]
        return max(found, key=lambda peer: peer.life) if found else None

    def call(self, name: str, address: str) -> Peer | None:
        """Return who is at an address, called if need be; None where a call has failed a moment ago."""
        known = self._called.get(address)
        if known is not None:
            return known
        if self._loop.clock() < self._rest_until.get(address, 0.0):
            return None
        self._rest_until[address] = self._loop.clock() + REST_S
        try:
            connection = connect(
                self._loop, parse_place(address), self._secret, self._take, on_end=self._ended, limits=self._limits
            )
        except (ConnectionLostError, LaunchError) as error:
            self.last_error = error
            return None
        peer = self._peers[connection] = self._called[address] = Peer(connection, self._retry_s, name, address)
        return peer

    def forget(self, addresses: set[str]) -> None:
        """Nobody is called any more but at these addresses."""
        for address, peer in list(self._called.items()):
            if address not in addresses:
                peer.connection.abort()

    def close(self) -> None:
        """Nobody can call any more, and everybody has been told goodbye."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._peers):
            connection.close()

    @property
    def is_over(self) -> bool:
        """There is no connection any more."""
        return not self._peers

    def _take(self, connection: Connection, letter: Letter) -> None:
        peer = self._peers.get(connection)
        if peer is None:
            peer = self._peers[connection] = Peer(connection, self._retry_s)
        messages = peer.gathering.take(letter)
        with self._loop.gathering():  # what they are answered with leaves together
            for message in messages:
                self._hear(message, peer)

    def _hear(self, message: Message, peer: Peer) -> None:
        peer.repeats.hear(message)
        origin = getattr(message, "origin", None)
        if origin is not None:
            peer.name, peer.life = origin.member, origin.incarnation or peer.life
        elif isinstance(message, Hello):
            peer.name = message.name
        self._on_message(message, peer)

    def _ended(self, connection: Connection, error: PeerError | None) -> None:
        peer = self._peers.pop(connection, None)
        if error is not None:
            self.last_error = error
        if peer is not None and self._called.get(peer.address) is peer:
            del self._called[peer.address]
