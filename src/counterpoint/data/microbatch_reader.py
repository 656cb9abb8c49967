"""Reads microbatches: the contents depend only on the index in the run, in any process and in any order.

Python, numpy and torch have one global random generator each. Before a sample is read all three are seeded with a hash
of (seed, epoch, sample), and afterwards their states are restored.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.random import mtrand
from torch.utils.data import TensorDataset

from counterpoint.data.fetch import CollateFn, MapDataset, fetch_batch, supports_batch_fetch
from counterpoint.data.sampler import BatchOrder, Indices, sample_key, split_batch
from counterpoint.terminal_text import warn


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Restore the global random generators afterwards."""
    python_state, torch_state = random.getstate(), torch.default_generator.get_state()
    numpy_generator = mtrand.get_bit_generator()
    mtrand.set_bit_generator(np.random.MT19937(0))  # replacing and restoring the generator is faster than its state
    try:
        yield
    finally:
        mtrand.set_bit_generator(numpy_generator)
        torch.default_generator.set_state(torch_state)
        random.setstate(python_state)


def seed_rng(seed: int, epoch: int, sample: int) -> None:
    """Seed the global random generators with a hash of the arguments."""
    key = sample_key(seed, epoch, sample)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key)


def rng_was_used(seed: int, epoch: int, sample: int) -> bool:
    """Tell whether random numbers were drawn since ``seed_rng`` with the same arguments."""
    states = random.getstate(), torch.default_generator.get_state(), np.random.random()
    seed_rng(seed, epoch, sample)
    fresh = random.getstate(), torch.default_generator.get_state(), np.random.random()
    return states[0] != fresh[0] or not torch.equal(states[1], fresh[1]) or states[2] != fresh[2]


class MicrobatchIndex(NamedTuple):
    """The index of a microbatch in a run."""

    epoch: int
    batch: int
    micro: int

    def __str__(self) -> str:
        return f"microbatch {self.micro} of batch {self.batch} in epoch {self.epoch}"


@dataclass(frozen=True, slots=True)
class SampleReader:
    """Reads samples with random numbers that depend only on (seed, epoch, sample).

    Args:
        dataset: see :class:`counterpoint.data.fetch.MapDataset`.
        seed: of the random numbers.
        collate_fn: makes a batch of samples; by default each field is stacked.
    """

    dataset: MapDataset
    seed: int
    collate_fn: CollateFn | None = None

    def read(self, epoch: int, indices: Indices) -> Any:  # noqa: ANN401 - any nest of tensors
        """Return samples as one batch; a dataset that reads many at once gets the random numbers of the first one."""
        if isinstance(self.dataset, TensorDataset) and self.collate_fn is None:
            return fetch_batch(self.dataset, indices)  # no user code runs, so no random numbers are drawn
        with preserve_rng():
            return fetch_batch(self.dataset, indices, self.collate_fn, before_read=partial(seed_rng, self.seed, epoch))


@dataclass(frozen=True, slots=True)
class MicrobatchReader:
    """Reads the microbatches of a run.

    Args:
        dataset: see :class:`counterpoint.data.fetch.MapDataset`.
        sampler: which samples a batch has.
        num_micros: number of microbatches of a batch.
        collate_fn: makes a microbatch of its samples; by default each field is stacked.
    """

    dataset: MapDataset
    sampler: BatchOrder
    num_micros: int
    collate_fn: CollateFn | None = None

    @property
    def sample_reader(self) -> SampleReader:
        """What reads the samples."""
        return SampleReader(self.dataset, self.sampler.seed, self.collate_fn)

    def indices(self, index: MicrobatchIndex) -> Indices:
        """Return the sample indices of a microbatch."""
        start, stop = self.bounds(index)
        return self.sampler.batch(index.epoch, index.batch)[start:stop]

    def bounds(self, index: MicrobatchIndex) -> tuple[int, int]:
        """Return the bounds of a microbatch in its batch."""
        return split_batch(self.sampler.batch_len(index.batch, index.epoch), self.num_micros)[index.micro]

    def read(self, index: MicrobatchIndex) -> Any:  # noqa: ANN401 - any nest of tensors
        """Return the samples of a microbatch."""
        return self.sample_reader.read(index.epoch, self.indices(index))

    def warn_of_shared_rng(self, index: MicrobatchIndex) -> None:
        """Warn if the dataset draws random numbers for many samples at once, which then depend on each other.

        Args:
            index: a microbatch to test it with.
        """
        indices = self.indices(index)
        if isinstance(self.dataset, TensorDataset) or not supports_batch_fetch(self.dataset) or not len(indices):
            return
        key = {"seed": self.sampler.seed, "epoch": index.epoch, "sample": int(indices[0])}
        with preserve_rng():
            seed_rng(**key)
            fetch_batch(self.dataset, indices, self.collate_fn)
            was_used = rng_was_used(**key)
        if was_used:
            warn(
                f"{type(self.dataset).__name__} draws global random numbers for many samples at once, so a sample "
                "depends on the number of microbatches and of ranks; draw in __getitem__, which reads one sample with "
                "its own random numbers, or seed a generator with the index",
                RuntimeWarning,
                stacklevel=2,
            )
