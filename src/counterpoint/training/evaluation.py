"""Held-out data, measured by the plan's own ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from counterpoint.data.fetch import MapDataset
from counterpoint.data.sampler import Sampler
from counterpoint.training.feeds import DatasetFeed
from counterpoint.training.tally import Tallies, Tally, add_tallies
from counterpoint.training.team import Team

Measure: TypeAlias = Callable[[Any, Any], Tallies]


def evaluate(team: Team, dataset: MapDataset, measure: Measure, batch_size: int) -> dict[str, float]:
    """Return the mean of every metric over a dataset, the same on all ranks; the model is in evaluation mode.

    Replicas that have weights of their own all measure with their mean.
    """
    team.settle()
    found: list[Tallies] = []
    sampler = Sampler(len(dataset), batch_size, shuffle="sequential")
    with team.averaged():
        for index in range(sampler.num_batches):
            feed = DatasetFeed(dataset, sampler.batch(0, index), team.num_micros)
            team.evaluate(feed, lambda outputs, targets: found.append(measure(outputs, targets)), index)
    return shared_means(team, found)


def shared_means(team: Team, found: list[Tallies]) -> dict[str, float]:
    """Return the means over what the ranks of all processes found."""
    mine = {name: [tally.total, float(tally.count)] for name, tally in add_tallies(found).items()}
    fabric = team.world.fabrics[0]
    everyone: list[Any] = [mine]
    if len(team.world.fabrics) < fabric.num_ranks:
        everyone = list(fabric.gather_values("metrics", dict(mine), tuple(range(fabric.num_ranks))))
    parts = [{name: Tally(total, int(count)) for name, (total, count) in part.items()} for part in everyone if part]
    return {name: tally.mean for name, tally in add_tallies(parts).items()}


def measuring(loss: Callable[[Any, Any], Any]) -> Measure:
    """Return a measure of the loss alone, weighted by the number of samples."""

    def measure(outputs: Any, targets: Any) -> Tallies:  # noqa: ANN401 - whatever the model gives
        count = len(targets) if hasattr(targets, "__len__") else 1
        return {"loss": Tally(float(loss(outputs, targets)) * count, count)}

    return measure
