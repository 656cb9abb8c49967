"""Global batches of a dataset, read microbatch by microbatch, each at most once per process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from counterpoint.data.fetch import MapDataset, fetch
from counterpoint.data.sampler import Indices, split


class DatasetFeed:
    """One global batch of a dataset.

    Args:
        dataset: any map-style dataset whose samples are ``(inputs..., target)``.
        indices: the samples of the batch, in order.
        num_micros: into how many microbatches it is cut.
    """

    def __init__(self, dataset: MapDataset, indices: Indices, num_micros: int) -> None:
        self.dataset = dataset
        self.indices = indices
        self.places = split(len(indices), num_micros)
        self.sizes: Mapping[int, int] = {micro: stop - start for micro, (start, stop) in enumerate(self.places)}
        self.read: dict[int, tuple[Tensor, ...]] = {}

    def fields(self, micro: int) -> Sequence[Tensor]:
        """Return the fields of a microbatch's samples, stacked."""
        if micro not in self.read:
            start, stop = self.places[micro]
            self.read[micro] = fetch(self.dataset, self.indices[start:stop])
        return self.read[micro]

    def inputs(self, micro: int) -> Any:  # noqa: ANN401 - one tensor or a tuple of them
        """Return all fields but the last: one tensor, or a tuple of several."""
        fields = self.fields(micro)[:-1]
        return fields[0] if len(fields) == 1 else tuple(fields)

    def targets(self, micro: int) -> Tensor:
        """Return the last field."""
        return self.fields(micro)[-1]
