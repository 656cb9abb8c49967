"""What a word asks of its rank's own processor."""

from __future__ import annotations

from typing import NamedTuple


class Hand(NamedTuple):
    """What a word asks of its rank's own processor.

    Args:
        seconds: how long.
        is_streamed: whether it is a message that can be taken out as soon as it begins to be put in.
        share: of these seconds, the part in which it computes, and does not wait for the other end.
        over_s: of these seconds, those in which it goes over memory, which the ranks of a host have together. What a
            message takes was measured with both ends at work, and with the cache that they have in common: it has none.
    """

    seconds: float
    is_streamed: bool = False
    share: float = 1.0
    over_s: float = 0.0


IDLE_HAND = Hand(0.0)
"""That of a word that asks for nothing."""
