"""Several steps of one process that have parameters in common, each with an optimizer and a plan of its own.

Ranks that train copies or shards of a parameter do not see what other ranks make of it. So a step first takes the
weights of the steps that have trained any of its parameters since its own last turn::

    step a | a's ranks train       |              | take weights of b, train
    step b |         take weights of a, train     |
"""

from __future__ import annotations

from functools import cache
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet

from torch import nn


class ModelTrainer(Protocol):
    """Ranks that train a model.

    Attributes:
        trained: the user's model, with the parameters of its loss.
        trains_in_place: whether the model's own parameters have the trained values all the time.
    """

    trained: nn.Module

    @property
    def trains_in_place(self) -> bool:
        """Whether the model's own parameters are trained, and not copies, shards or other memory."""
        ...

    def update_model(self) -> None:
        """Load the trained weights into the model if it is out of date."""
        ...

    def import_weights(self) -> None:
        """Load the model's weights into the ranks."""
        ...


class SharedModel:
    """A model of which other steps may train some parameters, too.

    Args:
        trainer: the ranks that train it.
    """

    def __init__(self, trainer: ModelTrainer) -> None:
        self.trainer = trainer
        self.partners: WeakSet[SharedModel] = WeakSet()  # with a parameter in common
        self.newer: list[SharedModel] = []  # those that have trained since this one's last turn

    def find_partners(self) -> None:
        """Find the steps with a parameter in common, and load their weights into it: this step begins with them."""
        own = set(self.trainer.trained.parameters())
        for other in list(open_models()):
            if not own.isdisjoint(other.trainer.trained.parameters()):
                self.partners.add(other)
                other.trainer.update_model()

    def open(self) -> None:
        """Let the steps found before, and later ones, know this one."""
        for other in self.partners:
            other.partners.add(self)
        open_models()[self] = None

    def close(self) -> None:
        """Train no more; the model has the weights."""
        open_models().pop(self, None)

    def record_step(self) -> None:
        """Take note that this model was trained."""
        for other in self.partners if len(self.partners) else ():
            if self not in other.newer and not (self.trainer.trains_in_place and other.trainer.trains_in_place):
                other.newer.append(self)

    def update_model(self) -> None:
        """Load what other steps have trained since into the model; all processes call it at the same place."""
        newer, self.newer = self.newer, []
        for other in newer:
            if other in open_models():
                other.trainer.update_model()

    def catch_up(self) -> None:
        """Load what other steps have trained since into the ranks."""
        if self.newer:
            self.trainer.import_weights()


@cache
def open_models() -> WeakKeyDictionary[SharedModel, None]:
    """Return the models that steps of this process train, in the order in which their ranks were built."""
    return WeakKeyDictionary()
