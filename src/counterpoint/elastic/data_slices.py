"""Data slices: slice i of an epoch is the same samples with the same random numbers on every worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from counterpoint.data.fetch import Fields, MapDataset, require_fields
from counterpoint.data.microbatch_reader import MicrobatchIndex, MicrobatchReader
from counterpoint.data.sampler import Sampler
from counterpoint.errors import PlanError
from counterpoint.ps.consistency import Bsp, Consistency
from counterpoint.ps.job_config import DataConfig


@dataclass(frozen=True, slots=True)
class Minibatch:
    """Samples that are computed together.

    Args:
        fields: of the samples, ``(inputs..., target)``.
        num_samples: how many.
        loss_factor: factor of their mean loss.
    """

    fields: Fields
    num_samples: int
    loss_factor: float

    @property
    def inputs(self) -> Fields:
        """Model inputs."""
        return self.fields[:-1]


@dataclass(frozen=True)
class DataSlices:
    """The slices of a dataset.

    Under bsp a batch is split into ``slices_per_step`` slices, whose gradients add up to that of the mean loss over the
    batch. Otherwise a batch is one slice, and its gradient is the sum over its minibatches, each of its own mean loss.

    Args:
        dataset: see :class:`counterpoint.data.fetch.MapDataset`.
        sampler: which samples a batch has.
        consistency: of the job.
        minibatches_per_slice: minibatches into which a slice is split.

    Example:
        >>> import torch
        >>> data = torch.utils.data.TensorDataset(torch.arange(8.0)[:, None], torch.zeros(8))
        >>> slices = DataSlices(data, Sampler(8, 4, shuffle="sequential"), Bsp(2))
        >>> [(minibatch.fields[0].view(-1).tolist(), minibatch.loss_factor) for minibatch in slices.read(0, 3)]
        [([6.0, 7.0], 0.5)]
    """

    dataset: MapDataset
    sampler: Sampler
    consistency: Consistency
    minibatches_per_slice: int = 1

    @property
    def slices_per_step(self) -> int:
        """Slices of a batch."""
        return self.consistency.slices_per_step if isinstance(self.consistency, Bsp) else 1

    @property
    def num_slices(self) -> int:
        """Slices of an epoch."""
        return self.sampler.num_batches * self.slices_per_step

    def data_config(self, num_epochs: int, *, slices_per_task: int = 1) -> DataConfig:
        """Return the data configuration of a job.

        Args:
            num_epochs: passes over the data.
            slices_per_task: slices assigned to a worker at once.
        """
        steps = self.slices_per_step if isinstance(self.consistency, Bsp) else 0
        return DataConfig(self.num_slices, num_epochs, slices_per_task, steps)

    def check_data_config(self, data_config: DataConfig) -> None:
        """Raise PlanError unless the job was made for these slices."""
        if data_config.num_slices != self.num_slices:
            raise PlanError(
                f"the job has {data_config.num_slices} slices per epoch, but this dataset has {self.num_slices}; "
                "give every worker the dataset, the batch size and the consistency that the job was made for"
            )

    @cached_property
    def _reader(self) -> MicrobatchReader:
        return MicrobatchReader(self.dataset, self.sampler, self.slices_per_step * self.minibatches_per_slice)

    def read(self, epoch: int, number: int) -> Iterator[Minibatch]:
        """Yield the non-empty minibatches of a slice.

        Args:
            epoch: which.
            number: of the slice in the epoch.
        """
        batch, slice_in_batch = divmod(number, self.slices_per_step)
        num_samples = self.sampler.batch_len(batch)
        for micro in range(
            slice_in_batch * self.minibatches_per_slice, (slice_in_batch + 1) * self.minibatches_per_slice
        ):
            microbatch = MicrobatchIndex(epoch, batch, micro)
            low, high = self._reader.bounds(microbatch)
            if low < high:
                loss_factor = (high - low) / num_samples if isinstance(self.consistency, Bsp) else 1.0
                yield Minibatch(require_fields(self._reader.read(microbatch), self.dataset), high - low, loss_factor)


def slice_sampler(
    num_samples: int,
    batch_size: int,
    consistency: Consistency,
    *,
    minibatches_per_slice: int = 1,
    seed: int = 0,
    is_shuffled: bool = True,
) -> Sampler:
    """Return the sampler that assigns samples to slices.

    Args:
        num_samples: of the dataset.
        batch_size: samples of a global batch under bsp, else of a minibatch.
        consistency: of the job.
        minibatches_per_slice: minibatches of a slice.
        seed: of the shuffling.
        is_shuffled: whether to shuffle each epoch.
    """
    size = batch_size if isinstance(consistency, Bsp) else batch_size * minibatches_per_slice
    return Sampler(num_samples, size, seed, shuffle="feistel" if is_shuffled else "sequential")


@dataclass(frozen=True, slots=True)
class MinibatchPosition:
    """A minibatch and its position in the run.

    Args:
        slice_index: data slice, counted over the whole run.
        index: of the minibatch in the slice.
        minibatch: its samples.
        is_last: whether it is the last one of the slice.
    """

    slice_index: int
    index: int
    minibatch: Minibatch
    is_last: bool


class TaskReader:
    """Reads the slices of a task, some minibatches ahead of the computation.

    Args:
        data: to be read.
        epoch: of the task.
        numbers: of its slices in the epoch.
        lookahead: minibatches to read ahead.
    """

    def __init__(self, data: DataSlices, epoch: int, numbers: range, lookahead: int) -> None:
        self._data, self._epoch, self._lookahead = data, epoch, lookahead
        self._unread = iter(numbers)
        self._read: deque[tuple[int, list[MinibatchPosition]]] = deque()
        self._known: deque[MinibatchPosition] = deque()

    def slices(self) -> Iterator[tuple[int, Sequence[MinibatchPosition]]]:
        """Yield each slice index of the run, with the slice's non-empty minibatches."""
        while self._read or self._read_one():
            slice_index, positions = self._read.popleft()
            yield slice_index, positions

    def upcoming(self, position: MinibatchPosition) -> list[MinibatchPosition]:
        """Return the minibatches after the given one, which is the next to be computed; none of other tasks."""
        while self._known and self._known[0] is not position:
            self._known.popleft()
        while len(self._known) <= self._lookahead and self._read_one():
            pass
        return list(self._known)[1 : 1 + self._lookahead]

    def _read_one(self) -> bool:
        """Read one more slice; tell whether there was one."""
        number = next(self._unread, None)
        if number is None:
            return False
        minibatches = list(self._data.read(self._epoch, number))
        slice_index = self._epoch * self._data.num_slices + number
        positions = [
            MinibatchPosition(slice_index, index, minibatch, index + 1 == len(minibatches))
            for index, minibatch in enumerate(minibatches)
        ]
        self._read.append((slice_index, positions))
        self._known += positions
        return True
