"""Reserve the rendezvous port before the first rank starts, so that no other process can take it in between."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from pathlib import Path

from counterpoint.errors import LaunchError

LOOPBACK = "127.0.0.1"
_LISTENING, _TIME_WAIT = "0A", "06"


def reserve_port(port: int | None, host: str = LOOPBACK) -> socket.socket:
    """Return a socket bound to ``port``, or to a free one; it does not listen yet.

    A bound socket keeps the port from other processes, while rank 0 can listen on this socket or, in a script that does
    not know of it, bind the port again.

    Args:
        port: None for a free one.
        host: this host's name or address, if other hosts connect.

    Raises:
        LaunchError: the port is taken; the message names the process.
    """
    if port is not None and not 0 < port < 65536:
        raise LaunchError(f"port {port} does not exist; give one from 1 to 65535, or omit --port to get a free one")
    reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        if port is not None:
            _check_free(port)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((host, port or 0))
    except OSError as error:
        reserved.close()
        raise LaunchError(_bind_error(port, error)) from error
    return reserved


def _check_free(port: int) -> None:
    """Raise if another process uses the port; connections in TIME_WAIT do not count."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as strict:
        try:
            strict.bind((LOOPBACK, port))
        except OSError:
            states = {state for state, _ in _sockets_on_port(port)}
            if _LISTENING in states or _TIME_WAIT not in states:
                raise


def _bind_error(port: int | None, error: OSError) -> str:
    remedy = "omit --port to get a free one, or end that process"
    if error.errno != errno.EADDRINUSE or port is None:
        return f"cannot bind port {port} on {LOOPBACK}: {error.strerror}; {remedy}"
    return f"port {port} is taken by {port_owner(port) or 'another process'}; one port serves one run; {remedy}"


def port_owner(port: int) -> str | None:
    """Return ``pid 812 (python other.py)`` for the process that listens on the port, if /proc shows it."""
    inodes = {f"socket:[{inode}]" for state, inode in _sockets_on_port(port) if state == _LISTENING}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(str(link.readlink()) in inodes for link in (process / "fd").iterdir()):
                return f"pid {process.name} ({_command(process)})"
        except OSError:
            continue  # it has ended, or belongs to another user
    return None


def _command(process: Path) -> str:
    """Return the program and its first argument only; the others may be private."""
    arguments = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
    return " ".join([Path(arguments[0]).name, *arguments[1:2]])[:80].strip()


def _sockets_on_port(port: int) -> Iterator[tuple[str, str]]:
    """Yield state and inode of every TCP socket with this local port."""
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        if table.exists():
            for row in table.read_text(encoding="ascii").splitlines()[1:]:
                fields = row.split()
                if int(fields[1].rpartition(":")[2], 16) == port:
                    yield fields[3], fields[9]
