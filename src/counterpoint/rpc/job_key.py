"""The secret key of a job, read from a file or a descriptor and never displayed."""

from __future__ import annotations

import os
import secrets
import select
import stat
import time
from contextlib import suppress
from pathlib import Path

from counterpoint.errors import LaunchError
from counterpoint.file_writer import write_all

MIN_DIGITS = 64
MAX_BYTES = 4096
READ_S = 10.0
"""How long the other end of a pipe has to write a key and to close it."""


class JobKey:
    """Secret that the processes of one job share; its text form hides it.

    Example:
        >>> JobKey(bytes(32))
        JobKey(hidden)
    """

    __slots__ = ("secret",)

    def __init__(self, secret: bytes) -> None:
        if 2 * len(secret) < MIN_DIGITS:
            raise LaunchError(f"a job key of {len(secret)} bytes; it has at least {MIN_DIGITS // 2}: take a new one")
        self.secret = secret

    def __repr__(self) -> str:
        return "JobKey(hidden)"

    def __reduce__(self) -> str:
        raise TypeError("a job key is not copied into files or messages; give the other process a descriptor")


def new_key() -> JobKey:
    """Return a new random key."""
    return JobKey(secrets.token_bytes(32))


def write_key(key: JobKey, path: Path) -> None:
    """Write the key to a new file that only its owner can read.

    Raises:
        LaunchError: the file exists, or cannot be created or written.
    """
    is_new = False
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        is_new = True
        try:
            write_all(descriptor, key.secret.hex().encode() + b"\n")
        finally:
            os.close(descriptor)
    except OSError as error:
        with suppress(OSError):
            path.unlink(missing_ok=True) if is_new else None
        raise LaunchError(
            f"cannot write a job key to {path}: {os_error_text(error)}; give a new file's name, on a disk with space"
        ) from error


def read_key(path: Path) -> JobKey:
    """Return the key in a file.

    The rule for its owner and mode is PostgreSQL's for the private key of TLS: a file of this user that nobody else can
    read, or a file of root that a group of this process may read, as Kubernetes mounts secrets.

    Raises:
        LaunchError: it cannot be read, belongs to another user, is readable by others, or holds no key.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except (OSError, ValueError) as error:  # a ValueError for a null byte in its name
        raise LaunchError(
            f"cannot read the job key in {path}: {os_error_text(error)}; give the file with the key"
        ) from error
    try:
        _check_owner(os.fstat(fd), path)
    except LaunchError:
        os.close(fd)
        raise
    return read_key_from(fd, str(path))


def _check_owner(status: os.stat_result, path: Path) -> None:
    """Check that an open file is this user's or root's, and that others cannot read it; a pipe has no mode to check.

    Raises:
        LaunchError: it is not, or it is not a file.
    """
    owner, user, mode = status.st_uid, os.geteuid(), status.st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISFIFO(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a device"
        raise LaunchError(f"{path} is {kind}, and holds no job key; give a file, which `counterpoint key FILE` makes")
    if owner not in {user, 0}:
        raise LaunchError(
            f"the job key in {path} belongs to user {owner}, not {user}, who can join the job with it: make a new one "
            "with `counterpoint key FILE`"
        )
    if stat.S_ISREG(mode) and mode & (0o077 if owner == user else 0o037):
        raise LaunchError(
            f"the job key in {path} may be read by others (mode {mode & 0o777:o}); a process that reads it can join "
            f"the job: make a new one, and chmod 600 {path}"
        )


def read_key_from(fd: int, name: str = "") -> JobKey:
    """Return the key read from a descriptor, and close it.

    Args:
        fd: of a pipe or a file, read to its end.
        name: for errors.

    Raises:
        LaunchError: it holds no key, or does not end in time.
    """
    source = name or f"descriptor {fd}"
    try:
        text = _read_to_end(fd, source).strip()
    except (OSError, ValueError, OverflowError) as error:  # the last two for a number that no descriptor has
        raise LaunchError(f"cannot read the job key from {source}: {os_error_text(error)}; open it before") from error
    if len(text) > MAX_BYTES or len(text) < MIN_DIGITS or len(text) % 2 or text.strip(b"0123456789abcdefABCDEF"):
        raise LaunchError(
            f"{source} holds no job key; a key is an even number of hexadecimal digits, {MIN_DIGITS} at least: "
            "`counterpoint key FILE` makes one"
        )
    return JobKey(bytes.fromhex(text.decode("ascii")))


def _read_to_end(fd: int, source: str) -> bytes:
    """Return what a descriptor holds, a little more than a key at most, and close it.

    Raises:
        LaunchError: it does not end in time.
        OSError: it cannot be read.
    """
    data, end_s = b"", time.monotonic() + READ_S
    try:
        ready = select.poll()
        ready.register(fd, select.POLLIN)
        while len(data) <= MAX_BYTES:
            if not ready.poll(max(0.0, end_s - time.monotonic()) * 1e3):
                raise LaunchError(
                    f"{source} was not written and closed within {READ_S:.0f} s, so it holds no job key; have another "
                    "process write a key to it, or give a file"
                )
            with suppress(BlockingIOError):
                part = os.read(fd, MAX_BYTES + 1)
                data += part
                if not part:
                    break
    finally:
        with suppress(OSError, OverflowError):
            os.close(fd)
    return data


def os_error_text(error: Exception) -> str:
    """Return the system's error text, in lower case."""
    return ((error.strerror if isinstance(error, OSError) else "") or str(error)).lower()
