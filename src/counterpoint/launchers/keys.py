"""Which job key a host has, said so that ranks can compare it and nobody can read it."""

from __future__ import annotations

import hashlib
import hmac
import socket
from pathlib import Path

from counterpoint.errors import LaunchError
from counterpoint.server.wire.key import read_key

NO_KEY = "none"
MARK_DIGITS = 12


def key_mark(key_file: str | None) -> str:
    """Return what is the same on hosts with the same key: a mark of it, or that this host has none, or why.

    Args:
        key_file: where the launcher says that every host has it; None for a job without a key.
    """
    if key_file is None:
        return NO_KEY
    try:
        key = read_key(Path(key_file))
    except LaunchError as error:
        return f"missing on {socket.gethostname()} ({error})"
    return hmac.new(key.secret, b"counterpoint: which key is this", hashlib.sha256).hexdigest()[:MARK_DIGITS]


def require_key(key_file: str | None) -> None:
    """This host has the job's key, if the job has one.

    Raises:
        LaunchError: it has not.
    """
    if key_file is not None:
        read_key(Path(key_file))
