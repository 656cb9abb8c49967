"""Where a server is reached: a UNIX socket of this host, or TCP; beyond loopback only with a key."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from dataclasses import dataclass
from typing import TypeAlias

from counterpoint.errors import LaunchError, PeerError
from counterpoint.rpc.buffers import PeerBuffers, SharedBuffers

BACKLOG = 128
MAX_NAME_BYTES = 100
CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A name for processes of one host and one user; no file stands for it."""

    name: str

    def __str__(self) -> str:
        return f"unix:{self.name}"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A port of an interface; port 0 is any that is free."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp:[{self.host}]:{self.port}" if ":" in self.host else f"tcp:{self.host}:{self.port}"


RpcAddress: TypeAlias = UnixAddress | TcpAddress


def parse_address(text: str) -> RpcAddress:
    """Return the place of this text form; ``str`` gives it back.

    Raises:
        LaunchError: it is none.

    Example:
        >>> parse_place("tcp:10.0.0.1:4000"), str(parse_place("tcp:[::1]:4000")), parse_place("unix:job-7")
        (TcpPlace(host='10.0.0.1', port=4000), 'tcp:[::1]:4000', UnixPlace(name='job-7'))
    """
    kind, _, rest = text.partition(":")
    if kind == "unix" and 0 < len(rest.encode()) <= MAX_NAME_BYTES and rest.isprintable():
        return UnixAddress(rest)
    host, _, port = rest.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if kind == "tcp" and host and port.isascii() and port.isdigit() and int(port) < 1 << 16:
        return TcpAddress(host, int(port))
    raise LaunchError(
        f"{text[:120]!r} is no place for a server; write unix:NAME or tcp:HOST:PORT, as tcp:10.0.0.1:4000"
    )


def open_listen_socket(address: RpcAddress, *, is_keyed: bool) -> tuple[socket.socket, RpcAddress]:
    """Return a socket that listens there and nowhere else, and the place with the port it has got.

    Args:
        place: where.
        is_keyed: whether whoever comes must prove to have the key.

    Raises:
        LaunchError: the place is taken or not of this host, or is beyond loopback and there is no key.
    """
    family, target = resolve_address(address, is_keyed=is_keyed)
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        if isinstance(address, TcpAddress):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        why = (error.strerror or str(error)).lower()
        raise LaunchError(
            f"cannot listen on {address}: {why}; every server needs a place of its own on its host"
        ) from error
    if isinstance(address, TcpAddress):
        return listener, TcpAddress(address.host, listener.getsockname()[1])
    return listener, address


def start_connect(address: RpcAddress, *, is_keyed: bool) -> socket.socket:
    """Return a socket that is on its way there, or there; whether it arrives is known when it can be written.

    Args:
        place: where.
        is_keyed: whether the other side must prove to have the key.

    Raises:
        LaunchError: it is beyond loopback and there is no key.
        OSError: nobody listens.
    """
    family, target = resolve_address(address, is_keyed=is_keyed)
    caller = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        caller.connect(target)
    except BlockingIOError:
        return caller
    except OSError:
        caller.close()
        raise
    return caller


def check_reachable(place: RpcAddress) -> None:
    """Check that a server which listens there is found by that: it is what others are told.

    Raises:
        LaunchError: it is every interface at once, or the name of a host that leads back to itself.
    """
    if not isinstance(place, TcpAddress):
        return
    number = _resolve_tcp(place)[1][0]
    address = ipaddress.ip_address(number.partition("%")[0])
    if address.is_unspecified:
        raise LaunchError(
            f"{place} is every interface of a host, and nothing that others could call; give the address of one, as "
            "tcp:10.0.0.1:4000"
        )
    if address.is_loopback and place.host not in {number, "localhost"}:
        raise LaunchError(
            f"{place} is {number} on this host, which no other host reaches; give the address that others know it by, "
            "or mend /etc/hosts"
        )


def resolve_address(address: RpcAddress, *, is_keyed: bool) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
    """Return the family and address of a place.

    Raises:
        LaunchError: the host has no address, or is beyond loopback and there is no key.
    """
    match address:
        case UnixAddress(name):
            return socket.AF_UNIX, f"\0counterpoint/{name}"
        case TcpAddress():
            family, (number, port) = _resolve_tcp(address)
            if not is_keyed and not ipaddress.ip_address(number.partition("%")[0]).is_loopback:
                raise LaunchError(
                    f"{address} is beyond loopback and there is no job key; without one anybody could join in: give a "
                    "key by file or descriptor, or a place as tcp:127.0.0.1:0 or unix:NAME"
                )
            return family, (number, port)


def _resolve_tcp(place: TcpAddress) -> tuple[socket.AddressFamily, tuple[str, int]]:
    try:
        family, _, _, _, address = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise LaunchError(f"{place} leads nowhere: {error}; give a host's name or address") from error
    return family, (str(address[0]), place.port)


def check_peer_credentials(peer: socket.socket) -> None:
    """Whoever is at the other end of a UNIX socket has this process's user; other sockets are let pass.

    Raises:
        PeerError: it is another user.
    """
    if peer.family != socket.AF_UNIX:
        return
    _, user = peer_credentials(peer)
    if user not in {os.geteuid(), 0}:
        raise PeerError(f"user {user} is at the other end of a UNIX socket of user {os.geteuid()}; a job has one user")


def peer_credentials(peer: socket.socket) -> tuple[int, int]:
    """Return who is at the other end of a UNIX socket, as the kernel says; process 0 if it cannot be seen from here."""
    process, user, _ = CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    return process, user


def shared_memory_with(peer: socket.socket) -> SharedBuffers | None:
    """Return what the two ends of a UNIX socket lend each other; None for other sockets."""
    return SharedBuffers(PeerBuffers(peer_credentials(peer)[0])) if peer.family == socket.AF_UNIX else None
