"""Collectives larger than one chunk give the same as in one piece."""

from itertools import pairwise

import pytest
import torch

from counterpoint.fabric.gloo.ops import CHUNK_BYTES
from tests.fabric.run_ranks import on_gloo

NUMBERS = CHUNK_BYTES // 8
BOUNDS = [0, 2 * NUMBERS + 3, 2 * NUMBERS + 3, 3 * NUMBERS]
"""Of three pieces and a bit, of none, of one less a bit."""


def exchanged(fabric):
    """What three collectives leave on a rank, as sums of its ranges, which are all alike within."""
    group, own = tuple(range(fabric.num_ranks)), torch.full((BOUNDS[-1],), float(fabric.rank + 1), dtype=torch.float64)
    gathered, shared = own.clone(), own.clone()
    fabric.all_gather("gathered", gathered, BOUNDS, group).wait()
    fabric.reduce_scatter("shared", shared, BOUNDS, group).wait()
    counts = [[NUMBERS * sender + at for at in group] for sender in group]
    sent = torch.cat([torch.full((count,), float(count)) for count in counts[fabric.rank]])
    taken, work = fabric.all_to_all("taken", sent, counts, group)
    work.wait()
    parts = torch.split(taken, [row[fabric.rank] for row in counts])
    return (
        [gathered[low:high].unique().tolist() for low, high in pairwise(BOUNDS)],
        shared[BOUNDS[fabric.rank] : BOUNDS[fabric.rank + 1]].unique().tolist(),
        [part.unique().tolist() for part in parts],
    )


@pytest.mark.process
def test_collectives_larger_than_a_chunk_are_complete():
    for rank, (gathered, shared, taken) in enumerate(on_gloo(exchanged, 3)):
        assert gathered == [[1.0], [], [3.0]]
        assert shared == ([6.0] if BOUNDS[rank] < BOUNDS[rank + 1] else [])
        assert taken == [[float(NUMBERS * sender + rank)] if NUMBERS * sender + rank else [] for sender in range(3)]
