"""The greeting: both sides prove that they have the job's key, and nobody learns it.

Each is a generator without effects: it yields what to send and how many bytes to wait for, and returns the session.
Caller and server say hello with a fresh nonce each; then the caller proves first, so that a stranger gets no proof.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Generator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, TypeAlias

from counterpoint.errors import ProtocolError
from counterpoint.rpc.address import RpcAddress, UnixAddress
from counterpoint.rpc.job_key import JobKey
from counterpoint.rpc.records import (
    DIGEST_BYTES,
    KEY_BYTES,
    AesGcmRecordReader,
    AesGcmRecordWriter,
    CrcRecordReader,
    CrcRecordWriter,
    RecordReader,
    RecordWriter,
    hkdf_expand,
    hkdf_extract,
)  # fmt: skip

MAGIC: Final = b"CPWS"
VERSION: Final = 1
NONCE_BYTES: Final = 32
HELLO = struct.Struct(f"<4sBB2x{NONCE_BYTES}s")  # magic, version, guard, nonce
REFUSAL: Final = bytes(DIGEST_BYTES)


class SecurityMode(IntEnum):
    """Who keeps others out of a connection when the greeting is over."""

    NONE = 0
    """There is no key; checksums find faults, and no forgery."""
    ENCRYPTED = 1
    """There is a key, and a network in between."""
    PEERCRED = 2
    """There is a key, and a UNIX socket of one user: whoever could reach into it can reach into the process."""


@dataclass(frozen=True, slots=True)
class HandshakeStep:
    """What to send, and how many bytes of the peer to come back with."""

    send: bytes
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SecureSession:
    """What makes and reads this side's records; ``last`` is still to be sent before them."""

    writer: RecordWriter
    reader: RecordReader
    final_bytes: bytes = b""


@dataclass(frozen=True, slots=True)
class JobCredentials:
    """What both sides must have in common.

    Args:
        key: the job's; None among processes of one host that trust it.
        job: its name and generation; not a secret, but another one leads to other keys.
    """

    key: JobKey | None
    job: str = ""

    def security_mode(self, address: RpcAddress) -> SecurityMode:
        """Return who keeps others out of a connection to that place."""
        if self.key is None:
            return SecurityMode.NONE
        return SecurityMode.PEERCRED if isinstance(address, UnixAddress) else SecurityMode.ENCRYPTED


Handshake: TypeAlias = Generator[HandshakeStep, bytes, SecureSession]


def client_handshake(credentials: JobCredentials, mode: SecurityMode, nonce: bytes) -> Handshake:
    """Greet as the one who connects.

    Args:
        secret: of the job.
        guard: of the connection.
        nonce: fresh random bytes.

    Raises:
        ProtocolError: the other side is no server of ours, or has another key.
    """
    mine = hello_message(mode, nonce)
    theirs = yield HandshakeStep(mine, HELLO.size)
    check_hello(theirs, mode)
    keys = _HandshakeKeys(credentials, mode, mine, theirs)
    proof = yield HandshakeStep(keys.client_proof, DIGEST_BYTES)
    if not hmac.compare_digest(proof, keys.server_proof):
        raise handshake_error()
    return keys.session(sends=b"caller", receives=b"server")


def server_handshake(credentials: JobCredentials, mode: SecurityMode, nonce: bytes) -> Handshake:
    """Greet as the one who listens.

    Args:
        secret: of the job.
        guard: of the connection.
        nonce: fresh random bytes.

    Raises:
        ProtocolError: the other side is no caller of ours, or has another key.
    """
    theirs = yield HandshakeStep(b"", HELLO.size)
    check_magic(theirs)
    mine = hello_message(mode, nonce)
    proof = yield HandshakeStep(mine, DIGEST_BYTES)
    check_hello(theirs, mode)
    keys = _HandshakeKeys(credentials, mode, theirs, mine)
    if not hmac.compare_digest(proof, keys.client_proof):
        yield HandshakeStep(REFUSAL, 0)
        raise handshake_error()
    return keys.session(sends=b"server", receives=b"caller", final_bytes=keys.server_proof)


def hello_message(mode: SecurityMode, nonce: bytes) -> bytes:
    """Return the first words of a side."""
    return HELLO.pack(MAGIC, VERSION, mode, nonce)


def check_magic(theirs: bytes) -> None:
    """Somebody greets; whoever says something else is told nothing.

    Raises:
        ProtocolError: it is no greeting.
    """
    if not theirs.startswith(MAGIC):
        raise ProtocolError(f"a peer begins with {theirs[:4]!r}, which is no greeting: look for another program there")


def check_hello(theirs: bytes, mode: SecurityMode) -> None:
    """The other side speaks this version, has a key if this one has, and sees the same kind of connection.

    Raises:
        ProtocolError: it does not.
    """
    check_magic(theirs)
    _, version, other, _ = HELLO.unpack(theirs)
    if version != VERSION or theirs[6:8] != bytes(2):
        raise ProtocolError(
            f"a peer speaks version {version} of the wire, and this side version {VERSION}: install one"
        )
    if (other == SecurityMode.NONE) != (mode == SecurityMode.NONE):
        has, lacks = ("the peer", "this side") if mode == SecurityMode.NONE else ("this side", "the peer")
        raise ProtocolError(
            f"{has} has a job key and {lacks} has none; all processes of a job get the same: give it one"
        )
    if other != mode:
        raise ProtocolError(
            f"a peer sees a connection of kind {other} where this side sees {mode}: look for what is in between"
        )


def handshake_error() -> ProtocolError:
    """Return the error for a key that is not the same on both sides."""
    return ProtocolError(
        "the greeting was refused: the two sides have not the same job key, or are not of the same job and generation; "
        "nothing was said after it: give both the key of one job"
    )


class _HandshakeKeys:
    """What both sides compute from the key and from all that was said in the open."""

    def __init__(
        self, credentials: JobCredentials, mode: SecurityMode, client_hello: bytes, server_hello: bytes
    ) -> None:
        job = hashlib.sha256(credentials.job.encode()).digest()
        self._transcript = hashlib.sha256(client_hello + server_hello + job).digest()
        self._mode = mode
        self._root = hkdf_extract(self._transcript, credentials.key.secret if credentials.key else b"")
        self.client_proof = self._derive(b"proof of caller")
        self.server_proof = self._derive(b"proof of server")

    def _derive(self, purpose: bytes) -> bytes:
        return hkdf_expand(self._root, b"counterpoint wire " + purpose + self._transcript)

    def session(self, *, sends: bytes, receives: bytes, final_bytes: bytes = b"") -> SecureSession:
        """Return what seals in one direction and opens in the other."""
        if self._mode is not SecurityMode.ENCRYPTED:
            return SecureSession(CrcRecordWriter(), CrcRecordReader(), final_bytes)
        keys = [self._derive(b"records of " + side)[:KEY_BYTES] for side in (sends, receives)]
        return SecureSession(AesGcmRecordWriter(keys[0]), AesGcmRecordReader(keys[1]), final_bytes)
