"""How much a probe measures: how large, how long, how often."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Effort:
    """What a probe measures, and how long it takes over it.

    Args:
        rows: of the square matrices that are multiplied.
        layer: samples, inputs and outputs of the layer that ranks compute at the same time; its weights and their
            gradient are more than a core's own caches hold, as those of most models are.
        vector_bytes: of the vectors that are added up; more than caches hold.
        messages: bytes of each, from small to large.
        span_s: so long one figure is measured, though at least three times.
        rounds: how often a crowd computes.
    """

    rows: tuple[int, ...] = (256, 512, 1024)
    layer: tuple[int, int, int] = (32, 1024, 4096)
    vector_bytes: int = 64 << 20
    messages: tuple[int, ...] = (8, 1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
    span_s: float = 0.1
    rounds: int = 5
