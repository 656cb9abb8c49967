"""What one place sends to another: a kind, who sent it, for which step, and bytes; never a pickle of ours."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from counterpoint.errors import ProtocolError

HEAD = struct.Struct("<4sB3xII")
MAGIC = b"cpsp"


class Kind(IntEnum):
    """What is in a parcel."""

    SAMPLES = 1
    WEIGHTS = 2
    STATE = 3
    GRADIENT = 4
    NOTE = 5


@dataclass(frozen=True, slots=True)
class Parcel:
    """Bytes on their way from one place to another.

    Args:
        kind: what they are.
        sender: the place that made them.
        step: the step that they were made in.
        payload: the bytes: safetensors for samples and state, plain numbers for weights and gradients, JSON for notes.

    Example:
        >>> parse_parcel(format_parcel(Parcel(Kind.NOTE, 2, 7, b"{}")))
        Parcel(kind=<Kind.NOTE: 5>, sender=2, step=7, payload=b'{}')
    """

    kind: Kind
    sender: int
    step: int
    payload: bytes


def format_parcel(parcel: Parcel) -> bytes:
    """Return the parcel as bytes: 16 in front of its payload."""
    return HEAD.pack(MAGIC, parcel.kind, parcel.sender, parcel.step) + parcel.payload


def parse_parcel(text: bytes) -> Parcel:
    """Return what ``format_parcel`` wrote.

    Raises:
        ProtocolError: it did not write this.
    """
    if len(text) < HEAD.size or text[:4] != MAGIC or text[4] not in set(Kind):
        raise ProtocolError(
            f"{len(text)} bytes came that begin with {text[:8]!r}, which is no parcel; do all executors have the same "
            "version of counterpoint?"
        )
    _, kind, sender, step = HEAD.unpack_from(text)
    return Parcel(Kind(kind), sender, step, text[HEAD.size :])
