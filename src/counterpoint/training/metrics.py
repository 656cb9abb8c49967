"""Metrics as sums and counts, so that uneven batches and ranks are weighted by their samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from counterpoint.errors import DataError

Metrics: TypeAlias = Mapping[str, "MeanMetric"]


@dataclass(frozen=True, slots=True)
class MeanMetric:
    """A sum and the number of its terms, or their weights; adding two weights each by its count.

    Example:
        >>> (MeanMetric(3.0, 4) + MeanMetric(1.0, 1)).mean
        0.8
    """

    total: float = 0.0
    count: float = 0

    def __add__(self, other: MeanMetric) -> MeanMetric:
        """Return the combined metric."""
        return MeanMetric(self.total + other.total, self.count + other.count)

    @property
    def mean(self) -> float:
        """The sum divided by the count; nan if the count is 0."""
        return self.total / self.count if self.count else math.nan


def merge_metrics(parts: Iterable[Metrics]) -> dict[str, MeanMetric]:
    """Sum each metric over all parts; its mean is that over all samples together.

    Raises:
        DataError: two parts have different metrics.

    Example:
        >>> merge_metrics([{"accuracy": MeanMetric(3.0, 4)}, {"accuracy": MeanMetric(1.0, 1)}])
        {'accuracy': MeanMetric(total=4.0, count=5)}
    """
    merged: dict[str, MeanMetric] = {}
    for part in parts:
        if merged and set(part) != set(merged):
            raise DataError(
                f"one batch has the metrics {sorted(merged)}, another {sorted(part)}; all batches "
                "need the same ones; return the same keys from the metrics function every time"
            )
        merged = {name: merged.get(name, MeanMetric()) + tally for name, tally in part.items()}
    return merged
