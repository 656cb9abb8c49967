"""What the members of a group agree on about their buckets: the order of their gradients, and how large they are.

Both are agreed on by a small collective that is started beside the sums of a step and is there for the next one, so
that nobody waits for it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from counterpoint.fabric.fabric import Fabric, Group, Work
from counterpoint.runtime.buckets import ladder
from counterpoint.runtime.tuning import Trials, fastest
from counterpoint.strategies.buckets import Buckets, Ready, cut, format_bytes

Cut: TypeAlias = tuple[tuple[int, ...], ...]
"""The places of each bucket, in the order in which buckets are started."""

LOG = logging.getLogger("counterpoint.buckets")


@dataclass(frozen=True, slots=True)
class Weighed:
    """What is known of a gradient before any backward: in which flat buffer it lies, and its size."""

    arena: int
    num_bytes: int


class Agreement:
    """The buckets of one group, the same on all members.

    Args:
        fabric: the way to the others.
        group: the members.
        sizes: of buckets, as the plan says.
        weighed: every gradient that may be in one; the same on all members.
        label: what is summed, for errors and the log.
    """

    def __init__(self, fabric: Fabric, group: Group, sizes: Buckets, weighed: Sequence[Weighed], label: str) -> None:
        self.fabric = fabric
        self.group = group
        self.weighed = tuple(weighed)
        self.label = label
        self.ways = [sizes]
        self.cuts: list[Cut] = [()]
        self.chosen = 0
        self.is_ordered = not weighed
        self.trials = Trials(1)
        self._asked: tuple[Tensor, Work] | None = None

    @property
    def is_trying(self) -> bool:
        """Whether sizes are being tried."""
        return not self.trials.is_over

    @property
    def cut(self) -> Cut:
        """The buckets of the next backward; none before an order is agreed on."""
        return self.cuts[self.chosen if self.trials.is_over else self.trials.way]

    def ask(self, ready_s: Sequence[float]) -> None:
        """Start to agree on what is open; all members call it at the same place of a step.

        Args:
            ready_s: when each gradient was ready in this step, on this rank; nan for those that never were.
        """
        if not self.is_ordered:
            seen = torch.tensor([-1.0 if math.isnan(when) else when for when in ready_s], dtype=torch.float64)
            work = self.fabric.broadcast(f"order of {self.label}", seen, self.group, self.group[0])
            self._asked = seen, work
        elif self.trials.is_over and len(self.ways) > 1:
            seconds = torch.tensor(self.trials.medians(), dtype=torch.float64)
            self._asked = seconds, self.fabric.all_reduce(f"seconds of {self.label}", seconds, self.group, "max")

    def hear(self) -> None:
        """What was asked for is agreed on; all members call it, at places where they may wait."""
        if self._asked is None:
            return
        numbers, work = self._asked
        work.wait()
        self._asked = None
        (self._settle if self.is_ordered else self._put_in_order)(numbers.tolist())

    def _put_in_order(self, ready_s: Sequence[float]) -> None:
        """Cut the gradients that the first member has seen, in the order in which it has."""
        made = [
            Ready(place, weighed.arena, weighed.num_bytes, when)
            for place, (weighed, when) in enumerate(zip(self.weighed, ready_s, strict=True))
            if when >= 0
        ]
        self.is_ordered = bool(made)
        given = self.ways[0]
        cuts = {cut(made, sizes): sizes for sizes in reversed(ladder(given) if given.tune else [given])}
        first = cut(made, given)
        self.cuts = [first, *(other for other in reversed(cuts) if other != first)]
        self.ways = [given, *(cuts[other] for other in self.cuts[1:])]
        self.trials = Trials(len(self.cuts))

    def _settle(self, seconds: Sequence[float]) -> None:
        """Go on with the fastest."""
        self.chosen = fastest(seconds)
        before, after = self.ways[0], self.ways[self.chosen]
        if self.chosen and self.fabric.rank == self.group[0]:
            LOG.info(
                "%s: buckets of %s instead of %s, %d instead of %d of them: %.1f ms a step instead of %.1f",
                self.label, written(after), written(before), len(self.cuts[self.chosen]), len(self.cuts[0]),
                1e3 * seconds[self.chosen], 1e3 * seconds[0],
            )  # fmt: skip
        self.ways, self.cuts, self.chosen = [after], [self.cuts[self.chosen]], 0
        self.trials = Trials(1)


def written(sizes: Buckets) -> str:
    """Return the size of buckets as text."""
    return format_bytes(sizes.bucket_bytes) if sizes.bucket_bytes < 2**62 else "any size"
