"""Data by portions: portion p of an epoch is the same samples, with the same random numbers, whoever reads it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from counterpoint.data.fetch import Fields, MapDataset
from counterpoint.data.reading import Reading, Spot
from counterpoint.data.sampler import Sampler
from counterpoint.errors import PlanError
from counterpoint.server.job import Bsp, Consistency, Work


@dataclass(frozen=True, slots=True)
class Minibatch:
    """Samples that are computed at once.

    Args:
        fields: of the samples, ``(inputs..., target)``.
        count: how many.
        weight: what the mean loss over them is multiplied with.
    """

    fields: Fields
    count: int
    weight: float

    @property
    def inputs(self) -> Fields:
        """What the model is called with."""
        return self.fields[:-1]


@dataclass(frozen=True)
class Portions:
    """The portions of a dataset.

    Under bsp a batch is cut into ``per_step`` portions, and the gradients of these add up to that of the mean loss over
    the batch, whoever computes them. Otherwise a batch is one portion, and its gradient is the sum of those of its
    minibatches, each of the mean loss over its own samples.

    Args:
        dataset: see :class:`counterpoint.data.fetch.MapDataset`.
        sampler: which samples a batch has.
        consistency: how portions are counted.
        minibatches: into how many a portion is cut.

    Example:
        >>> import torch
        >>> data = torch.utils.data.TensorDataset(torch.arange(8.0)[:, None], torch.zeros(8))
        >>> portions = Portions(data, Sampler(8, 4, shuffle="sequential"), Bsp(2))
        >>> [(one.fields[0].view(-1).tolist(), one.weight) for one in portions.read(0, 3)]
        [([6.0, 7.0], 0.5)]
    """

    dataset: MapDataset
    sampler: Sampler
    consistency: Consistency
    minibatches: int = 1

    @property
    def per_step(self) -> int:
        """Portions of a batch."""
        return self.consistency.portions if isinstance(self.consistency, Bsp) else 1

    @property
    def num_portions(self) -> int:
        """Portions of an epoch."""
        return self.sampler.num_batches * self.per_step

    def work(self, num_epochs: int, *, task_portions: int = 1) -> Work:
        """Return what there is to do.

        Args:
            num_epochs: passes over the data.
            task_portions: that a worker is given at once.
        """
        steps = self.per_step if isinstance(self.consistency, Bsp) else 0
        return Work(self.num_portions, num_epochs, task_portions, steps)

    def require_work(self, work: Work) -> None:
        """Check that a job's data are these portions.

        Raises:
            PlanError: they are not.
        """
        if work.num_portions != self.num_portions:
            raise PlanError(
                f"the job has {work.num_portions} portions in an epoch, but this dataset makes {self.num_portions}; "
                "give every worker the dataset, the batch size and the consistency that the job was made for"
            )

    @cached_property
    def _reading(self) -> Reading:
        return Reading(self.dataset, self.sampler, self.per_step * self.minibatches)

    def read(self, epoch: int, number: int) -> Iterator[Minibatch]:
        """Yield the minibatches of a portion that have samples.

        Args:
            epoch: which.
            number: of the portion in the epoch.
        """
        batch, place = divmod(number, self.per_step)
        num_samples = self.sampler.batch_len(batch)
        for micro in range(place * self.minibatches, (place + 1) * self.minibatches):
            spot = Spot(epoch, batch, micro)
            low, high = self._reading.bounds(spot)
            if low < high:
                weight = (high - low) / num_samples if isinstance(self.consistency, Bsp) else 1.0
                yield Minibatch(self._reading.read(spot), high - low, weight)


def sampler_of(
    num_samples: int,
    batch_size: int,
    consistency: Consistency,
    *,
    minibatches: int = 1,
    seed: int = 0,
    is_shuffled: bool = True,
) -> Sampler:
    """Return which samples a portion has.

    Args:
        num_samples: of the dataset.
        batch_size: samples of a global batch under bsp, of a minibatch otherwise.
        consistency: how portions are counted.
        minibatches: of a portion.
        seed: of the order.
        is_shuffled: whether each epoch has an order of its own.
    """
    size = batch_size if isinstance(consistency, Bsp) else batch_size * minibatches
    return Sampler(num_samples, size, seed, shuffle="feistel" if is_shuffled else "sequential")
