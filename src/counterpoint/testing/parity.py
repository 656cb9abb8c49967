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

from counterpoint.compiler.compile import CompiledPlan
from counterpoint.data.sampler import split_batch
from counterpoint.fabric.local import LocalWorld
from counterpoint.launchers.environment import detect
from counterpoint.launchers.function import launch
from counterpoint.plan.plan import Plan
from counterpoint.runtime.microbatches import SlicedBatch
from counterpoint.runtime.optimizer_spec import OptimizerSpec
from counterpoint.runtime.step_commit import PushRecord
from counterpoint.testing.parity_models import (
    STRATEGIES,
    THREE_RANKS,
    ParityModel,
    TrainConfig,
    make_parity_model,
    plan_for,
)
from counterpoint.testing.reference_loop import ReferenceRun, expected_buffers, train_reference
from counterpoint.training.distributed_world import FabricWorld, open_world
from counterpoint.training.local_ranks import LocalRanks
from counterpoint.training.options import TrainingOptions

TOLERANCE = 1e-12


@dataclass(frozen=True, slots=True)
class ParityRun:
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
    compiled: CompiledPlan
    server_updates: tuple[tuple[PushRecord, ...], ...]


@dataclass(frozen=True, slots=True)
class ParityResult:
    """One cell of the table.

    Args:
        subject: what was trained.
        strategy: the plan's row.
        params: largest relative difference of any parameter tensor.
        losses: largest relative difference of any step's loss.
        buffers: largest relative difference of any buffer to its law; nan for a model without buffers.
        world: ``local`` or ``N processes``.
    """

    model: str
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
    def expectation(self) -> str:
        """What is compared with what."""
        reference = "a plain torch loop" if self.strategy == "solo" else "solo"
        if math.isnan(self.buffers):
            return f"equals {reference}"
        return f"equals {reference}; running statistics: mean over replicas of their own, weighted by microbatches"


def train(parity_model: ParityModel, plan: Plan, config: TrainConfig, world: FabricWorld | None = None) -> ParityRun:
    """Return the model trained on all batches under a plan.

    Args:
        trained: the model and its batches.
        plan: who does what.
        recipe: optimizer and microbatches.
        world: where the ranks are; by default all in this process. It is left open.
    """
    model = parity_model.build()
    face = OptimizerSpec(config.optimizer, dict(model.named_parameters()))
    options = TrainingOptions(
        clip_norm=config.clip_norm, share_params_on_host=config.one_copy, batch_norm=config.batch_norm
    )
    own = LocalWorld(plan.num_ranks) if world is None else None
    team = LocalRanks(own or world, plan, model, parity_model.loss, face, options)  # type: ignore[arg-type]
    losses = []
    for number, batch in enumerate(parity_model.batches):
        places = tuple(split_batch(len(batch[1]), config.num_microbatches))
        feed = SlicedBatch(batch, places)
        compiled = team.build(feed.inputs(0), places[0][1])
        losses.append(team.step(number, feed).loss)
    team.export_weights()
    journals = [tuple(rank.interpreter.state.push_log) for rank in team.ranks.values()]
    if own is not None:
        own.close()
    return ParityRun(
        tuple(losses),
        {name: param.detach().clone() for name, param in model.named_parameters()},
        {name: buffer.clone() for name, buffer in model.named_buffers()},
        compiled,
        tuple(journal for journal in journals if journal),
    )


@cache
def reference_runs(name: str, num_micros: int = 4, clip_norm: float | None = None) -> tuple[ParityRun, ReferenceRun]:
    """Return the solo run of a subject and the plain loop of the same training; each trained once."""
    recipe = TrainConfig(num_microbatches=num_micros, clip_norm=clip_norm)
    found = make_parity_model(name)
    return train(found, plan_for("solo", num_micros), recipe), train_reference(found, recipe)


def check_parity(
    name: str, strategy: str, *, num_micros: int = 4, clip_norm: float | None = None, one_copy: bool = True
) -> ParityResult:
    """Return one cell of the table: solo against the plain loop, any other plan against solo."""
    reference, plain = reference_runs(name, num_micros, clip_norm)
    if strategy == "solo":
        return compare(name, strategy, reference, plain.params, plain)
    recipe = TrainConfig(num_microbatches=num_micros, clip_norm=clip_norm, one_copy=one_copy)
    run = train(make_parity_model(name), plan_for(strategy, num_micros), recipe)
    return compare(name, strategy, run, reference.params, plain)


def compare(
    name: str, strategy: str, run: ParityRun, params: Mapping[str, Tensor], reference: ReferenceRun
) -> ParityResult:
    """Return how far a run is from what its law says."""
    expected = expected_buffers(reference, run.compiled)
    return ParityResult(
        name,
        strategy,
        max_difference(relative_difference(run.params[key], value) for key, value in params.items()),
        max_difference(
            abs(mine - theirs) / abs(theirs) for mine, theirs in zip(run.losses, reference.losses, strict=True)
        ),
        max_difference(relative_difference(run.buffers[key], value) for key, value in expected.items())
        if expected
        else math.nan,
    )


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """Return ``|mine - theirs| / |theirs|`` in the Euclidean norm."""
    norm = float(torch.linalg.vector_norm(expected.double()))
    return float(torch.linalg.vector_norm(actual.double() - expected.double())) / (norm or 1.0)


def max_difference(differences: Iterable[float]) -> float:
    """Return the largest difference; infinite where one is no number."""
    return max((math.inf if math.isnan(found) else found for found in differences), default=0.0)


def local_results(names: Sequence[str], strategies: Sequence[str] = STRATEGIES) -> list[ParityResult]:
    """Return the table on local ranks, column by column, solo first."""
    return [check_parity(name, strategy) for name in names for strategy in ("solo", *strategies)]


def strategies_for_processes(num_ranks: int) -> tuple[str, ...]:
    """Return the rows that are tried on so many processes."""
    if num_ranks == 3:
        return THREE_RANKS
    return tuple(row for row in STRATEGIES if plan_for(row, 12).num_ranks == num_ranks)


def process_results(num_ranks: int, name: str = "mlp", start: Callable[..., list[Any]] = launch) -> list[ParityResult]:
    """Return the rows for so many real processes joined by gloo: what the worst of them came to.

    All rows are run by one start of the processes, each of which compares its own model with its own solo run.

    Args:
        num_ranks: how many processes.
        name: of what is trained.
        start: runs a function on ranks and returns what each returned, as ``launch`` does.
    """
    rows = strategies_for_processes(num_ranks)
    found = start(compare_as_rank, ranks=num_ranks, args=[name, list(rows)], threads_per_rank=1)
    cells = []
    for index, row in enumerate(rows):
        params, losses = (max_difference(float(rank[index][key]) for rank in found) for key in (0, 1))
        cells.append(ParityResult(name, row, params, losses, math.nan, f"{num_ranks} processes"))
    return cells


def compare_as_rank(name: str, rows: Sequence[str]) -> list[tuple[str, str]]:
    """Return, as one of the processes that a launcher started, how far each row's parameters and losses are off."""
    environment = detect()
    world = open_world(environment, 1, 60.0)
    reference, plain = reference_runs(name, 12)
    cells = []
    for row in rows:
        run = train(make_parity_model(name), plan_for(row, 12), TrainConfig(num_microbatches=12), world)
        cells.append(compare(name, row, run, reference.params, plain))
    world.close()
    return [(repr(one.params), repr(one.losses)) for one in cells]
