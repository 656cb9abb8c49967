"""The end of the wire that calls."""

from __future__ import annotations

import secrets
import socket
from typing import Final

from counterpoint.server.wire.channel import Channel
from counterpoint.server.wire.connection import Connection, ConnectionLostError, OnEnd, OnLetter, Side
from counterpoint.server.wire.greeting import NONCE_BYTES, Secret, call
from counterpoint.server.wire.limits import DEFAULTS, Limits
from counterpoint.server.wire.loop import Loop
from counterpoint.server.wire.place import Place, calling, shared_with
from counterpoint.server.wire.rooms import Rooms

UNIX_BUFFER_BYTES: Final = 1 << 22  # or as much as the system allows


def connect(
    loop: Loop,
    place: Place,
    secret: Secret,
    on_letter: OnLetter,
    *,
    on_end: OnEnd | None = None,
    limits: Limits = DEFAULTS,
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
        peer = calling(place, is_keyed=secret.key is not None)
    except OSError as error:
        raise ConnectionLostError(
            f"nobody listens at {place}; look at whether the server runs, then call again"
        ) from error
    prepare(peer, limits)
    greeting = call(secret, secret.guard(place), secrets.token_bytes(NONCE_BYTES))
    channel = Channel(greeting, limits, Rooms(), shared_with(peer))
    connection = Connection(loop, peer, channel, limits, side=Side.ASKS, name=f"server {place}")
    connection.begin(on_letter, on_end)
    return connection


def prepare(peer: socket.socket, limits: Limits) -> None:
    """Small letters leave at once, and a peer whose host is gone is found out."""
    if peer.family == socket.AF_UNIX:  # it keeps the size that it begins with, TCP finds a better one
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_BUFFER_BYTES)
        return
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(limits.patience_s / 2)))
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(limits.patience_s / 6)))
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limits.patience_s * 1000))
