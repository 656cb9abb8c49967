"""Records: what is sealed as one, so that not a byte of it is believed before all of it is authentic.

Both sides count records and the count is the nonce, so that one that is lost, doubled, moved or of another connection
is as wrong as one that was changed. Without a key a checksum takes the place of the tag: it finds faults, no forgery.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from isal.isal_zlib import crc32

from counterpoint.errors import ProtocolError
from counterpoint.server.wire.derive import expand

RECORD_BYTES: Final = 1 << 18
SMALL_BYTES: Final = 1 << 12  # up to here a record is sealed into memory of its own, so that several are sent at once
TAG_BYTES: Final = 16
KEY_BYTES: Final = 16
RECORDS_PER_KEY: Final = 1 << 18
NONCE = struct.Struct("<4xQ")
COUNT = struct.Struct("<Q")
CHECK = struct.Struct("<I12x")


class Sealer(Protocol):
    """Makes records of bytes, in the order in which they are sent."""

    @property
    def has_stage(self) -> bool:
        """Whether a large record stands in memory that the next one takes."""

    def seal(self, plain: memoryview) -> Sequence[memoryview]:
        """Return the next record."""


class Opener(Protocol):
    """Makes bytes of records, in the order in which they come."""

    def receive(self, target: memoryview) -> Sequence[memoryview]:
        """Return what to fill with the next record, which will be opened into the target."""

    def open(self) -> None:
        """The target has what was sealed; a ProtocolError where the record is not the one that was sealed next."""


class KeyedSealer:
    """Encrypts and authenticates, by AES-128-GCM.

    Args:
        key: of this direction of this connection.
        records_per_key: after so many another key follows, derived from this one.
    """

    has_stage = True

    def __init__(self, key: bytes, records_per_key: int = RECORDS_PER_KEY) -> None:
        self._keys = _Keys(key, records_per_key)
        self._stage = bytearray()

    def seal(self, plain: memoryview) -> Sequence[memoryview]:
        """Return the next record."""
        cipher, nonce = self._keys.following()
        if len(plain) <= SMALL_BYTES:
            return (memoryview(cipher.encrypt(nonce, plain, None)),)
        if not self._stage:
            self._stage = bytearray(RECORD_BYTES + TAG_BYTES)
        sealed = memoryview(self._stage)[: len(plain) + TAG_BYTES]
        cipher.encrypt_into(nonce, plain, None, sealed)
        return (sealed,)


class KeyedOpener:
    """Verifies and decrypts what a :class:`KeyedSealer` of the same key has sealed."""

    def __init__(self, key: bytes, records_per_key: int = RECORDS_PER_KEY) -> None:
        self._keys = _Keys(key, records_per_key)
        self._stage = bytearray(SMALL_BYTES + TAG_BYTES)
        self._sealed = self._target = memoryview(b"")

    def receive(self, target: memoryview) -> Sequence[memoryview]:
        """Return what to fill."""
        if len(target) + TAG_BYTES > len(self._stage):
            self._stage = bytearray(RECORD_BYTES + TAG_BYTES)
        self._sealed, self._target = memoryview(self._stage)[: len(target) + TAG_BYTES], target
        return (self._sealed,)

    def open(self) -> None:
        """The target has what was sealed; a ProtocolError where it was not sealed so."""
        cipher, nonce = self._keys.following()
        try:
            cipher.decrypt_into(nonce, self._sealed, None, self._target)
        except InvalidTag as error:
            raise not_authentic() from error


class _Keys:
    """The keys of one direction, one after the other, and the nonces."""

    def __init__(self, key: bytes, records_per_key: int) -> None:
        self._key = key
        self._cipher = AESGCM(key)
        self._records_per_key = records_per_key
        self._count = 0

    def following(self) -> tuple[AESGCM, bytes]:
        """Return what seals the next record, and its nonce."""
        if self._count and self._count % self._records_per_key == 0:
            self._key = expand(self._key, b"the key that follows", KEY_BYTES)
            self._cipher = AESGCM(self._key)
        nonce = NONCE.pack(self._count)
        self._count += 1
        return self._cipher, nonce


class CheckedSealer:
    """Writes a checksum behind the bytes, which stay where they are."""

    has_stage = False

    def __init__(self) -> None:
        self._count = 0

    def seal(self, plain: memoryview) -> Sequence[memoryview]:
        """Return the next record."""
        check = checksum(plain, self._count)
        self._count += 1
        return (plain, memoryview(check))


class CheckedOpener:
    """Compares the checksum of a :class:`CheckedSealer`."""

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
            raise not_authentic()
        self._count += 1


def checksum(plain: memoryview, count: int) -> bytes:
    """Return what stands behind a record that has no tag."""
    return CHECK.pack(crc32(plain, crc32(COUNT.pack(count))))


def not_authentic() -> ProtocolError:
    """Return the error for a record that is not as the peer sealed it."""
    return ProtocolError(
        "a record is not the one that the peer sealed next; nothing of it was believed, and the connection ends here: "
        "look for a bad link or for somebody in between"
    )
