"""Layouts do not change results: train a small model under a plan and compare with the solo run.

Every run trains the same model on the same global batches, in float64, cut into the same number of microbatches.
The solo run is itself compared with a plain torch loop, so that a fault that all plans share is seen as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from counterpoint.compiler.compile import Compiled
from counterpoint.data.sampler import split
from counterpoint.fabric.local import LocalWorld
from counterpoint.launchers.environment import detect
from counterpoint.launchers.function import launch
from counterpoint.plan import Plan
from counterpoint.runtime.feed import BatchFeed
from counterpoint.runtime.optimizers import Face
from counterpoint.runtime.records import Served
from counterpoint.testing.plain import Plain, expected_buffers, train_plainly
from counterpoint.testing.subjects import STRATEGIES, THREE_RANKS, Recipe, Subject, plan_for, subject
from counterpoint.training.options import Options
from counterpoint.training.team import Team
from counterpoint.training.world import World, open_world

BAR = 1e-12


@dataclass(frozen=True, slots=True)
class Trained:
    """What came of a run.

    Args:
        losses: of every step.
        params: the trained parameters.
        buffers: the model's buffers.
        compiled: the plan's program.
        journals: for every server the updates it made, in order.
    """

    losses: tuple[float, ...]
    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    compiled: Compiled
    journals: tuple[tuple[Served, ...], ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of the table.

    Args:
        subject: what was trained.
        strategy: the plan's row.
        params: largest relative difference of any parameter tensor.
        losses: largest relative difference of any step's loss.
        buffers: largest relative difference of any buffer to its law; nan for a model without buffers.
        world: ``local`` or ``N processes``.
    """

    subject: str
    strategy: str
    params: float
    losses: float
    buffers: float
    world: str = "local"

    @property
    def worst(self) -> float:
        """The largest of its differences."""
        return max(self.params, self.losses, 0.0 if math.isnan(self.buffers) else self.buffers)

    @property
    def law(self) -> str:
        """What is compared with what."""
        reference = "a plain torch loop" if self.strategy == "solo" else "solo"
        if math.isnan(self.buffers):
            return f"equals {reference}"
        return f"equals {reference}; running statistics: mean over replicas of their own, weighted by microbatches"


def train(trained: Subject, plan: Plan, recipe: Recipe, world: World | None = None) -> Trained:
    """Return the model trained on all batches under a plan.

    Args:
        trained: the model and its batches.
        plan: who does what.
        recipe: optimizer and microbatches.
        world: where the ranks are; by default all in this process. It is left open.
    """
    model = trained.build()
    face = Face(recipe.optimizer, dict(model.named_parameters()))
    options = Options(clip_norm=recipe.clip_norm, one_copy=recipe.one_copy, batch_norm=recipe.batch_norm)
    own = LocalWorld(plan.num_ranks) if world is None else None
    team = Team(own or world, plan, model, trained.loss, face, options)  # type: ignore[arg-type]
    losses = []
    for number, batch in enumerate(trained.batches):
        places = tuple(split(len(batch[1]), recipe.num_micros))
        feed = BatchFeed(batch, places)
        compiled = team.build(feed.inputs(0), places[0][1])
        losses.append(team.step(number, feed).loss)
    team.give_back()
    journals = [tuple(rank.interpreter.state.journal) for rank in team.ranks.values()]
    if own is not None:
        own.close()
    return Trained(
        tuple(losses),
        {name: param.detach().clone() for name, param in model.named_parameters()},
        {name: buffer.clone() for name, buffer in model.named_buffers()},
        compiled,
        tuple(journal for journal in journals if journal),
    )


@cache
def solo(name: str, num_micros: int = 4, clip_norm: float | None = None) -> tuple[Trained, Plain]:
    """Return the solo run of a subject and the plain loop of the same training; each trained once."""
    recipe = Recipe(num_micros=num_micros, clip_norm=clip_norm)
    found = subject(name)
    return train(found, plan_for("solo", num_micros), recipe), train_plainly(found, recipe)


def cell(
    name: str, strategy: str, *, num_micros: int = 4, clip_norm: float | None = None, one_copy: bool = True
) -> Cell:
    """Return one cell of the table: solo against the plain loop, any other plan against solo."""
    reference, plain = solo(name, num_micros, clip_norm)
    if strategy == "solo":
        return compare(name, strategy, reference, plain.params, plain)
    recipe = Recipe(num_micros=num_micros, clip_norm=clip_norm, one_copy=one_copy)
    run = train(subject(name), plan_for(strategy, num_micros), recipe)
    return compare(name, strategy, run, reference.params, plain)


def compare(name: str, strategy: str, run: Trained, params: Mapping[str, Tensor], plain: Plain) -> Cell:
    """Return how far a run is from what its law says."""
    expected = expected_buffers(plain, run.compiled)
    return Cell(
        name,
        strategy,
        largest(difference(run.params[key], value) for key, value in params.items()),
        largest(abs(mine - theirs) / abs(theirs) for mine, theirs in zip(run.losses, plain.losses, strict=True)),
        largest(difference(run.buffers[key], value) for key, value in expected.items()) if expected else math.nan,
    )


def difference(mine: Tensor, theirs: Tensor) -> float:
    """Return ``|mine - theirs| / |theirs|`` in the Euclidean norm."""
    norm = float(torch.linalg.vector_norm(theirs.double()))
    return float(torch.linalg.vector_norm(mine.double() - theirs.double())) / (norm or 1.0)


def largest(differences: Iterable[float]) -> float:
    """Return the largest difference; infinite where one is no number."""
    return max((math.inf if math.isnan(found) else found for found in differences), default=0.0)


def local_cells(names: Sequence[str], strategies: Sequence[str] = STRATEGIES) -> list[Cell]:
    """Return the table on local ranks, column by column, solo first."""
    return [cell(name, strategy) for name in names for strategy in ("solo", *strategies)]


def rows_for_processes(num_ranks: int) -> tuple[str, ...]:
    """Return the rows that are tried on so many processes."""
    if num_ranks == 3:
        return THREE_RANKS
    return tuple(row for row in STRATEGIES if plan_for(row, 12).num_ranks == num_ranks)


def cells_on_processes(num_ranks: int, name: str = "mlp", start: Callable[..., list[Any]] = launch) -> list[Cell]:
    """Return the rows for so many real processes joined by gloo: what the worst of them came to.

    All rows are run by one start of the processes, each of which compares its own model with its own solo run.

    Args:
        num_ranks: how many processes.
        name: of what is trained.
        start: runs a function on ranks and returns what each returned, as ``launch`` does.
    """
    rows = rows_for_processes(num_ranks)
    found = start(compare_as_rank, ranks=num_ranks, args=[name, list(rows)], threads_per_rank=1)
    cells = []
    for index, row in enumerate(rows):
        params, losses = (largest(float(rank[index][key]) for rank in found) for key in (0, 1))
        cells.append(Cell(name, row, params, losses, math.nan, f"{num_ranks} processes"))
    return cells


def compare_as_rank(name: str, rows: Sequence[str]) -> list[tuple[str, str]]:
    """Return, as one of the processes that a launcher started, how far each row's parameters and losses are off."""
    environment = detect()
    world = open_world(environment, 1, 60.0)
    reference, plain = solo(name, 12)
    cells = []
    for row in rows:
        run = train(subject(name), plan_for(row, 12), Recipe(num_micros=12), world)
        cells.append(compare(name, row, run, reference.params, plain))
    world.close()
    return [(repr(one.params), repr(one.losses)) for one in cells]
