"""Metrics as sums and counts, so that uneven batches and ranks can be added before they are divided."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from counterpoint.errors import DataError

Metrics: TypeAlias = Mapping[str, "Tally"]


@dataclass(frozen=True, slots=True)
class MeanMetric:
    """A sum and how much went into it, so that uneven batches can be added before they are divided.

    Example:
        >>> (MeanMetric(3.0, 4) + MeanMetric(1.0, 1)).mean
        0.8
    """

    total: float = 0.0
    count: int = 0

    def __add__(self, other: MeanMetric) -> MeanMetric:
        """Return both together."""
        return MeanMetric(self.total + other.total, self.count + other.count)

    @property
    def mean(self) -> float:
        """The sum per count; not a number where nothing was counted."""
        return self.total / self.count if self.count else math.nan


def merge_metrics(parts: Iterable[Metrics]) -> dict[str, MeanMetric]:
    """Return the sum of each metric over all parts; the mean of it is that over all samples together.

    Raises:
        DataError: two parts have different metrics.

    Example:
        >>> merge_metrics([{"accuracy": MeanMetric(3.0, 4)}, {"accuracy": MeanMetric(1.0, 1)}])
        {'accuracy': MeanMetric(total=4.0, count=5)}
    """
    added: dict[str, MeanMetric] = {}
    for part in parts:
        if added and set(part) != set(added):
            raise DataError(
                f"one batch has the metrics {sorted(added)}, another {sorted(part)}; all batches are "
                "measured alike; return the same keys from measure every time"
            )
        added = {name: added.get(name, MeanMetric()) + tally for name, tally in part.items()}
    return added
