"""The batches of a dataset whose samples have indices: each rank reads its own, in worker processes if asked to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

import numpy as np
from torch.utils.data import default_collate

from counterpoint.data.batch_form import ANY_ARGUMENTS, SplitFn, split_targets
from counterpoint.data.fetch import CollateFn, MapDataset, describe_dataset, describe_samples, fingerprint
from counterpoint.data.loader import MicrobatchLoader, iter_microbatch_indices
from counterpoint.data.loader_order import LoaderOrder
from counterpoint.data.microbatch_reader import MicrobatchIndex, MicrobatchReader, SampleReader
from counterpoint.data.sampler import Cursor, Indices, Sampler, split_batch
from counterpoint.errors import DataError
from counterpoint.fabric.fingerprint import digest
from counterpoint.optim.validation import require_counts
from counterpoint.partitioning.pytree import register_dataclasses
from counterpoint.runtime.microbatches import MicrobatchSource, copy_tensors, slice_samples
from counterpoint.training.batches.global_batch import MicrobatchSelection, count_samples, make_global_batch

INDEX_LOOKAHEAD = 16
"""The number of batches whose sample indices are computed at once."""


@dataclass(frozen=True, slots=True)
class DataLoadingConfig:
    """How samples are read.

    Args:
        num_workers: processes of each rank that read; 0 for none but this one.
        prefetch_factor: microbatches that each reads ahead.
        init_worker: called in each worker with its number.
        timeout_s: maximum time to read a microbatch; None for that of the run.

    Raises:
        PlanError: a number is not positive.
    """

    num_workers: int = 0
    prefetch_factor: int = 2
    init_worker: Callable[[int], None] | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        require_counts(prefetch_factor=self.prefetch_factor)
        require_counts(optional=True, num_workers=self.num_workers or None)


class DatasetBatches:
    """The batches of a dataset; close it.

    Samples are stacked microbatch by microbatch, so that a rank reads only its own microbatches. A ``collate_fn`` may
    pad to the longest sample or mix samples, so it gets the samples of the whole batch, on every rank that needs some.

    Args:
        dataset: map-style, samples of any form.
        order: which samples each batch has.
        split: returns the inputs and targets of a batch.
        collate_fn: makes a batch of a list of samples; by default each field is stacked.
        loading: how samples are read.
        fixed_size: samples of each batch but the last; None if they differ.
        first_epoch: the first epoch that is read.
    """

    def __init__(  # noqa: PLR0913 - what determines the batches
        self,
        dataset: MapDataset,
        order: Sampler | LoaderOrder,
        split: SplitFn,
        collate_fn: CollateFn | None,
        loading: DataLoadingConfig,
        *,
        fixed_size: int | None,
        first_epoch: int = 0,
    ) -> None:
        self.dataset = dataset
        self.order: Sampler | LoaderOrder = order
        self.split = split
        self.collate_fn = collate_fn
        self.loading = loading
        self.fixed_size = fixed_size
        self.first_epoch = first_epoch
        self.reads_whole_batches = collate_fn is not None and collate_fn is not default_collate
        self.reader = SampleReader(dataset, order.seed, collate_fn)
        self.index_cache: dict[tuple[int, int], Indices] = {}
        self.loader: MicrobatchLoader | None = None
        self.copies = False  # what collate_fn returns, since it is needed while the next batch is collated

    @property
    def num_batches(self) -> int:
        """Number of batches of an epoch."""
        return self.order.num_batches

    @property
    def batch_size(self) -> int:
        """Samples of a batch, or of the first one if they differ."""
        return self.fixed_size if self.fixed_size is not None else len(self.first_batch.indices)

    @property
    def is_fixed_size(self) -> bool:
        """Whether all batches but the last of an epoch are of that size."""
        return self.fixed_size is not None

    def last_batch_len(self, epoch: int) -> int:
        """Return the number of samples of the last batch of an epoch."""
        return self.order.batch_len(self.num_batches - 1, epoch)

    @cached_property
    def fingerprint(self) -> dict[str, int | str]:
        """What identifies the dataset."""
        return fingerprint(self.dataset, read=partial(self.sample_reader.read, 0)).to_dict()

    @property
    def sample_reader(self) -> SampleReader:
        """What reads single samples, which are not collated, with their own random numbers."""
        return SampleReader(self.dataset, self.order.seed, list if self.collate_fn else None)

    def describe(self) -> list[list[str]]:
        """Return the dataset, the order of the samples of the first batches, and the content of some of them."""
        first = self.order.batches(self.first_epoch, 0, INDEX_LOOKAHEAD)
        read = partial(self.sample_reader.read, self.first_epoch)
        return [
            ["the dataset", describe_dataset(self.dataset)],
            ["the order of samples", f"{first[0][:4].tolist()}..., digest {digest([*map(list, first)]).hex()[:12]}"],
            ["the content of samples", describe_samples(read, np.concatenate(first))],
        ]

    def metadata(self) -> dict[str, Any]:
        """Return what must be the same when a run is resumed, as JSON."""
        return {"dataset": self.fingerprint, "batch_size": self.batch_size, "seed": self.order.seed}

    def sample_batch(self, count: int, num_microbatches: int = 1) -> MicrobatchSource:
        """Return up to ``count`` samples, at least one, as one batch, by which plans are chosen and models traced."""
        sample = self.first_batch
        count = min(max(count, 1), len(sample.indices))
        if not self.reads_whole_batches:
            return self.make_batch(sample.indices[:count], num_microbatches, epoch=0)
        return make_global_batch(sample.read_part(0), count, num_microbatches)

    @cached_property
    def first_batch(self) -> DatasetBatch:
        """The first batch of a loader's order, or of the dataset as it is."""
        if isinstance(self.order, LoaderOrder):
            return self.make_batch(self.order.batch(self.first_epoch, 0), 1, epoch=0)
        sampler = Sampler(len(self.dataset), self.order.batch_size, shuffle="sequential")
        return self.make_batch(sampler.batch(0, 0), 1, epoch=0)

    def start(self, cursor: Cursor, num_batches: int | None, selection: MicrobatchSelection) -> None:
        """Start reading from the cursor on, with workers if there are any.

        Args:
            cursor: the next batch.
            num_batches: how many batches are left.
            selection: what this process reads.
        """
        self.copies = selection.are_kept
        if not selection.micros or not num_batches:
            return
        micros = [0] if self.reads_whole_batches else selection.micros
        num_micros = 1 if self.reads_whole_batches else selection.num_microbatches
        reading = MicrobatchReader(self.dataset, self.order, num_micros, self.collate_fn)
        reading.warn_of_shared_rng(MicrobatchIndex(cursor.epoch, cursor.batch, micros[0]))
        if self.loading.num_workers:
            spots = iter_microbatch_indices(reading, (cursor.epoch, cursor.batch), num_batches, micros)
            self.loader = MicrobatchLoader(
                reading,
                spots,
                num_workers=self.loading.num_workers,
                prefetch_factor=self.loading.prefetch_factor,
                timeout_s=self.loading.timeout_s or selection.timeout_s,
                init_worker=self.loading.init_worker,
            )

    def count_left(self, cursor: Cursor, limit: int) -> int:
        """Return how many batches the epoch has from the cursor on, at most ``limit``."""
        return min(self.num_batches - cursor.batch, limit)

    def batch_at(self, cursor: Cursor, num_microbatches: int) -> MicrobatchSource:
        """Return the batch at a cursor."""
        loader, (epoch, batch) = self.loader, (cursor.epoch, cursor.batch)
        read = None if loader is None else lambda micro: loader.get_samples(MicrobatchIndex(epoch, batch, micro))
        return self.make_batch(self.sample_indices(cursor), num_microbatches, epoch=epoch, read=read)

    def make_batch(
        self,
        indices: Indices,
        num_microbatches: int,
        *,
        epoch: int,
        read: Callable[[int], Any] | None = None,
    ) -> DatasetBatch:
        """Return some samples as one batch, which is read when it is needed.

        Args:
            indices: of the samples.
            num_microbatches: how many microbatches it is split into.
            epoch: for the random numbers that samples draw.
            read: returns the samples of a microbatch, if not this process reads them.
        """
        return DatasetBatch(
            self.reader,
            indices,
            num_microbatches,
            self.split,
            epoch=epoch,
            read=read,
            is_whole=self.reads_whole_batches,
            copies=self.copies,
        )

    def sample_indices(self, cursor: Cursor) -> Indices:
        """Return the sample indices of a batch; those of a few batches are computed at once."""
        if (cursor.epoch, cursor.batch) not in self.index_cache:
            if isinstance(self.order, LoaderOrder):
                self.order.drop_before(cursor.epoch)
            batches = self.order.batches(cursor.epoch, cursor.batch, INDEX_LOOKAHEAD)
            self.index_cache = {(cursor.epoch, index): batch for index, batch in enumerate(batches, cursor.batch)}
        return self.index_cache[cursor.epoch, cursor.batch]

    def state_at(self, cursor: Cursor) -> dict[str, Any]:
        """Return the state of the samplers; empty for an order that depends on seed and epoch only."""
        return self.order.state_at(cursor) if isinstance(self.order, LoaderOrder) else {}

    def load_state(self, cursor: Cursor, state: Mapping[str, Any]) -> None:
        """Continue at a cursor, with the state of the samplers."""
        self.index_cache = {}
        if isinstance(self.order, LoaderOrder) and state:
            self.order.load_state(cursor.epoch, state)

    def load_resized(self, cursor: Cursor, batch_size: int, state: Mapping[str, Any]) -> tuple[Cursor, int]:
        """Continue where batches of another size have got to, with the batch of the first sample that was not read.

        Args:
            cursor: in batches of that size.
            batch_size: their size.
            state: that :meth:`state_at` returned for the cursor.

        Returns:
            The cursor, and how many samples of its batch were read already.
        """
        self.index_cache = {}
        if isinstance(self.order, LoaderOrder):
            return self.order.load_resized(cursor, state)
        num_read = cursor.batch * batch_size
        batch = num_read // self.order.batch_size
        return Cursor(cursor.epoch, batch), num_read - batch * self.order.batch_size

    def close(self) -> None:
        """Stop the workers."""
        if self.loader is not None:
            self.loader.close()
            self.loader = None


class DatasetBatch:
    """One global batch of a dataset, read microbatch by microbatch, each at most once per process.

    Args:
        reader: reads samples.
        indices: the samples of the batch, in order.
        num_microbatches: how many microbatches it is split into.
        split: returns the inputs and targets of a batch.
        epoch: for the random numbers that samples draw.
        read: returns the samples of a microbatch, if not this process reads them.
        is_whole: whether the batch is read at once, as microbatch 0, and then cut into microbatches.
        copies: whether it is still needed when the next batch is read.
    """

    def __init__(  # noqa: PLR0913 - what determines a batch
        self,
        reader: SampleReader,
        indices: Indices,
        num_microbatches: int,
        split: SplitFn = partial(split_targets, arguments=ANY_ARGUMENTS),  # noqa: B008 - immutable
        *,
        epoch: int = 0,
        read: Callable[[int], Any] | None = None,
        is_whole: bool = False,
        copies: bool = False,
    ) -> None:
        self.reader = reader
        self.indices = indices
        self.sample_ranges = split_batch(len(indices), num_microbatches)
        self.sizes: Mapping[int, int] = {micro: stop - start for micro, (start, stop) in enumerate(self.sample_ranges)}
        self.split = split
        self.epoch = epoch
        self.read = read
        self.is_whole = is_whole
        # the user's code may fill the same tensors again: collate_fn for the next batch, fetch for the next microbatch
        own_tensors = is_whole or hasattr(reader.dataset, "fetch")
        self.copies = read is None and own_tensors and (copies or (num_microbatches > 1 and not is_whole))
        self.parts: dict[int, tuple[Any, Any]] = {}  # inputs and targets by microbatch
        self.errors: dict[int, Exception] = {}  # of reading them

    def read_part(self, micro: int) -> tuple[Any, Any]:
        """Return inputs and targets of a microbatch, or of the whole batch, which is read once.

        An error is raised again by each later call: workers send what they have read once, or its error.
        """
        if micro in self.errors:
            raise self.errors[micro]
        try:
            return self.read_once(micro)
        except Exception as error:
            self.errors[micro] = error
            raise

    def read_once(self, micro: int) -> tuple[Any, Any]:
        """Return inputs and targets of a microbatch, or of the whole batch."""
        if micro not in self.parts:
            start, stop = (0, len(self.indices)) if self.is_whole else self.sample_ranges[micro]
            samples = self.reader.read(self.epoch, self.indices[start:stop]) if self.read is None else self.read(micro)
            if self.reader.collate_fn is not None:
                register_dataclasses(samples)
            values = self.split(samples)
            self.parts[micro] = copy_tensors(values) if self.copies else values
            if self.is_whole:
                self.require_all_samples(*self.parts[micro])
        return self.parts[micro]

    def require_all_samples(self, inputs: Any, targets: Any) -> None:  # noqa: ANN401 - any nests of tensors
        """Check that a collated batch has as many samples as were collated.

        Raises:
            DataError: it has not.
        """
        count = count_samples(inputs, targets)
        if count != len(self.indices):
            raise DataError(
                f"collate_fn made a batch of {count} samples from {len(self.indices)}; samples lie along dim 0 of its "
                "tensors, and the trainer counts them: give as many, or pass a function that returns an iterable of "
                "batches (lambda: loader), whose sizes are then those of its tensors"
            )

    def microbatch(self, micro: int) -> tuple[Any, Any]:
        """Return inputs and targets of a microbatch."""
        if not self.is_whole:
            return self.read_part(micro)
        return cast("tuple[Any, Any]", slice_samples(self.read_part(0), *self.sample_ranges[micro]))

    def inputs(self, micro: int) -> Any:  # noqa: ANN401 - whatever the model takes
        """Return the model's inputs for a microbatch."""
        return self.microbatch(micro)[0]

    def targets(self, micro: int) -> Any:  # noqa: ANN401 - whatever the loss takes
        """Return what the loss gets for a microbatch."""
        return self.microbatch(micro)[1]

    def undivided(self, micro: int) -> tuple[Any, Any, int]:
        """Return inputs, targets and number of samples of the batch, which this process reads if it has not yet."""
        count = len(self.indices)
        values = self.read_part(0) if self.is_whole else self.split(self.reader.read(self.epoch, self.indices))
        return *(slice_samples(value, 0, count) for value in values), count


def take_first_samples(dataset: MapDataset, count: int, num_microbatches: int = 1) -> DatasetBatch:
    """Return the first samples of a dataset, at least one, as one batch."""
    indices = Sampler(len(dataset), max(count, 1), shuffle="sequential").batch(0, 0)
    return DatasetBatch(SampleReader(dataset, 0), indices, num_microbatches)
