"""What ``Trainer.fit`` and ``evaluate`` accept as data, as one protocol: global batches by epoch and position.

Samples by index (a dataset, or a ``DataLoader`` of one) become :class:`DatasetBatches`, of which each rank reads what
it needs. Everything else is a stream of batches, :class:`StreamedBatches`, of which each rank reads everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias

from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from counterpoint.data.batch_form import SplitFn, split_targets
from counterpoint.data.fetch import CollateFn, stack_samples
from counterpoint.data.loader_order import LoaderOrder
from counterpoint.data.sampler import Cursor, Sampler, Shuffle
from counterpoint.errors import DataError, PlanError
from counterpoint.runtime.microbatches import MicrobatchSource
from counterpoint.runtime.sample_layout import SampleLayout
from counterpoint.training.batches.dataset_batches import DataLoadingConfig, DatasetBatches
from counterpoint.training.batches.global_batch import MicrobatchSelection
from counterpoint.training.batches.stream import StreamedBatches

TrainingData: TypeAlias = Any
"""A dataset of samples, a ``DataLoader``, or an iterable of batches or a function that returns one."""


class BatchSource(Protocol):
    """The global batches of a fit or an evaluation, in their order."""

    @property
    def num_batches(self) -> int | None:
        """Number of batches of an epoch; None if only its end will tell."""
        ...

    @property
    def batch_size(self) -> int:
        """Samples of a batch, or of the first one if they differ."""
        ...

    @property
    def is_fixed_size(self) -> bool:
        """Whether all batches but the last of an epoch are of that size."""
        ...

    def last_batch_len(self, epoch: int) -> int | None:
        """Return the number of samples of the last batch of an epoch; None if it is not known."""
        ...

    def describe(self) -> list[list[str]]:
        """Return what must be the same on all ranks, by name."""
        ...

    def metadata(self) -> dict[str, Any]:
        """Return what must be the same when a run is resumed, as JSON."""
        ...

    def sample_batch(self, count: int, num_microbatches: int = 1) -> MicrobatchSource:
        """Return up to ``count`` samples, at least one, as one batch, by which plans are chosen and models traced."""
        ...

    def start(self, cursor: Cursor, num_batches: int | None, selection: MicrobatchSelection) -> None:
        """Start reading ahead this process's part of up to so many batches, from a cursor on."""
        ...

    def count_left(self, cursor: Cursor, limit: int) -> int:
        """Return how many batches the cursor's epoch has from it on, at most ``limit``."""
        ...

    def batch_at(self, cursor: Cursor, num_microbatches: int) -> MicrobatchSource:
        """Return the batch at a cursor; cursors only move forward."""
        ...

    def state_at(self, cursor: Cursor) -> dict[str, Any]:
        """Return the position at a cursor, in addition to the cursor itself."""
        ...

    def load_state(self, cursor: Cursor, state: Mapping[str, Any]) -> None:
        """Continue at a cursor, with the position that :meth:`state_at` returned for it."""
        ...

    def load_resized(self, cursor: Cursor, batch_size: int, state: Mapping[str, Any]) -> tuple[Cursor, int]:
        """Continue where batches of another size have got to; return the cursor and how many samples are read again."""
        ...

    def close(self) -> None:
        """Stop reading."""
        ...


def open_batches(  # noqa: PLR0913 - what determines the batches, all by keyword
    data: TrainingData,
    *,
    layout: SampleLayout,
    batch_size: int | None,
    collate_fn: CollateFn | None,
    loading: DataLoadingConfig,
    seed: int = 0,
    first_epoch: int = 0,
    shuffle: Shuffle = "feistel",
) -> BatchSource:
    """Return the batches of whatever was given as data.

    Args:
        data: a dataset of samples if ``batch_size`` is given; otherwise a ``DataLoader``, an iterable of global
            batches, or a function that returns one.
        layout: where samples are in a batch.
        batch_size: samples of a global batch.
        collate_fn: makes a batch of a list of samples.
        loading: how samples are read.
        seed: of the order of samples, and of what they draw.
        first_epoch: the first epoch that is read.
        shuffle: the order of a dataset's samples.

    Raises:
        PlanError: a loader and an option that it has itself were given, or samples that are stacked along dim 0, and
            options that say otherwise.
        DataError: the data are neither.
    """
    if isinstance(data, DataLoader):
        require_unsharded(data)
        require_own_options(data, batch_size, collate_fn, loading)
        if not isinstance(data.dataset, IterableDataset) and hasattr(data.batch_sampler, "__len__"):
            return open_loader(data, layout, seed, first_epoch)
        split = choose_split(layout, data.collate_fn)
        return StreamedBatches(data, data.__iter__, split, seed=seed, first_epoch=first_epoch)
    if is_map_style(data) and not isinstance(data, IterableDataset):
        if batch_size is not None:
            sampler = Sampler(len(data), batch_size, seed, shuffle=shuffle)
            split = choose_split(layout, collate_fn)
            return DatasetBatches(
                data, sampler, split, collate_fn, loading, fixed_size=batch_size, first_epoch=first_epoch
            )
        if not isinstance(data, list | tuple):
            raise PlanError(
                f"a {type(data).__name__} has samples, so fit needs batch_size, the samples of a global batch over all "
                "ranks; give batch_size=..., or pass a DataLoader, whose batch size is that of the global batch"
            )
    opens = data if callable(data) and not hasattr(data, "__iter__") else getattr(data, "__iter__", None)
    if opens is None:
        raise DataError(
            f"a {type(data).__name__} is not a map-style dataset: it has no length, or no sample for an index; nor can "
            "it be iterated; pass a dataset of samples with batch_size, a DataLoader, an iterable of batches, or a "
            "function that returns one"
        )
    if batch_size is not None:
        opens = partial(group_samples, opens, batch_size, collate_fn)
    elif collate_fn is not None:
        raise PlanError("collate_fn makes batches of samples, so it needs batch_size; give both, or a DataLoader")
    split = layout.split if batch_size is None else choose_split(layout, collate_fn)
    return StreamedBatches(data, opens, split, seed=seed, first_epoch=first_epoch, group_size=batch_size)


def choose_split(layout: SampleLayout, collate_fn: CollateFn | None) -> SplitFn:
    """Return what splits the batches of some samples: where samples are is open only if a ``collate_fn`` makes them.

    Raises:
        PlanError: options say where samples are in batches that are stacked along dim 0.
    """
    if collate_fn is not None and collate_fn is not default_collate:
        return layout.split
    if layout.dims:
        raise PlanError(
            f"batch_dims and shared name {', '.join(layout.dims)}, but samples are stacked along dim 0 of every tensor "
            "of a batch; give a collate_fn that makes a batch of samples, pass batches, or omit these options"
        )
    return partial(split_targets, arguments=layout.arguments)


def open_loader(loader: DataLoader[Any], layout: SampleLayout, seed: int, first_epoch: int) -> DatasetBatches:
    """Return the batches of a ``DataLoader`` whose samples have indices."""
    dataset: Any = loader.dataset
    collate_fn: CollateFn | None = loader.collate_fn
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) > 1 and collate_fn is default_collate:
        collate_fn = None  # whose batches are the same
    loading = DataLoadingConfig(
        loader.num_workers, loader.prefetch_factor or 2, loader.worker_init_fn, loader.timeout or None
    )
    return DatasetBatches(
        dataset,
        LoaderOrder(loader, seed),
        choose_split(layout, loader.collate_fn),
        collate_fn,
        loading,
        fixed_size=loader.batch_size,
        first_epoch=first_epoch,
    )


def group_samples(
    opens: Any,  # noqa: ANN401 - a function that returns an iterable
    batch_size: int,
    collate_fn: CollateFn | None,
) -> Iterator[Any]:
    """Yield batches of a stream of samples; the last one may be smaller."""
    samples: list[Any] = []
    number = 0
    for number, sample in enumerate(opens(), 1):
        samples.append(sample)
        if len(samples) == batch_size:
            yield collate(samples, number, collate_fn)
            samples = []
    if samples:
        yield collate(samples, number, collate_fn)


def collate(samples: Sequence[Any], stop: int, collate_fn: CollateFn | None) -> Any:  # noqa: ANN401 - any nest
    """Return the last samples of those before ``stop`` as one batch."""
    return (
        collate_fn(list(samples))
        if collate_fn is not None
        else stack_samples(samples, range(stop - len(samples), stop))
    )


def is_map_style(data: TrainingData) -> bool:
    """Tell whether data have a length and samples by index."""
    return hasattr(data, "__len__") and (hasattr(data, "__getitem__") or hasattr(data, "fetch"))


def require_own_options(
    loader: DataLoader[Any], batch_size: int | None, collate_fn: CollateFn | None, loading: DataLoadingConfig
) -> None:
    """Check that a loader and its own options were not both given.

    Raises:
        PlanError: they were.
    """
    given: Iterable[tuple[str, object, object]] = (
        ("batch_size", batch_size, loader.batch_size),
        ("collate_fn", collate_fn, loader.collate_fn),
        ("num_workers", loading.num_workers or None, loader.num_workers),
    )
    for name, value, own in given:
        if value is not None and value is not own and value != own:
            raise PlanError(
                f"{name}={value} and a DataLoader with {name}={own} were given; a loader's batches are the global "
                f"batches, over all ranks, and are read as the loader says: omit {name}, or pass loader.dataset"
            )


def require_unsharded(loader: DataLoader[Any]) -> None:
    """Check that a loader gives the whole batches, not those of one rank.

    Raises:
        DataError: its sampler divides the samples among ranks.
    """
    sampler: Any = next(
        (
            sampler
            for sampler in (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
            if getattr(sampler, "num_replicas", 1) > 1
        ),
        None,
    )
    if sampler is not None:
        raise DataError(
            f"the DataLoader has a {type(sampler).__name__}, which gives each of {sampler.num_replicas} ranks other "
            "samples, but every rank passes all of them, and the trainer does batching, order and sharding: "
            f"fit(loader.dataset, batch_size={loader.batch_size} x ranks, num_workers={loader.num_workers}), "
            f"without the {type(sampler).__name__} and its set_epoch"
        )
