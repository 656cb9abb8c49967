"""Which ranks are on one host, as far as a plan's axes are concerned."""

from __future__ import annotations

from collections.abc import Sequence


def neighbours(degree: int, stride: int, hosts: Sequence[int]) -> int:
    """Return into groups of how many replicas an axis can be cut so that each group is on one host; 1 if into none."""
    if not hosts or len(hosts) % (stride * degree):
        return 1
    for among in range(degree, 1, -1):
        if degree % among == 0 and all(
            len({hosts[first + place * stride] for place in range(among)}) == 1
            for block in range(0, len(hosts), stride * among)
            for first in range(block, block + stride)
        ):
            return among
    return 1
