"""Random numbers of a dataset, keyed by the sample: whoever reads it, and after whatever, it is drawn the same.

Python, numpy and torch keep one global generator each. Before a sample is read all three are set to a key of
(seed, epoch, sample), and afterwards they go on as if nothing had been read.

What a microbatch holds, as a function of its place in the run alone: the same in any process, after any other.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.random import mtrand
from torch.utils.data import TensorDataset

from counterpoint.data.fetch import Fields, MapDataset, fetch, supports_batch_fetch
from counterpoint.data.sampler import Indices, Sampler, sample_key, split_batch


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Whatever is drawn inside, the global generators are afterwards as they were."""
    ours, theirs = random.getstate(), torch.default_generator.get_state()
    numbers = mtrand.get_bit_generator()
    mtrand.set_bit_generator(np.random.MT19937(0))  # taking it away and giving it back is faster than its state
    try:
        yield
    finally:
        mtrand.set_bit_generator(numbers)
        torch.default_generator.set_state(theirs)
        random.setstate(ours)


def seed_rng(seed: int, epoch: int, sample: int) -> None:
    """What is drawn next from the global generators depends on nothing else."""
    key = sample_key(seed, epoch, sample)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key)


def rng_was_used(seed: int, epoch: int, sample: int) -> bool:
    """Tell whether anything was drawn since ``seed_rng`` with the same arguments."""
    found = random.getstate(), torch.default_generator.get_state(), np.random.random()
    seed_rng(seed, epoch, sample)
    python, torchs, numpys = random.getstate(), torch.default_generator.get_state(), np.random.random()
    return found[0] != python or not torch.equal(found[1], torchs) or found[2] != numpys


class MicrobatchIndex(NamedTuple):
    """The place of a microbatch in a run."""

    epoch: int
    batch: int
    micro: int

    def __str__(self) -> str:
        return f"microbatch {self.micro} of batch {self.batch} in epoch {self.epoch}"


@dataclass(frozen=True, slots=True)
class MicrobatchReader:
    """How the microbatches of a run are read.

    Args:
        dataset: see :class:`counterpoint.data.fetch.MapDataset`.
        sampler: which samples a batch has.
        num_micros: into how many microbatches a batch is cut.
    """

    dataset: MapDataset
    sampler: Sampler
    num_micros: int

    def indices(self, index: MicrobatchIndex) -> Indices:
        """Return the samples of a microbatch."""
        start, stop = self.bounds(index)
        return self.sampler.batch(index.epoch, index.batch)[start:stop]

    def bounds(self, index: MicrobatchIndex) -> tuple[int, int]:
        """Return where in its batch a microbatch begins and ends."""
        return split_batch(self.sampler.batch_len(index.batch), self.num_micros)[index.micro]

    def read(self, index: MicrobatchIndex) -> Fields:
        """Return the fields of a microbatch's samples, stacked."""
        return read_with_seeded_rng(self.dataset, self.indices(index), seed=self.sampler.seed, epoch=index.epoch)

    def warn_of_shared_rng(self, index: MicrobatchIndex) -> None:
        """Warn of a dataset that draws for many samples at once: what one gets depends on who else is read.

        Args:
            spot: a microbatch to try it on.
        """
        indices = self.indices(index)
        if isinstance(self.dataset, TensorDataset) or not supports_batch_fetch(self.dataset) or not len(indices):
            return
        key = {"seed": self.sampler.seed, "epoch": index.epoch, "sample": int(indices[0])}
        with preserve_rng():
            seed_rng(**key)
            fetch(self.dataset, indices)
            drawn = rng_was_used(**key)
        if drawn:
            warnings.warn(
                f"{type(self.dataset).__name__} draws global random numbers for many samples at once, so that what a "
                "sample gets depends on the number of microbatches, and with it on the number of ranks; draw in "
                "__getitem__, which reads one sample with random numbers of its own, or key a generator by the index",
                RuntimeWarning,
                stacklevel=2,
            )


def read_with_seeded_rng(dataset: MapDataset, indices: Indices, *, seed: int, epoch: int) -> Fields:
    """Return samples as ``fetch`` does, with global random numbers that depend on (seed, epoch, sample) alone.

    A dataset that reads many samples at once has those of the first.
    """
    if isinstance(dataset, TensorDataset):
        return fetch(dataset, indices)  # nothing of the user's runs, so nothing is drawn
    with preserve_rng():
        return fetch(dataset, indices, before_read=partial(seed_rng, seed, epoch))
