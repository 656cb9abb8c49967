"""Training of one subject under plans, and how far it comes from training without one."""

from dataclasses import dataclass, field

import pytest

from counterpoint.testing import parity
from counterpoint.testing.parity import ParityRun
from counterpoint.testing.parity_models import ParityModel, TrainConfig, plan_for


@dataclass(frozen=True)
class SingleProcessBaseline:
    """A subject, and what solo comes to under each recipe that was asked for."""

    subject: ParityModel
    known: dict[TrainConfig, ParityRun] = field(default_factory=dict)

    def baseline(self, recipe=TrainConfig()):  # noqa: B008 - frozen
        if recipe not in self.known:
            self.known[recipe] = parity.train(self.subject, plan_for("solo", recipe.num_microbatches), recipe)
        return self.known[recipe]

    def difference(self, run, recipe=TrainConfig()):  # noqa: B008 - frozen
        """Return the largest relative difference of a parameter; losses are the same."""
        expected = self.baseline(recipe)
        assert run.losses == pytest.approx(expected.losses, rel=parity.TOLERANCE)
        return max(parity.relative_difference(run.params[name], param) for name, param in expected.params.items())

    def train(self, strategy, recipe=TrainConfig(), world=None):  # noqa: B008 - frozen
        return parity.train(self.subject, plan_for(strategy, recipe.num_microbatches), recipe, world)
