"""Plans measured for a few steps on the ranks that will train, before training begins; nothing of it stays.

Each plan trains a copy of the model on one batch, again and again. The copies, their optimizers and what they draw are
dropped, so that the run that follows has the numbers that it has without.
"""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from statistics import fmean, geometric_mean, median
from typing import Any, cast

import torch
from torch import Tensor, nn

from counterpoint.errors import PlanError
from counterpoint.fabric.fabric import Json
from counterpoint.plan.plan import Plan
from counterpoint.planner.choose import PlanChoice, PlanTrial, candidates_to_measure, decide_by_trials
from counterpoint.planner.ranking import RejectedPlan
from counterpoint.runtime.microbatches import MicrobatchSource
from counterpoint.runtime.optimizer_spec import OptimizerSpec
from counterpoint.training.distributed_world import FabricWorld
from counterpoint.training.local_ranks import LocalRanks, trace_step
from counterpoint.training.options import TrainingOptions
from counterpoint.training.plan_resolution import AutoStrategy

WARM_STEPS = 2
"""Steps of each plan that nobody counts; the last one says how long the others will take."""
ROUNDS = 5
"""Plans take turns so often, there and back, so that what changes on the machine meanwhile meets all of them."""
NEAR_FASTEST_FACTORS = (1.25, 1.1)
"""Plans that have taken at most so many times as long as the fastest one have as many rounds again, and once more."""
ROUND_S = 0.5
"""Seconds that a turn should take."""
MIN_STEPS, MAX_STEPS = 2, 50
"""Steps of a turn that count; the one before them finds what the plan before has left in the caches."""
ABANDON_FACTOR = 4.0
"""A plan whose last warm step took so many times as long as that of another plan is given up."""


@dataclass(frozen=True, slots=True)
class TrialTarget:
    """What a plan is tried on.

    Args:
        model: the user's; it stays as it is.
        loss: from the model's output and the targets to the mean loss.
        face: the user's optimizer; it stays as it is.
        options: how the run will train.
        open_world: gives the ranks, to each trial anew.
        feed: from a number of microbatches to one global batch that is cut into so many.
    """

    model: nn.Module
    loss: Callable[[Any, Any], Tensor]
    optimizer_spec: OptimizerSpec
    options: TrainingOptions
    open_world: Callable[[], FabricWorld]
    make_batch: Callable[[int], MicrobatchSource]


@dataclass(slots=True)
class TrialRunner:
    """The ranks of this process under one plan, with the times of their steps.

    Args:
        plan: as it was asked for.
        team: built for it.
        feed: the batch of every step.
        number: of the next step.
        warm_s: the last of the steps that warm the ranks up, on the slowest of them.
        turns: the mean step of each turn on the slowest rank, the same on every rank.
    """

    plan: Plan
    local_ranks: LocalRanks
    batch: MicrobatchSource
    number: int = 0
    warm_s: float = 0.0
    round_times_s: list[float] = field(default_factory=list)

    def step(self) -> float:
        """Take a step and return its seconds."""
        began = time.perf_counter()
        self.local_ranks.step(self.number, self.batch)
        self.number += 1
        return time.perf_counter() - began

    def max_over_ranks(self, seconds: float) -> float:
        """Return the longest time of all ranks, the same on every rank."""
        return max(cast("list[float]", all_gather_values(self.local_ranks, seconds)))

    def warm_up(self) -> None:
        """Take steps that do not count; how long the last one took is known."""
        self.warm_s = self.max_over_ranks([self.step() for _ in range(WARM_STEPS)][-1])

    def run_round(self) -> None:
        """Take a step that does not count, and some that do, equally many on every rank."""
        self.step()
        num_steps = min(MAX_STEPS, max(MIN_STEPS, math.ceil(ROUND_S / max(self.warm_s, 1e-6))))
        self.round_times_s.append(self.max_over_ranks(fmean(self.step() for _ in range(num_steps))))

    def to_trial(self) -> PlanTrial:
        """Return the median over turns of the slowest rank's mean step, and that of each turn."""
        return PlanTrial(
            self.plan, median(self.round_times_s or [self.warm_s]), round_times_s=tuple(self.round_times_s)
        )


def select_plan(
    auto_strategy: AutoStrategy, target: TrialTarget, inputs: Any, batch_size: int
) -> tuple[Plan, PlanChoice | None]:  # noqa: ANN401
    """Return the plan that is taken, the same on every rank, and what it was weighed against.

    Args:
        auto: what is left open.
        subject: what will be trained.
        inputs: of a few samples.
        batch_size: samples of a global batch.

    Raises:
        PlanError: the model does not take the inputs, or there is no plan for this batch.
    """
    if auto_strategy.num_ranks == 1:
        return auto_strategy.single_rank_plan, None
    choice = auto_strategy.rank_candidates(target.model, target.optimizer_spec, inputs, target.options, batch_size)
    if target.options.num_measured_plans:
        choice = measure_candidates(choice, target, target.options.num_measured_plans)
    return choice.plan, choice


def measure_candidates(choice: PlanChoice, target: TrialTarget, count: int, *, with_traces: bool = False) -> PlanChoice:
    """Return the choice by what so many of the best plans and plain data parallelism take on these ranks.

    Args:
        choice: by what was predicted.
        subject: what is trained.
        count: plans beside data parallelism.
        traced: whether each plan's trial ends with a step that is measured word by word.
    """
    trials, untried = run_trials(candidates_to_measure(choice, count), target, with_traces=with_traces)
    return decide_by_trials(choice, trials, untried)


def run_trials(
    plans: Sequence[Plan], target: TrialTarget, *, with_traces: bool
) -> tuple[list[PlanTrial], list[RejectedPlan]]:
    """Return what each plan takes, the same on every rank, and those that the model does not go along with.

    Args:
        plans: all for the same ranks; every rank has copies of its parts of the model for all of them meanwhile.
        subject: what is trained.
        traced: whether each plan's trial ends with a step that is measured word by word.
    """
    runners: list[TrialRunner] = []
    untried: list[RejectedPlan] = []
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # a run gives the notices of its own plan
        for plan in plans:
            found = build_runner(plan, target, stack)
            if isinstance(found, RejectedPlan):
                untried.append(found)
            else:
                runners.append(found)
        for runner in runners:
            runner.warm_up()
        run_interleaved(runners)
        trials = normalize_speed([runner.to_trial() for runner in runners])
        return list(map(add_trace, trials, runners)) if with_traces else trials, untried


def build_runner(plan: Plan, target: TrialTarget, stack: ExitStack) -> TrialRunner | RejectedPlan:
    """Return the ranks under a plan, closed when the stack is; or why some rank cannot be built for it."""
    model, feed = copy.deepcopy(target.model), target.make_batch(plan.global_num_microbatches)
    face = target.optimizer_spec.rebind(dict(model.named_parameters()))
    team = LocalRanks(target.open_world(), plan, model, target.loss, face, target.options)
    stack.callback(team.close)
    team.buckets = replace(team.buckets, tune=False)  # a trial is over before all sizes have been tried
    reason = ""
    try:
        team.build(feed.inputs(0), feed.sizes[0])
    except PlanError as error:
        reason = str(error).splitlines()[0]
    reasons = cast("list[str]", all_gather_values(team, reason))
    return RejectedPlan(plan, next(filter(None, reasons))) if any(reasons) else TrialRunner(plan, team, feed)


def run_interleaved(runners: Sequence[TrialRunner]) -> None:
    """Let all take turns that may still be the fastest, and those that are close to it again.

    What is several times as slow keeps nobody waiting.
    """
    limit_s = ABANDON_FACTOR * min((runner.warm_s for runner in runners), default=0.0)
    left = [runner for runner in runners if runner.warm_s <= limit_s]
    run_rounds(left)
    for factor in NEAR_FASTEST_FACTORS:
        left = near_fastest(left, factor)
        if len(left) > 1:
            run_rounds(left)


def run_rounds(runners: Sequence[TrialRunner]) -> None:
    """Let plans take turns, in every other round the last one first."""
    for number in range(ROUNDS):
        for runner in runners[:: -1 if number % 2 else 1]:
            runner.run_round()


def near_fastest(runners: Sequence[TrialRunner], factor: float) -> list[TrialRunner]:
    """Return those that have taken at most so many times as long as the fastest one, the same on every rank."""
    steps = [trial.step_s for trial in normalize_speed([runner.to_trial() for runner in runners])]
    limit_s = factor * min(steps, default=0.0)
    return [runner for runner, step_s in zip(runners, steps, strict=True) if step_s <= limit_s]


def add_trace(trial: PlanTrial, runner: TrialRunner) -> PlanTrial:
    """Return a trial with one more step, measured word by word."""
    return replace(trial, trace=trace_step(runner.local_ranks, runner.number, runner.batch)[1])


def normalize_speed(trials: Sequence[PlanTrial]) -> list[PlanTrial]:
    """Return trials of the same rounds as if the machine had been equally fast in all of these.

    How fast it was in a round the turns of those plans say together that have had the most. A plan's time is the median
    of its turns beside that.

    Example:
        >>> one, other = normalize_speed([Trial(Plan(), 6.0, turns=(2.0, 6.0)), Trial(Plan(), 4.0, turns=(1.0, 3.0))])
        >>> one.step_s / other.step_s
        2.0
    """
    most = max((len(trial.round_times_s) for trial in trials), default=0)
    steady = [trial.round_times_s for trial in trials if len(trial.round_times_s) == most]
    speeds = [geometric_mean(turns) for turns in zip(*steady, strict=True)]
    usual_s = median(speeds) if speeds else 0.0
    return [
        replace(
            trial,
            step_s=usual_s * median(own / of_all for own, of_all in zip(trial.round_times_s, speeds, strict=False)),
        )
        if trial.round_times_s
        else trial
        for trial in trials
    ]


def all_gather_values(local_ranks: LocalRanks, value: Json) -> Sequence[Json]:
    """Return what every process tells the others."""
    fabric = local_ranks.world.fabrics[0]
    if len(local_ranks.world.fabrics) == fabric.num_ranks:
        return [value]
    return fabric.gather_values("trial", value, tuple(range(fabric.num_ranks)))
