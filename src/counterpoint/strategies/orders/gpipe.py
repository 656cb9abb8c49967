"""Fill and drain: all forwards, then all backwards."""

from __future__ import annotations

from collections.abc import Iterator

from counterpoint.strategies.orders.order import Place, Turn


def gpipe(place: Place) -> Iterator[Turn]:
    """Run all microbatches forward, then all backward, the last one first.

    All microbatches of a replica are in flight at once; the bubble is ``(n-1)/(m+n-1)`` for n stages and m
    microbatches.

    Source:
        Huang et al., GPipe: Efficient Training of Giant Neural Networks, NeurIPS 2019, section 2.
    """
    for micro in place.micros:
        yield "F", micro
    for micro in reversed(place.micros):
        yield "B", micro
