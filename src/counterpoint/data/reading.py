"""What a microbatch holds, as a function of its place in the run alone: the same in any process, after any other."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from torch.utils.data import TensorDataset

from counterpoint.data.draws import has_drawn, kept_generators, set_generators
from counterpoint.data.fetch import Fields, MapDataset, fetch, reads_many
from counterpoint.data.sampler import Indices, Sampler, split


class Spot(NamedTuple):
    """The place of a microbatch in a run."""

    epoch: int
    batch: int
    micro: int

    def __str__(self) -> str:
        return f"microbatch {self.micro} of batch {self.batch} in epoch {self.epoch}"


@dataclass(frozen=True, slots=True)
class Reading:
    """How the microbatches of a run are read.

    Args:
        dataset: see :class:`counterpoint.data.fetch.MapDataset`.
        sampler: which samples a batch has.
        num_micros: into how many microbatches a batch is cut.
    """

    dataset: MapDataset
    sampler: Sampler
    num_micros: int

    def indices(self, spot: Spot) -> Indices:
        """Return the samples of a microbatch."""
        start, stop = self.bounds(spot)
        return self.sampler.batch(spot.epoch, spot.batch)[start:stop]

    def bounds(self, spot: Spot) -> tuple[int, int]:
        """Return where in its batch a microbatch begins and ends."""
        return split(self.sampler.batch_len(spot.batch), self.num_micros)[spot.micro]

    def read(self, spot: Spot) -> Fields:
        """Return the fields of a microbatch's samples, stacked."""
        return read_keyed(self.dataset, self.indices(spot), seed=self.sampler.seed, epoch=spot.epoch)

    def warn_of_shared_draws(self, spot: Spot) -> None:
        """Warn of a dataset that draws for many samples at once: what one gets depends on who else is read.

        Args:
            spot: a microbatch to try it on.
        """
        indices = self.indices(spot)
        if isinstance(self.dataset, TensorDataset) or not reads_many(self.dataset) or not len(indices):
            return
        key = {"seed": self.sampler.seed, "epoch": spot.epoch, "sample": int(indices[0])}
        with kept_generators():
            set_generators(**key)
            fetch(self.dataset, indices)
            drawn = has_drawn(**key)
        if drawn:
            warnings.warn(
                f"{type(self.dataset).__name__} draws global random numbers for many samples at once, so that what a "
                "sample gets depends on the number of microbatches, and with it on the number of ranks; draw in "
                "__getitem__, which reads one sample with random numbers of its own, or key a generator by the index",
                RuntimeWarning,
                stacklevel=2,
            )


def read_keyed(dataset: MapDataset, indices: Indices, *, seed: int, epoch: int) -> Fields:
    """Return samples as ``fetch`` does, with global random numbers that depend on (seed, epoch, sample) alone.

    A dataset that reads many samples at once has those of the first.
    """
    if isinstance(dataset, TensorDataset):
        return fetch(dataset, indices)  # nothing of the user's runs, so nothing is drawn
    with kept_generators():
        return fetch(dataset, indices, before=partial(set_generators, seed, epoch))
