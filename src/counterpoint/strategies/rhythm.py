"""Which kind of step comes when, in a plan whose steps are not all alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, TypeAlias

TurnName: TypeAlias = Literal["step", "joint", "quiet", "meeting", "first", "steady"]
"""What a kind of step is called.

===========  ==============================================================
``step``     the only kind of a synchronous plan
``joint``    gradients are summed, before replicas begin to update apart
``quiet``    replicas update apart, or push gradients and go on with the weights that they have
``meeting``  they do so and average their weights, meet a center, or are given weights by servers
``first``    a gradient is set aside, and none is there yet to be applied
``steady``   the one set aside before is summed meanwhile, and applied
===========  ==============================================================
"""


@dataclass(frozen=True, slots=True)
class Rhythm:
    """Which kind of step comes when.

    Args:
        every: after so many steps replicas average their weights, or meet those of servers; 1 if all steps are alike.
        first: so many steps at the beginning are joint.
        late: by how many steps gradients are applied late.
    """

    every: int = 1
    first: int = 0
    late: int = 0

    @property
    def turns(self) -> Mapping[TurnName, Fraction]:
        """The kinds of steps, the one that says most last, and which part of all steps they are in the long run."""
        if self.late:
            return {"first": Fraction(0), "steady": Fraction(1)}
        if self.every == 1:
            return {"step": Fraction(1)}
        meeting = Fraction(1, self.every)
        begin: dict[TurnName, Fraction] = {"joint": Fraction(0)} if self.first else {}
        return {**begin, "quiet": 1 - meeting, "meeting": meeting}

    def turn_at(self, number: int, *, has_late: bool) -> TurnName:
        """Return the kind of a step.

        Args:
            number: of the step, from 0.
            has_late: whether a gradient has been set aside that is still to be applied.

        Example:
            >>> [Rhythm(every=2, first=1).turn_at(number, has_late=False) for number in range(5)]
            ['joint', 'quiet', 'meeting', 'quiet', 'meeting']
        """
        if self.late:
            return "steady" if has_late else "first"
        if self.every == 1:
            return "step"
        if number < self.first:
            return "joint"
        return "meeting" if (number + 1 - self.first) % self.every == 0 else "quiet"
