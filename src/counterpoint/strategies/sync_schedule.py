"""Which kind of step is taken when, in plans whose steps differ (local SGD, delayed gradients, EASGD)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, TypeAlias

StepKind: TypeAlias = Literal["step", "all_reduce", "compressed", "local", "sync", "fill", "steady"]
"""The kinds of steps.

==============  ===============================================================================================
``step``        the only kind of a synchronous plan
``all_reduce``  gradients are all-reduced: the first steps of post-local SGD, or before compression begins
``compressed``  what is all-reduced is compressed
``local``       replicas update independently; workers of a server push gradients and keep their weights
``sync``        the same, and then weights are averaged, exchanged with a center, or pulled from servers
``fill``        the first step with delayed gradients: its gradient is kept, and none is applied
``steady``      the gradient of the previous step is all-reduced during this one, and applied
==============  ===============================================================================================
"""


@dataclass(frozen=True, slots=True)
class SyncSchedule:
    """Which kind of step is taken when.

    Args:
        sync_every: replicas average their weights, or exchange them with servers, every this many steps; 1 if all
            steps are the same.
        sync_first: number of steps at the beginning that all-reduce gradients.
        staleness: number of steps by which gradients are applied late.
        compress_from: number of steps at the beginning that all-reduce gradients uncompressed.
    """

    sync_every: int = 1
    sync_first: int = 0
    staleness: int = 0
    compress_from: int = 0

    @property
    def step_fractions(self) -> Mapping[StepKind, Fraction]:
        """The kinds of steps and their long-run fraction of all steps; the kind that represents the plan comes last."""
        if self.staleness:
            return {"fill": Fraction(0), "steady": Fraction(1)}
        if self.compress_from:
            return {"all_reduce": Fraction(0), "compressed": Fraction(1)}
        if self.sync_every == 1:
            return {"step": Fraction(1)}
        sync = Fraction(1, self.sync_every)
        begin: dict[StepKind, Fraction] = {"all_reduce": Fraction(0)} if self.sync_first else {}
        return {**begin, "local": 1 - sync, "sync": sync}

    def kind_at(self, number: int, *, has_delayed_grad: bool) -> StepKind:
        """Return the kind of a step.

        Args:
            number: index of the step, from 0.
            has_delayed_grad: whether the gradient of an earlier step is still to be applied.

        Example:
            >>> schedule = SyncSchedule(sync_every=2, sync_first=1)
            >>> [schedule.kind_at(number, has_delayed_grad=False) for number in range(5)]
            ['all_reduce', 'local', 'sync', 'local', 'sync']
        """
        if self.staleness:
            return "steady" if has_delayed_grad else "fill"
        if self.compress_from:
            return "all_reduce" if number < self.compress_from else "compressed"
        if self.sync_every == 1:
            return "step"
        if number < self.sync_first:
            return "all_reduce"
        return "sync" if (number + 1 - self.sync_first) % self.sync_every == 0 else "local"
