"""Which kind of step comes when, in a plan whose steps are not all alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, TypeAlias

StepKind: TypeAlias = Literal["step", "all_reduce", "local", "sync", "fill", "steady"]
"""What a kind of step is called.

===========  ==============================================================
``step``     the only kind of a synchronous plan
``all_reduce``  gradients are summed, before replicas begin to update apart
``local``    replicas update apart, or push gradients and go on with the weights that they have
``sync``     they do so and average their weights, meet a center, or are given weights by servers
``fill``     a gradient is set aside, and none is there yet to be applied
``steady``   the one set aside before is summed meanwhile, and applied
===========  ==============================================================
"""


@dataclass(frozen=True, slots=True)
class SyncSchedule:
    """Which kind of step comes when.

    Args:
        every: after so many steps replicas average their weights, or meet those of servers; 1 if all steps are alike.
        first: so many steps at the beginning are joint.
        late: by how many steps gradients are applied late.
    """

    sync_every: int = 1
    sync_first: int = 0
    staleness: int = 0

    @property
    def step_fractions(self) -> Mapping[StepKind, Fraction]:
        """The kinds of steps, the one that says most last, and which part of all steps they are in the long run."""
        if self.staleness:
            return {"fill": Fraction(0), "steady": Fraction(1)}
        if self.sync_every == 1:
            return {"step": Fraction(1)}
        meeting = Fraction(1, self.sync_every)
        begin: dict[StepKind, Fraction] = {"all_reduce": Fraction(0)} if self.sync_first else {}
        return {**begin, "local": 1 - meeting, "sync": meeting}

    def kind_at(self, number: int, *, has_delayed_grad: bool) -> StepKind:
        """Return the kind of a step.

        Args:
            number: of the step, from 0.
            has_late: whether a gradient has been set aside that is still to be applied.

        Example:
            >>> [
            ...     SyncSchedule(sync_every=2, sync_first=1).kind_at(number, has_delayed_grad=False)
            ...     for number in range(5)
            ... ]
            ['joint', 'quiet', 'meeting', 'quiet', 'meeting']
        """
        if self.staleness:
            return "steady" if has_delayed_grad else "fill"
        if self.sync_every == 1:
            return "step"
        if number < self.sync_first:
            return "all_reduce"
        return "sync" if (number + 1 - self.sync_first) % self.sync_every == 0 else "local"
