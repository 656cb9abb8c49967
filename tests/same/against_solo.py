"""Training of one subject under plans, and how far it comes from training without one."""

from dataclasses import dataclass, field

import pytest

from counterpoint.testing import parity
from counterpoint.testing.parity import Trained
from counterpoint.testing.subjects import Recipe, Subject, plan_for


@dataclass(frozen=True)
class Against:
    """A subject, and what solo comes to under each recipe that was asked for."""

    subject: Subject
    known: dict[Recipe, Trained] = field(default_factory=dict)

    def alone(self, recipe=Recipe()):  # noqa: B008 - frozen
        if recipe not in self.known:
            self.known[recipe] = parity.train(self.subject, plan_for("solo", recipe.num_micros), recipe)
        return self.known[recipe]

    def difference(self, run, recipe=Recipe()):  # noqa: B008 - frozen
        """Return the largest relative difference of a parameter; losses are the same."""
        expected = self.alone(recipe)
        assert run.losses == pytest.approx(expected.losses, rel=parity.BAR)
        return max(parity.difference(run.params[name], param) for name, param in expected.params.items())

    def trained(self, strategy, recipe=Recipe(), world=None):  # noqa: B008 - frozen
        return parity.train(self.subject, plan_for(strategy, recipe.num_micros), recipe, world)
