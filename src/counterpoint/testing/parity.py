"""Parity: train a small model under a plan and compare the result with single-process training.

Every run trains the same model on the same global batches, in float64, split into the same microbatches. The
single-process run is itself compared with a plain torch loop, to detect errors shared by all plans.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

from counterpoint.compiler.compile import CompiledPlan
from counterpoint.data.sampler import split_batch
from counterpoint.fabric.local import LocalWorld
from counterpoint.launchers.environment import detect
from counterpoint.launchers.function import launch
from counterpoint.plan.plan import Plan
from counterpoint.runtime.microbatches import SlicedBatch
from counterpoint.runtime.optimizer_spec import OptimizerSpec
from counterpoint.runtime.rank_state import PushRecord
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
from counterpoint.training.options import TrainingOptions
from counterpoint.training.parity import relative_difference as relative_difference
from counterpoint.training.ranks.local_ranks import LocalRanks

TOLERANCE = 1e-12


@dataclass(frozen=True, slots=True)
class ParityRun:
    """Result of a run.

    Args:
        losses: of every step.
        params: the trained parameters.
        buffers: the model's buffers.
        compiled: the plan's program.
        server_updates: by server, its updates in order.
    """

    losses: tuple[float, ...]
    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    compiled: CompiledPlan
    server_updates: tuple[tuple[PushRecord, ...], ...]


@dataclass(frozen=True, slots=True)
class ParityResult:
    """Result of one comparison.

    Args:
        model: name of the trained model.
        strategy: of the plan.
        params: largest relative difference of a parameter tensor.
        losses: largest relative difference of a step's loss.
        buffers: largest relative difference of a buffer to its expectation; nan for a model without buffers.
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
        """The largest of the differences."""
        return max(self.params, self.losses, 0.0 if math.isnan(self.buffers) else self.buffers)

    @property
    def expectation(self) -> str:
        """The expectation that the run was compared with, as text."""
        reference = "a plain torch loop" if self.strategy == "solo" else "solo"
        if math.isnan(self.buffers):
            return f"equals {reference}"
        return f"equals {reference}; running statistics: mean over the replicas, weighted by microbatches"


def train(parity_model: ParityModel, plan: Plan, config: TrainConfig, world: FabricWorld | None = None) -> ParityRun:
    """Train a model on all batches under a plan.

    Args:
        parity_model: the model and its batches.
        plan: of the run.
        config: optimizer and microbatches.
        world: of the ranks, not closed; by default all ranks are in this process.
    """
    model = parity_model.build()
    optimizer_spec = OptimizerSpec(config.optimizer, dict(model.named_parameters()))
    options = TrainingOptions(
        clip_norm=config.clip_norm, share_params_on_host=config.one_copy, batch_norm=config.batch_norm
    )
    local_world = LocalWorld(plan.num_ranks) if world is None else None
    ranks = LocalRanks(local_world or world, plan, model, parity_model.loss, optimizer_spec, options)  # type: ignore[arg-type]
    losses = []
    for step, batch in enumerate(parity_model.batches):
        slices = tuple(split_batch(len(batch[1]), config.num_microbatches))
        sliced_batch = SlicedBatch(batch, slices)
        compiled = ranks.build(sliced_batch.inputs(0), slices[0][1])
        losses.append(ranks.step(step, sliced_batch).loss)
    ranks.export_weights()
    push_logs = [tuple(rank.interpreter.state.push_log) for rank in ranks.ranks.values()]
    if local_world is not None:
        local_world.close()
    return ParityRun(
        tuple(map(float, losses)),
        {name: param.detach().clone() for name, param in model.named_parameters()},
        {name: buffer.clone() for name, buffer in model.named_buffers()},
        compiled,
        tuple(push_log for push_log in push_logs if push_log),
    )


@cache
def reference_runs(
    name: str, num_microbatches: int = 4, clip_norm: float | None = None
) -> tuple[ParityRun, ReferenceRun]:
    """Return the single-process run and the plain torch loop of a model, both cached."""
    config = TrainConfig(num_microbatches=num_microbatches, clip_norm=clip_norm)
    parity_model = make_parity_model(name)
    return train(parity_model, plan_for("solo", num_microbatches), config), train_reference(parity_model, config)


def check_parity(
    name: str, strategy: str, *, num_microbatches: int = 4, clip_norm: float | None = None, one_copy: bool = True
) -> ParityResult:
    """Return the comparison of a plan with the single-process run, or of the single-process run with the plain loop."""
    reference, loop = reference_runs(name, num_microbatches, clip_norm)
    if strategy == "solo":
        return compare(name, strategy, reference, loop.params, loop)
    config = TrainConfig(num_microbatches=num_microbatches, clip_norm=clip_norm, one_copy=one_copy)
    run = train(make_parity_model(name), plan_for(strategy, num_microbatches), config)
    return compare(name, strategy, run, reference.params, loop)


def compare(
    name: str, strategy: str, run: ParityRun, params: Mapping[str, Tensor], reference: ReferenceRun
) -> ParityResult:
    """Return the differences of a run from its expectation."""
    expected = expected_buffers(reference, run.compiled)
    return ParityResult(
        name,
        strategy,
        max_difference(relative_difference(run.params[key], value) for key, value in params.items()),
        max_difference(
            abs(actual - expected_loss) / abs(expected_loss)
            for actual, expected_loss in zip(run.losses, reference.losses, strict=True)
        ),
        max_difference(relative_difference(run.buffers[key], value) for key, value in expected.items())
        if expected
        else math.nan,
    )


def max_difference(differences: Iterable[float]) -> float:
    """Return the largest difference; infinite if one is nan."""
    return max((math.inf if math.isnan(difference) else difference for difference in differences), default=0.0)


def strategies_for_processes(num_ranks: int) -> tuple[str, ...]:
    """Return the strategies that are compared on this number of processes."""
    if num_ranks == 3:
        return THREE_RANKS
    return tuple(strategy for strategy in STRATEGIES if plan_for(strategy, 12).num_ranks == num_ranks)


def results_of_processes(
    num_ranks: int, name: str = "mlp", start: Callable[..., list[Any]] = launch
) -> list[ParityResult]:
    """Return the comparisons on separate processes connected by gloo: the largest difference of any rank.

    All strategies run in one start of the processes, each of which compares with its own single-process run.

    Args:
        num_ranks: number of processes.
        name: of the model.
        start: runs a function on ranks and returns their results, as ``launch`` does.
    """
    strategies = strategies_for_processes(num_ranks)
    differences = start(compare_as_rank, ranks=num_ranks, args=[name, list(strategies)], threads_per_rank=1)
    results = []
    for index, strategy in enumerate(strategies):
        params, losses = (max_difference(float(rank[index][key]) for rank in differences) for key in (0, 1))
        results.append(ParityResult(name, strategy, params, losses, math.nan, f"{num_ranks} processes"))
    return results


def compare_as_rank(name: str, strategies: Sequence[str]) -> list[tuple[str, str]]:
    """Return, as one rank of a launcher, the parameter and loss differences of each strategy."""
    environment = detect()
    world = open_world(environment, 1, 60.0)
    reference, loop = reference_runs(name, 12)
    results = []
    for strategy in strategies:
        run = train(make_parity_model(name), plan_for(strategy, 12), TrainConfig(num_microbatches=12), world)
        results.append(compare(name, strategy, run, reference.params, loop))
    world.close()
    return [(repr(result.params), repr(result.losses)) for result in results]
