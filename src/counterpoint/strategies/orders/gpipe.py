"""Fill and drain: all forwards, then all backwards."""

from __future__ import annotations

from collections.abc import Iterator

from counterpoint.strategies.orders.order import Place, Turn


def gpipe(place: Place) -> Iterator[Turn]:
    """Run all microbatches forward, then all backward, the last one first.

    All m microbatches of a replica are in flight at once; the bubble is ``(n-1)/(m+n-1)`` for n stages. With v chunks
    per stage all microbatches go through one chunk before the next: ``v m`` in flight, and, for ``m >= n``, a bubble of
    ``(n-1)/(v m+n-1)``.

    Source:
        Huang et al., GPipe: Efficient Training of Giant Neural Networks, NeurIPS 2019, section 2; with chunks
        Lamy-Poirier, Breadth-First Pipeline Parallelism, MLSys 2023.
    """
    for chunk in range(place.chunks):
        for micro in place.micros:
            yield Turn("F", micro, chunk)
    for chunk in reversed(range(place.chunks)):
        for micro in reversed(place.micros):
            yield Turn("B", micro, chunk)


def in_flight(place: Place) -> int:
    """Return every microbatch on every chunk."""
    return place.chunks * len(place.micros)
