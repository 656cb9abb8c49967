"""How much a probe measures: how large, how long, how often."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Effort:
    """What a probe measures, and how long it takes over it.

    Args:
        rows: of the square matrices that are multiplied.
        crowd_rows: of those where ranks compute at the same time.
        vector_bytes: of the vectors that are added up; more than caches hold.
        messages: bytes of each, from small to large.
        span_s: so long one figure is measured, though at least three times.
        rounds: how often a crowd computes.
    """

    rows: tuple[int, ...] = (256, 512, 1024)
    crowd_rows: int = 512
    vector_bytes: int = 64 << 20
    messages: tuple[int, ...] = (8, 1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
    span_s: float = 0.1
    rounds: int = 5
