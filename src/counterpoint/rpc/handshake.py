"""Mutual authentication: both sides prove that they have the job's key without revealing it.

Each side is a generator without effects: it yields what to send and how many bytes to receive, and returns the
session::

    client                                   server
      | -- hello (version, mode, nonce) ------> |
      | <------ hello (version, mode, nonce) -- |
      | -- proof ----------------------------> | checks it before it proves anything itself
      | <------------------------------ proof -- |
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
    """How a connection is protected after the handshake."""

    NONE = 0
    """There is no key, and a UNIX socket of one user; checksums detect faults, not forgery."""
    ENCRYPTED = 1
    """There is a key, and a network in between."""
    PEERCRED = 2
    """There is a key, and a UNIX socket of one user: a process that can read it can also read this process's memory."""


@dataclass(frozen=True, slots=True)
class HandshakeStep:
    """Bytes to send, and how many bytes to receive before the next step."""

    send: bytes
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SecureSession:
    """Record encoders of both directions; ``final_bytes`` must be sent before the first record."""

    writer: RecordWriter
    reader: RecordReader
    final_bytes: bytes = b""


@dataclass(frozen=True, slots=True)
class JobCredentials:
    """What both sides must share.

    Args:
        key: of the job; None if all addresses are UNIX sockets.
        job: its name and generation; not secret, but it enters the derived keys.
    """

    key: JobKey | None
    job: str = ""

    def security_mode(self, address: RpcAddress) -> SecurityMode:
        """Return how a connection to this address is protected."""
        if self.key is None:
            return SecurityMode.NONE
        return SecurityMode.PEERCRED if isinstance(address, UnixAddress) else SecurityMode.ENCRYPTED


Handshake: TypeAlias = Generator[HandshakeStep, bytes, SecureSession]


def client_handshake(credentials: JobCredentials, mode: SecurityMode, nonce: bytes) -> Handshake:
    """Authenticate as the client.

    Args:
        credentials: of the job.
        mode: of the connection.
        nonce: fresh random bytes.

    Raises:
        ProtocolError: the peer is not a counterpoint server, or has another key.
    """
    own_hello = hello_message(mode, nonce)
    peer_hello = yield HandshakeStep(own_hello, HELLO.size)
    check_hello(peer_hello, mode)
    keys = _HandshakeKeys(credentials, mode, own_hello, peer_hello)
    proof = yield HandshakeStep(keys.client_proof, DIGEST_BYTES)
    if not hmac.compare_digest(proof, keys.server_proof):
        raise handshake_error()
    return keys.session(sends=b"caller", receives=b"server")


def server_handshake(credentials: JobCredentials, mode: SecurityMode, nonce: bytes) -> Handshake:
    """Authenticate as the server.

    Args:
        credentials: of the job.
        mode: of the connection.
        nonce: fresh random bytes.

    Raises:
        ProtocolError: the peer is not a counterpoint client, or has another key.
    """
    peer_hello = yield HandshakeStep(b"", HELLO.size)
    check_magic(peer_hello)
    own_hello = hello_message(mode, nonce)
    proof = yield HandshakeStep(own_hello, DIGEST_BYTES)
    check_hello(peer_hello, mode)
    keys = _HandshakeKeys(credentials, mode, peer_hello, own_hello)
    if not hmac.compare_digest(proof, keys.client_proof):
        yield HandshakeStep(REFUSAL, 0)
        raise handshake_error()
    return keys.session(sends=b"server", receives=b"caller", final_bytes=keys.server_proof)


def hello_message(mode: SecurityMode, nonce: bytes) -> bytes:
    """Return the first message of a side."""
    return HELLO.pack(MAGIC, VERSION, mode, nonce)


def check_magic(peer_hello: bytes) -> None:
    """Raise ProtocolError unless the peer speaks this protocol; others get no reply."""
    if not peer_hello.startswith(MAGIC):
        raise ProtocolError(f"a peer sent {peer_hello[:4]!r} instead of a handshake; check which program runs there")


def check_hello(peer_hello: bytes, mode: SecurityMode) -> None:
    """Check that the peer has this version, has a key if this side has one, and sees the same kind of connection.

    Raises:
        ProtocolError: it does not.
    """
    check_magic(peer_hello)
    _, version, other, _ = HELLO.unpack(peer_hello)
    if version != VERSION or peer_hello[6:8] != bytes(2):
        raise ProtocolError(
            f"the peer speaks protocol version {version}, this side {VERSION}; install the same version of counterpoint"
        )
    if (other == SecurityMode.NONE) != (mode == SecurityMode.NONE):
        has, lacks = ("the peer", "this side") if mode == SecurityMode.NONE else ("this side", "the peer")
        raise KeyMismatchError(f"{has} has a job key and {lacks} has none; give all processes of the job the same key")
    if other != mode:
        raise ProtocolError(
            f"the peer sees a connection of mode {other}, this side {mode}; check for a proxy in between"
        )


class KeyMismatchError(ProtocolError):
    """The peer speaks this protocol, and has another key, or none where this side has one."""


def handshake_error() -> KeyMismatchError:
    """Return the error for keys that do not match."""
    return KeyMismatchError(
        "the handshake failed: the two sides have different job keys, or belong to different jobs or generations; give "
        "both the key of one job"
    )


class _HandshakeKeys:
    """Keys and proofs that both sides derive from the job key and the transcript."""

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
        """Return the record encoders of both directions."""
        if self._mode is not SecurityMode.ENCRYPTED:
            return SecureSession(CrcRecordWriter(), CrcRecordReader(), final_bytes)
        keys = [self._derive(b"records of " + side)[:KEY_BYTES] for side in (sends, receives)]
        return SecureSession(AesGcmRecordWriter(keys[0]), AesGcmRecordReader(keys[1]), final_bytes)
