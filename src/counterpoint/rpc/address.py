"""Addresses of servers: a UNIX socket of one user of this host, or TCP, only with a job key."""

from __future__ import annotations

import ipaddress
import os
import re
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
    """Abstract UNIX socket, for processes of one host and one user."""

    name: str

    def __str__(self) -> str:
        return f"unix:{self.name}"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """TCP port of an interface; port 0 selects a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp:[{self.host}]:{self.port}" if ":" in self.host else f"tcp:{self.host}:{self.port}"


RpcAddress: TypeAlias = UnixAddress | TcpAddress


def parse_address(text: str) -> RpcAddress:
    """Return the address with this text form; inverse of ``str``.

    Raises:
        LaunchError: it is malformed.

    Example:
        >>> parse_address("tcp:10.0.0.1:4000"), str(parse_address("tcp:[::1]:4000")), parse_address("unix:job-7")
        (TcpAddress(host='10.0.0.1', port=4000), 'tcp:[::1]:4000', UnixAddress(name='job-7'))
    """
    kind, _, rest = text.partition(":")
    if kind == "unix" and rest.isprintable() and 0 < len(rest.encode()) <= MAX_NAME_BYTES:
        return UnixAddress(rest)
    host, _, port = rest.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if kind == "tcp" and host.isprintable() and host and re.fullmatch(r"[0-9]{1,5}", port) and int(port) < 1 << 16:
        return TcpAddress(host, int(port))
    raise LaunchError(f"{text[:120]!r} is not an address; write unix:NAME or tcp:HOST:PORT, such as tcp:10.0.0.1:4000")


def open_listen_socket(
    address: RpcAddress, *, is_keyed: bool, bound_socket: socket.socket | None = None
) -> tuple[socket.socket, RpcAddress]:
    """Return a socket that listens at this address only, and the address with the actual port.

    Args:
        address: to listen at.
        is_keyed: whether peers must prove that they have the job key.
        bound_socket: bound to the address already, if it is TCP.

    Raises:
        LaunchError: the address is in use, not of this host, or of TCP without a key.
    """
    family, target = resolve_address(address, is_keyed=is_keyed)
    listener = bound_socket or socket.socket(family, socket.SOCK_STREAM)
    listener.setblocking(False)
    try:
        if bound_socket is None:
            if isinstance(address, TcpAddress):
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(target)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        reason = (error.strerror or str(error)).lower()
        raise LaunchError(
            f"cannot listen on {address}: {reason}; every server of a host needs its own address"
        ) from error
    if isinstance(address, TcpAddress):
        return listener, TcpAddress(address.host, listener.getsockname()[1])
    return listener, address


def start_connect(address: RpcAddress, *, is_keyed: bool) -> socket.socket:
    """Return a non-blocking socket that is connecting or connected; it becomes writable when the outcome is known.

    Args:
        address: to connect to.
        is_keyed: whether the peer must prove that it has the job key.

    Raises:
        LaunchError: the address is of TCP and there is no key.
        OSError: no process listens there.
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


def check_reachable(rpc_address: RpcAddress) -> None:
    """Check that other hosts can connect to an address that is announced to them.

    Raises:
        LaunchError: it is the wildcard address, or a host name that resolves to loopback.
    """
    if not isinstance(rpc_address, TcpAddress):
        return
    number = _resolve_tcp(rpc_address)[1][0]
    address = ipaddress.ip_address(number.partition("%")[0])
    if address.is_unspecified:
        raise LaunchError(
            f"{rpc_address} is a wildcard address, to which others cannot connect; give the address of one interface, "
            "such as tcp:10.0.0.1:4000"
        )
    if address.is_loopback and rpc_address.host not in {number, "localhost"}:
        raise LaunchError(
            f"{rpc_address} is {number} on this host, which no other host can reach; give an address that is "
            "reachable, or fix /etc/hosts"
        )


def resolve_address(address: RpcAddress, *, is_keyed: bool) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
    """Return the family and socket address.

    Raises:
        LaunchError: the host cannot be resolved, or the address is of TCP and there is no key.
    """
    match address:
        case UnixAddress(name):
            return socket.AF_UNIX, f"\0counterpoint/{name}"
        case TcpAddress():
            if not is_keyed:
                raise LaunchError(
                    f"there is no job key for {address}, and every user of a host that reaches a TCP port can connect, "
                    "also over loopback; make a key with `counterpoint key job.key` and give --key-file job.key, or "
                    "use unix:NAME among one user's processes on one host"
                )
            return _resolve_tcp(address)


def _resolve_tcp(rpc_address: TcpAddress) -> tuple[socket.AddressFamily, tuple[str, int]]:
    try:
        family, _, _, _, address = socket.getaddrinfo(rpc_address.host, rpc_address.port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:  # a UnicodeError for a name that DNS cannot have
        raise LaunchError(f"{rpc_address} cannot be resolved: {error}; give a host's name or address") from error
    return family, (str(address[0]), rpc_address.port)


def check_peer_credentials(peer: socket.socket) -> None:
    """Check that the peer of a UNIX socket runs as the same user; other sockets pass.

    Raises:
        PeerError: it is another user.
    """
    if peer.family != socket.AF_UNIX:
        return
    _, user = peer_credentials(peer)
    if user not in {os.geteuid(), 0}:
        raise PeerError(
            f"the peer of a UNIX socket runs as user {user}, not {os.geteuid()}; all processes of a job run as one user"
        )


def peer_credentials(peer: socket.socket) -> tuple[int, int]:
    """Return process id and user id of the peer of a UNIX socket; process id 0 if it is not visible from here."""
    process, user, _ = CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    return process, user


def shared_memory_with(peer: socket.socket) -> SharedBuffers | None:
    """Return the shared buffers of a UNIX socket connection; None for other sockets."""
    return SharedBuffers(PeerBuffers(peer_credentials(peer)[0])) if peer.family == socket.AF_UNIX else None
