"""Records, the unit of encryption and integrity: no byte of a record is used before all of it is verified.

Both sides count records, and the count is the nonce, so that a lost, repeated, reordered or foreign record is rejected
like a modified one. Without a key, a checksum replaces the tag: it detects faults, not forgery.
Keys are derived with HKDF-SHA256 (RFC 5869).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand
from isal.isal_zlib import crc32

from counterpoint.errors import ProtocolError

DIGEST_BYTES = 32


def hkdf_extract(salt: bytes, secret: bytes) -> bytes:
    """Return a uniformly random 32-byte key from a secret that may not be."""
    return HKDF.extract(SHA256(), salt, secret)


def hkdf_expand(key: bytes, purpose: bytes, num_bytes: int = DIGEST_BYTES) -> bytes:
    """Return a key for one purpose.

    Example:
        >>> hkdf_expand(bytes(32), b"one") == hkdf_expand(bytes(32), b"other")
        False
    """
    return HKDFExpand(SHA256(), num_bytes, purpose).derive(key)


RECORD_BYTES: Final = 1 << 18
SMALL_BYTES: Final = 1 << 12  # up to this size a record has memory of its own, so that several can be sent in one call
TAG_BYTES: Final = 16
KEY_BYTES: Final = 16
RECORDS_PER_KEY: Final = 1 << 18
NONCE = struct.Struct("<4xQ")
COUNT = struct.Struct("<Q")
CHECK = struct.Struct("<I12x")


class RecordWriter(Protocol):
    """Encode bytes as records, in the order in which they are sent."""

    @property
    def uses_scratch(self) -> bool:
        """Whether a large record is in scratch memory that the next one overwrites."""

    def seal(self, plain: memoryview) -> Sequence[memoryview]:
        """Return the next record."""


class RecordReader(Protocol):
    """Decode records, in the order in which they arrive."""

    def receive(self, target: memoryview) -> Sequence[memoryview]:
        """Return the buffers to fill with the next record, which is decoded into the target."""

    def open(self) -> None:
        """Verify the record and decode it into the target; raise ProtocolError if it fails verification."""


class AesGcmRecordWriter:
    """Encrypt and authenticate with AES-128-GCM.

    Args:
        key: of this direction of this connection.
        records_per_key: number of records after which a new key is derived.
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
    """Verify and decrypt records of an :class:`AesGcmRecordWriter` with the same key."""

    def __init__(self, key: bytes, records_per_key: int = RECORDS_PER_KEY) -> None:
        self._keys = _KeySchedule(key, records_per_key)
        self._scratch = bytearray(SMALL_BYTES + TAG_BYTES)
        self._sealed = self._target = memoryview(b"")

    def receive(self, target: memoryview) -> Sequence[memoryview]:
        """Return the buffers to fill."""
        if len(target) + TAG_BYTES > len(self._scratch):
            self._scratch = bytearray(RECORD_BYTES + TAG_BYTES)
        self._sealed, self._target = memoryview(self._scratch)[: len(target) + TAG_BYTES], target
        return (self._sealed,)

    def open(self) -> None:
        """Decrypt into the target; raise ProtocolError if the record is not authentic."""
        cipher, nonce = self._keys.next_key()
        try:
            cipher.decrypt_into(nonce, self._sealed, None, self._target)
        except InvalidTag as error:
            raise authentication_error() from error


class _KeySchedule:
    """Successive keys and nonces of one direction."""

    def __init__(self, key: bytes, records_per_key: int) -> None:
        self._key = key
        self._cipher = AESGCM(key)
        self._records_per_key = records_per_key
        self._count = 0

    def next_key(self) -> tuple[AESGCM, bytes]:
        """Return the cipher and the nonce of the next record."""
        if self._count and self._count % self._records_per_key == 0:
            self._key = hkdf_expand(self._key, b"the key that follows", KEY_BYTES)
            self._cipher = AESGCM(self._key)
        nonce = NONCE.pack(self._count)
        self._count += 1
        return self._cipher, nonce


class CrcRecordWriter:
    """Append a checksum to the bytes, without copying them."""

    uses_scratch = False

    def __init__(self) -> None:
        self._count = 0

    def seal(self, plain: memoryview) -> Sequence[memoryview]:
        """Return the next record."""
        check = checksum(plain, self._count)
        self._count += 1
        return (plain, memoryview(check))


class CrcRecordReader:
    """Verify the checksums of a :class:`CrcRecordWriter`."""

    def __init__(self) -> None:
        self._count = 0
        self._target = memoryview(b"")
        self._check = bytearray(TAG_BYTES)

    def receive(self, target: memoryview) -> Sequence[memoryview]:
        """Return the buffers to fill."""
        self._target = target
        return (target, memoryview(self._check))

    def open(self) -> None:
        """Verify the target; raise ProtocolError if it was changed."""
        if checksum(self._target, self._count) != self._check:
            raise authentication_error()
        self._count += 1


def checksum(plain: memoryview, count: int) -> bytes:
    """Return the checksum that follows a record without a tag."""
    return CHECK.pack(crc32(plain, crc32(COUNT.pack(count))))


def authentication_error() -> ProtocolError:
    """Return the error for a record that fails verification."""
    return ProtocolError(
        "a record failed verification; it was dropped, and the connection is closed: check for a faulty link or an "
        "intermediary"
    )
