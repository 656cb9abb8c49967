"""``counterpoint plan --graph``: the plans for layers that PipeDream's profiler has timed."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from counterpoint.cli.verdict import counted, listed, remarks, show_plans
from counterpoint.errors import PlanError
from counterpoint.planner.profile import read_profile
from counterpoint.planner.staged import rank_graph
from counterpoint.world.cluster import Cluster

MINIBATCHES_PER_RANK = 4
"""Of a profile, in a step for which nobody says how many."""


def show_graph(path: Path, place: Cluster, ranks: int, batch_size: int | None, shown: tuple[int | None, bool]) -> None:
    """The plans for a profile are on standard output, and the layers of each stage of the best pipeline.

    Args:
        path: of the profile.
        place: where it would run.
        ranks: how many there are.
        batch_size: minibatches in a step.
        shown: how many plans, and whether as JSON.

    Raises:
        PlanError: there is no such file, or it is no profile.
    """
    try:
        profile = read_profile(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror}; give a graph.txt") from None
    (top, as_json), size = shown, batch_size or MINIBATCHES_PER_RANK * ranks
    found = rank_graph(profile, place, ranks, size)
    if as_json:
        typer.echo(json.dumps(listed(found.ranking, top), indent=2))
        return
    plans = counted(len(found.ranking.predictions))
    typer.echo(f"{plans} for -n {ranks}, {size} minibatches of {path} in a step\n")
    show_plans(found.ranking, top)
    typer.echo("\n".join(["", *remarks(found.ranking, top), *found.describe()]))
