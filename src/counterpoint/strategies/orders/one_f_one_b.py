"""One forward, one backward: as few microbatches in flight as keep all stages busy."""

from __future__ import annotations

from collections.abc import Iterator

from counterpoint.strategies.orders.order import Place, Turn


def one_f_one_b(place: Place) -> Iterator[Turn]:
    """Warm up, then alternate one forward with one backward, then drain.

    At most ``warmup + 1`` microbatches are in flight on a replica, ``n - stage`` of n stages without replicas; the
    bubble is that of ``gpipe``.

    Source:
        Narayanan et al., PipeDream, SOSP 2019, section 3.2; with a flush, Narayanan et al., ICML 2021.
    """
    ahead = place.warmup
    for micro in place.micros[:ahead]:
        yield Turn("F", micro)
    for behind, micro in enumerate(place.micros[ahead:]):
        yield Turn("F", micro)
        yield Turn("B", place.micros[behind])
    for micro in place.micros[len(place.micros) - ahead :]:
        yield Turn("B", micro)


def in_flight(place: Place) -> int:
    """Return the warmup and one more."""
    return min(place.warmup + 1, len(place.micros))
