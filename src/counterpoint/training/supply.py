"""The batches of a run, from the cursor on: read when they are needed, or ahead by workers."""

from __future__ import annotations

from counterpoint.data.fetch import MapDataset, fingerprint
from counterpoint.data.loader import Loader, spots_of
from counterpoint.data.reading import Reading, Spot
from counterpoint.data.sampler import Cursor, Indices, Sampler
from counterpoint.errors import DataError
from counterpoint.training.feeds import DatasetFeed, read_micros
from counterpoint.training.team import Team

BATCHES_AHEAD = 16
"""How many batches' samples are looked up at once."""


class Supply:
    """Gives a run its batches; close it.

    Args:
        team: the ranks that read.
        dataset: what they read.
        sampler: which samples when.
        workers: processes that read; 0 for none but this.
        prefetch: microbatches that each reads ahead.
    """

    def __init__(self, team: Team, dataset: MapDataset, sampler: Sampler, *, workers: int, prefetch: int) -> None:
        self.team = team
        self.dataset = dataset
        self.sampler = sampler
        self.workers = workers
        self.prefetch = prefetch
        self.ahead: dict[tuple[int, int], Indices] = {}
        self.loader: Loader | None = None

    def require_same_data(self) -> None:
        """Check that all ranks were given the same dataset; all ranks call it together.

        Raises:
            DataError: two were not.
        """
        fabric = self.team.world.fabrics[0]
        if len(self.team.world.fabrics) == fabric.num_ranks:
            return
        mine = fingerprint(self.dataset).to_dict()
        for rank, theirs in enumerate(fabric.gather_values("dataset", dict(mine), tuple(range(fabric.num_ranks)))):
            if theirs != mine:
                raise DataError(
                    f"rank {fabric.rank} and rank {rank} were given different datasets, {mine} and {theirs}; every "
                    "rank gives the whole dataset and reads its own samples of it: leave the sharding away"
                )

    def open(self, cursor: Cursor, num_batches: int) -> None:
        """What is left of the run can be read; workers have begun to.

        Args:
            cursor: the next batch.
            num_batches: how many are left.
        """
        assert self.team.compiled is not None, "built"
        reading = Reading(self.dataset, self.sampler, self.team.num_micros)
        compiled = self.team.compiled
        micros = read_micros(compiled.turns[-1].program, self.team.ranks, compiled.model.fed_blocks)
        if not micros or not num_batches:
            return
        reading.warn_of_shared_draws(Spot(cursor.epoch, cursor.batch, micros[0]))
        if self.workers:
            spots = spots_of(reading, (cursor.epoch, cursor.batch), num_batches, micros)
            deadline_s = self.team.options.deadline_s
            self.loader = Loader(reading, spots, workers=self.workers, prefetch=self.prefetch, deadline_s=deadline_s)

    def feed(self, cursor: Cursor) -> DatasetFeed:
        """Return a batch."""
        loader, (epoch, batch) = self.loader, (cursor.epoch, cursor.batch)
        reader = None if loader is None else lambda micro: loader.fields(Spot(epoch, batch, micro))
        seed, num_micros = self.sampler.seed, self.team.num_micros
        return DatasetFeed(self.dataset, self.indices(cursor), num_micros, seed=seed, epoch=epoch, reader=reader)

    def indices(self, cursor: Cursor) -> Indices:
        """Return the samples of a batch; those of a few batches are looked up at once."""
        if (cursor.epoch, cursor.batch) not in self.ahead:
            found = self.sampler.batches(cursor.epoch, cursor.batch, BATCHES_AHEAD)
            self.ahead = {(cursor.epoch, index): batch for index, batch in enumerate(found, cursor.batch)}
        return self.ahead[cursor.epoch, cursor.batch]

    def close(self) -> None:
        """No worker is left."""
        if self.loader is not None:
            self.loader.close()
            self.loader = None
