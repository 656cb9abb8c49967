"""Keys from keys: HKDF with SHA-256, for keys of one block.

Source:
    RFC 5869, HMAC-based extract-and-expand key derivation function.
"""

from __future__ import annotations

import hashlib
import hmac

DIGEST_BYTES = 32


def extract(salt: bytes, secret: bytes) -> bytes:
    """Return 32 bytes that are even where the secret may not be."""
    return hmac.digest(salt, secret, hashlib.sha256)


def expand(key: bytes, purpose: bytes, num_bytes: int = DIGEST_BYTES) -> bytes:
    """Return a key for one purpose, of at most 32 bytes.

    Example:
        >>> expand(bytes(32), b"one") == expand(bytes(32), b"other")
        False
    """
    return hmac.digest(key, purpose + b"\1", hashlib.sha256)[:num_bytes]
