"""The end of the wire that waits for callers."""

from __future__ import annotations

import errno
import secrets
import socket
from collections.abc import Callable
from math import inf
from typing import Final, TypeAlias

from counterpoint.errors import PeerError
from counterpoint.server.wire.channel import Channel
from counterpoint.server.wire.connect import prepare
from counterpoint.server.wire.connection import Connection, OnEnd, OnLetter, Side, Stage
from counterpoint.server.wire.greeting import NONCE_BYTES, Secret, answer
from counterpoint.server.wire.letter import Letter
from counterpoint.server.wire.limits import DEFAULTS, Limits
from counterpoint.server.wire.loop import READ, Loop
from counterpoint.server.wire.place import Place, UnixPlace, listening, shared_with
from counterpoint.server.wire.rooms import Rooms

ACCEPTS_PER_TURN: Final = 16
REST_S: Final = 1.0  # before the next caller is let in when this process has no descriptor left
SHORT_OF: Final = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}

Answers: TypeAlias = Callable[[Letter], Letter]


def serve(
    loop: Loop,
    place: Place,
    secret: Secret,
    on_letter: OnLetter,
    *,
    on_end: OnEnd | None = None,
    limits: Limits = DEFAULTS,
) -> Server:
    """Return a server that listens there; its ``place`` says which port it has got.

    Args:
        loop: that looks after it.
        place: where.
        secret: of the job.
        on_letter: called with the connection and each letter that comes; a ProtocolError of it ends the connection.
        on_end: called with each connection that ends, strangers included, and why; None after a goodbye.
        limits: for each connection.

    Raises:
        LaunchError: the place is taken, or is beyond loopback and there is no key.
    """
    listener, found = listening(place, is_keyed=secret.key is not None)
    with loop.lock:
        server = Server(loop, listener, found, secret, limits)
        server.on_letter, server.on_end = on_letter, on_end
        loop.watch(server, READ)
    return server


def replying(answers: Answers) -> OnLetter:
    """Return what answers every letter, in the order in which they come."""
    return lambda connection, letter: connection.send(answers(letter))


class Server:
    """A place where callers come; each that has the key is a connection.

    Args:
        loop: that looks after it.
        listener: the socket.
        place: where it is.
        secret: of the job.
        limits: for its connections.
    """

    def __init__(self, loop: Loop, listener: socket.socket, place: Place, secret: Secret, limits: Limits) -> None:
        self._loop = loop
        self._listener = listener
        self._secret = secret
        self._limits = limits
        self._rooms = Rooms()
        self._connections: dict[Connection, None] = {}  # in the order in which they came
        self._count = 0
        self.on_letter: OnLetter | None = None
        self.on_end: OnEnd | None = None
        self.place = place
        self.due = inf

    @property
    def connections(self) -> list[Connection]:
        """Those who have proved that they have the key, and have not ended."""
        return [connection for connection in self._connections if connection.stage in {Stage.OPEN, Stage.CLOSING}]

    @property
    def num_strangers(self) -> int:
        """Those who have not."""
        return len(self._connections) - len(self.connections)

    def close(self) -> None:
        """Nobody is let in any more, strangers are gone, and the connections close."""
        with self._loop.lock:
            self._stop_listening()
            for connection in list(self._connections):
                if connection.stage is Stage.OPEN:
                    connection.close()
                else:
                    connection.abort()

    def abort(self) -> None:
        """Nobody is let in any more; connections end by themselves."""
        self._stop_listening()

    def _stop_listening(self) -> None:
        self._loop.forget(self)
        self._listener.close()

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._listener.fileno()

    def ready(self, events: int) -> None:
        """Somebody has come."""
        del events
        for _ in range(ACCEPTS_PER_TURN):
            try:
                peer, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in SHORT_OF:
                    self.due = self._loop.clock() + REST_S
                    self._loop.watch(self, 0)
                return  # or the caller has gone already
            self._admit(peer, address)

    def expire(self) -> None:
        """Callers are let in again."""
        self.due = inf
        self._loop.watch(self, READ)

    def _admit(self, peer: socket.socket, address: object) -> None:
        """A stranger has a short while to greet, and the one who has had most of it goes when there are too many."""
        if len(self._connections) - self.num_strangers >= self._limits.connections:
            peer.close()
            return
        if self.num_strangers >= self._limits.strangers:
            next(
                connection for connection in self._connections if connection.stage in {Stage.CALLING, Stage.GREETING}
            ).abort()
        self._count += 1
        name = (
            f"caller {self._count} at {self.place}"
            if isinstance(self.place, UnixPlace)
            else f"caller {_shown(address)}"
        )
        peer.setblocking(False)
        prepare(peer, self._limits)
        greeting = answer(self._secret, self._secret.guard(self.place), secrets.token_bytes(NONCE_BYTES))
        channel = Channel(greeting, self._limits, self._rooms, shared_with(peer))
        connection = Connection(self._loop, peer, channel, self._limits, side=Side.ANSWERS, name=name)
        self._connections[connection] = None
        connection.begin(self.on_letter, self._ended)

    def _ended(self, connection: Connection, error: PeerError | None) -> None:
        del self._connections[connection]
        if self.on_end is not None:
            self.on_end(connection, error)


def _shown(address: object) -> str:
    return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "of a socket"
