"""How fast a run is right now: sums over its last seconds, from which all figures of a progress line follow."""

from __future__ import annotations

import math
from dataclasses import dataclass

from counterpoint.training.events import StepEnd

MEMORY_S = 5.0


@dataclass(slots=True)
class Meter:
    """Sums over steps in which a step counts less the longer it is past; changes with every step.

    Args:
        memory_s: seconds of training after which a step counts 1/e.
    """

    memory_s: float = MEMORY_S
    steps: float = 0.0
    samples: float = 0.0
    seconds: float = 0.0
    loss: float = 0.0
    losses: float = 0.0
    skipped: int = 0

    def add(self, step: StepEnd) -> None:
        """The step is in the sums; one that was left out counts as skipped, and its loss does not count."""
        keep = math.exp(-step.seconds / self.memory_s)
        self.steps = self.steps * keep + 1
        self.samples = self.samples * keep + step.num_samples
        self.seconds = self.seconds * keep + step.seconds
        self.skipped += bool(step.fault)
        if math.isfinite(step.loss):
            self.loss = self.loss * keep + step.loss
            self.losses = self.losses * keep + 1

    @property
    def mean_loss(self) -> float:
        """The loss of the last seconds; nan when none was finite."""
        return self.loss / self.losses if self.losses else math.nan

    @property
    def samples_per_s(self) -> float:
        """Samples trained on per second; nan before the first step."""
        return self.samples / self.seconds if self.seconds else math.nan

    @property
    def step_s(self) -> float:
        """Seconds of one step; nan before the first."""
        return self.seconds / self.steps if self.steps else math.nan
