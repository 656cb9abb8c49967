"""Keys from keys: HKDF with SHA-256, for keys of one block.

Source:
    RFC 5869, HMAC-based extract-and-expand key derivation function.

Records: what is sealed as one, so that not a byte of it is believed before all of it is authentic.

Both sides count records and the count is the nonce, so that one that is lost, doubled, moved or of another connection
is as wrong as one that was changed. Without a key a checksum takes the place of the tag: it finds faults, no forgery.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence
from typing import Final, Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from isal.isal_zlib import crc32

from counterpoint.errors import ProtocolError

DIGEST_BYTES = 32


def hkdf_extract(salt: bytes, secret: bytes) -> bytes:
    """Return 32 bytes that are even where the secret may not be."""
    return hmac.digest(salt, secret, hashlib.sha256)


def hkdf_expand(key: bytes, purpose: bytes, num_bytes: int = DIGEST_BYTES) -> bytes:
    """Return a key for one purpose, of at most 32 bytes.

    Example:
        >>> expand(bytes(32), b"one") == expand(bytes(32), b"other")
        False
    """
    return hmac.digest(key, purpose + b"\1", hashlib.sha256)[:num_bytes]


RECORD_BYTES: Final = 1 << 18
SMALL_BYTES: Final = 1 << 12  # up to here a record is sealed into memory of its own, so that several are sent at once
TAG_BYTES: Final = 16
KEY_BYTES: Final = 16
RECORDS_PER_KEY: Final = 1 << 18
NONCE = struct.Struct("<4xQ")
COUNT = struct.Struct("<Q")
CHECK = struct.Struct("<I12x")


class RecordWriter(Protocol):
    """Makes records of bytes, in the order in which they are sent."""

    @property
    def uses_scratch(self) -> bool:
        """Whether a large record stands in memory that the next one takes."""

    def seal(self, plain: memoryview) -> Sequence[memoryview]:
        """Return the next record."""


class RecordReader(Protocol):
    """Makes bytes of records, in the order in which they come."""

    def receive(self, target: memoryview) -> Sequence[memoryview]:
        """Return what to fill with the next record, which will be opened into the target."""

    def open(self) -> None:
        """The target has what was sealed; a ProtocolError where the record is not the one that was sealed next."""


class AesGcmRecordWriter:
    """Encrypts and authenticates, by AES-128-GCM.

    Args:
        key: of this direction of this connection.
        records_per_key: after so many another key follows, derived from this one.
    """

    uses_scratch = True

    def __init__(self, key: bytes, records_per_key: int = RECORDS_PER_KEY) -> None:
        self._keys = _KeySchedule(key, records_per_key)
        self._scratch = bytearray()

    def seal(self, plain: memoryview) -> Sequence[memoryview]:
        """Return the next record."""
        cipher, nonce = self._keys.next_key()
        if len(plain) <= SMALL_BYTES:
            return (memoryview(cipher.encrypt(nonce, plain, None)),)
        if not self._scratch:
            self._scratch = bytearray(RECORD_BYTES + TAG_BYTES)
        sealed = memoryview(self._scratch)[: len(plain) + TAG_BYTES]
        cipher.encrypt_into(nonce, plain, None, sealed)
        return (sealed,)


class AesGcmRecordReader:
    """Verifies and decrypts what a :class:`AesGcmRecordWriter` of the same key has sealed."""

    def __init__(self, key: bytes, records_per_key: int = RECORDS_PER_KEY) -> None:
        self._keys = _KeySchedule(key, records_per_key)
        self._scratch = bytearray(SMALL_BYTES + TAG_BYTES)
        self._sealed = self._target = memoryview(b"")

    def receive(self, target: memoryview) -> Sequence[memoryview]:
        """Return what to fill."""
        if len(target) + TAG_BYTES > len(self._scratch):
            self._scratch = bytearray(RECORD_BYTES + TAG_BYTES)
        self._sealed, self._target = memoryview(self._scratch)[: len(target) + TAG_BYTES], target
        return (self._sealed,)

    def open(self) -> None:
        """The target has what was sealed; a ProtocolError where it was not sealed so."""
        cipher, nonce = self._keys.next_key()
        try:
            cipher.decrypt_into(nonce, self._sealed, None, self._target)
        except InvalidTag as error:
            raise authentication_error() from error


class _KeySchedule:
    """The keys of one direction, one after the other, and the nonces."""

    def __init__(self, key: bytes, records_per_key: int) -> None:
        self._key = key
        self._cipher = AESGCM(key)
        self._records_per_key = records_per_key
        self._count = 0

    def next_key(self) -> tuple[AESGCM, bytes]:
        """Return what seals the next record, and its nonce."""
        if self._count and self._count % self._records_per_key == 0:
            self._key = hkdf_expand(self._key, b"the key that follows", KEY_BYTES)
            self._cipher = AESGCM(self._key)
        nonce = NONCE.pack(self._count)
        self._count += 1
        return self._cipher, nonce


class CrcRecordWriter:
    """Writes a checksum behind the bytes, which stay where they are."""

    uses_scratch = False

    def __init__(self) -> None:
        self._count = 0

    def seal(self, plain: memoryview) -> Sequence[memoryview]:
        """Return the next record."""
        check = checksum(plain, self._count)
        self._count += 1
        return (plain, memoryview(check))


class CrcRecordReader:
    """Compares the checksum of a :class:`CrcRecordWriter`."""

    def __init__(self) -> None:
        self._count = 0
        self._target = memoryview(b"")
        self._check = bytearray(TAG_BYTES)

    def receive(self, target: memoryview) -> Sequence[memoryview]:
        """Return what to fill."""
        self._target = target
        return (target, memoryview(self._check))

    def open(self) -> None:
        """The target has what was sent; a ProtocolError where it was changed on the way."""
        if checksum(self._target, self._count) != self._check:
            raise authentication_error()
        self._count += 1


def checksum(plain: memoryview, count: int) -> bytes:
    """Return what stands behind a record that has no tag."""
    return CHECK.pack(crc32(plain, crc32(COUNT.pack(count))))


def authentication_error() -> ProtocolError:
    """Return the error for a record that is not as the peer sealed it."""
    return ProtocolError(
        "a record is not the one that the peer sealed next; nothing of it was believed, and the connection ends here: "
        "look for a bad link or for somebody in between"
    )
