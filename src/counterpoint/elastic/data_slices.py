"""Data by portions: portion p of an epoch is the same samples, with the same random numbers, whoever reads it.

Which minibatches a task has, some of them known before it is their turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from counterpoint.data.fetch import Fields, MapDataset
from counterpoint.data.microbatch_reader import MicrobatchIndex, MicrobatchReader
from counterpoint.data.sampler import Sampler
from counterpoint.errors import PlanError
from counterpoint.ps.job_config import Bsp, Consistency, DataConfig


@dataclass(frozen=True, slots=True)
class Minibatch:
    """Samples that are computed at once.

    Args:
        fields: of the samples, ``(inputs..., target)``.
        count: how many.
        weight: what the mean loss over them is multiplied with.
    """

    fields: Fields
    num_samples: int
    loss_weight: float

    @property
    def inputs(self) -> Fields:
        """What the model is called with."""
        return self.fields[:-1]


@dataclass(frozen=True)
class DataSlices:
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
    minibatches_per_slice: int = 1

    @property
    def slices_per_step(self) -> int:
        """Portions of a batch."""
        return self.consistency.slices_per_step if isinstance(self.consistency, Bsp) else 1

    @property
    def num_slices(self) -> int:
        """Portions of an epoch."""
        return self.sampler.num_batches * self.slices_per_step

    def data_config(self, num_epochs: int, *, slices_per_task: int = 1) -> DataConfig:
        """Return what there is to do.

        Args:
            num_epochs: passes over the data.
            task_portions: that a worker is given at once.
        """
        steps = self.slices_per_step if isinstance(self.consistency, Bsp) else 0
        return DataConfig(self.num_slices, num_epochs, slices_per_task, steps)

    def check_data_config(self, data_config: DataConfig) -> None:
        """Check that a job's data are these portions.

        Raises:
            PlanError: they are not.
        """
        if data_config.num_slices != self.num_slices:
            raise PlanError(
                f"the job has {data_config.num_slices} portions in an epoch, but this dataset makes {self.num_slices}; "
                "give every worker the dataset, the batch size and the consistency that the job was made for"
            )

    @cached_property
    def _reader(self) -> MicrobatchReader:
        return MicrobatchReader(self.dataset, self.sampler, self.slices_per_step * self.minibatches_per_slice)

    def read(self, epoch: int, number: int) -> Iterator[Minibatch]:
        """Yield the minibatches of a portion that have samples.

        Args:
            epoch: which.
            number: of the portion in the epoch.
        """
        batch, place = divmod(number, self.slices_per_step)
        num_samples = self.sampler.batch_len(batch)
        for micro in range(place * self.minibatches_per_slice, (place + 1) * self.minibatches_per_slice):
            spot = MicrobatchIndex(epoch, batch, micro)
            low, high = self._reader.bounds(spot)
            if low < high:
                weight = (high - low) / num_samples if isinstance(self.consistency, Bsp) else 1.0
                yield Minibatch(self._reader.read(spot), high - low, weight)


def slice_sampler(
    num_samples: int,
    batch_size: int,
    consistency: Consistency,
    *,
    minibatches_per_slice: int = 1,
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
    size = batch_size if isinstance(consistency, Bsp) else batch_size * minibatches_per_slice
    return Sampler(num_samples, size, seed, shuffle="feistel" if is_shuffled else "sequential")


@dataclass(frozen=True, slots=True)
class MinibatchPosition:
    """A minibatch, and where in the run it stands.

    Args:
        portion: of the whole run.
        at: which minibatch of the portion.
        minibatch: its samples.
        is_last: whether its portion is complete with it.
    """

    slice_index: int
    index: int
    minibatch: Minibatch
    is_last: bool


class TaskReader:
    """The portions of a task, read while those before them are computed.

    Args:
        data: that is read.
        epoch: of the task.
        numbers: of its portions in the epoch.
        ahead: how many minibatches are known before the one that is computed is over.
    """

    def __init__(self, data: DataSlices, epoch: int, numbers: range, lookahead: int) -> None:
        self._data, self._epoch, self._lookahead = data, epoch, lookahead
        self._unread = iter(numbers)
        self._read: deque[tuple[int, list[MinibatchPosition]]] = deque()
        self._known: deque[MinibatchPosition] = deque()

    def slices(self) -> Iterator[tuple[int, Sequence[MinibatchPosition]]]:
        """Yield each portion of the whole run, and its minibatches that have samples."""
        while self._read or self._read_one():
            portion, places = self._read.popleft()
            yield portion, places

    def upcoming(self, place: MinibatchPosition) -> list[MinibatchPosition]:
        """Return the minibatches that come after one, which is the next that is computed; none of other tasks."""
        while self._known and self._known[0] is not place:
            self._known.popleft()
        while len(self._known) <= self._lookahead and self._read_one():
            pass
        return list(self._known)[1 : 1 + self._lookahead]

    def _read_one(self) -> bool:
        """Tell whether there was another portion to be read."""
        number = next(self._unread, None)
        if number is None:
            return False
        found = list(self._data.read(self._epoch, number))
        portion = self._epoch * self._data.num_slices + number
        places = [MinibatchPosition(portion, at, one, at + 1 == len(found)) for at, one in enumerate(found)]
        self._read.append((portion, places))
        self._known += places
        return True
