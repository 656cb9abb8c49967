"""How much a peer may ask for: in bytes, in time, in number."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """What one side of a connection puts up with.

    Args:
        text_bytes: of a letter's kind and fields, and of what its tensors look like.
        payload_bytes: of a letter's tensors.
        unsent_bytes: a server does not read from a connection with more of them, and a client asks nothing more.
        connections: how many a server has at a time.
        strangers: how many of them may not have proved yet that they have the key; the oldest goes first.
        greeting_s: the longest that a greeting may last.
        patience_s: the longest that a peer may take no byte, or none of a frame that has begun may come.
    """

    text_bytes: int = 1 << 20
    payload_bytes: int = 1 << 32
    unsent_bytes: int = 1 << 26
    connections: int = 1024
    strangers: int = 64
    greeting_s: float = 5.0
    patience_s: float = 30.0


DEFAULTS = Limits()
