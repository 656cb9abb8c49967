"""How much memory stays from the forward of each piece to its backward."""

from __future__ import annotations

import torch
from torch import Tensor

from counterpoint.profiler.subject import storages
from counterpoint.runtime.compute import Compute
from counterpoint.runtime.feed import Feed
from counterpoint.runtime.shares import Shares


def kept_bytes(compute: Compute, feed: Feed) -> list[int]:
    """Return for each function of a rank the bytes that its forward leaves behind for backwards.

    Parameters, buffers and the batch are there anyhow; what several functions keep counts for the first.

    Args:
        compute: whose functions are run.
        feed: whose first microbatch is run.
    """
    owned = (compute.store.params, compute.store.buffers, feed.inputs(0), feed.targets(0))
    seen = storages(owned)
    compute.begin(feed, Shares({0: 1.0}))
    found = []
    for first, (stop, _) in sorted(compute.by_first.items()):
        fresh: dict[int, int] = {}

        def note(tensor: Tensor, into: dict[int, int] = fresh) -> Tensor:
            into.update(storages(tensor))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, _same):
            compute.forward(first, stop - 1, 0)
        fresh.update(storages([kept.value for kept in compute.values.values()]))
        found.append(sum(size for address, size in fresh.items() if address not in seen))
        seen.update(fresh)
    compute.drop()
    return found


def _same(tensor: Tensor) -> Tensor:
    return tensor
