"""Measure plans for a few steps on the ranks that will train, before training starts.

Each plan trains a copy of the model on one batch, again and again. The copies, their optimizers and their random
numbers are dropped, so that the run has the same results as without trials.
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

from torch import nn

from counterpoint.device.select import accelerator_for, model_device
from counterpoint.errors import PlanError, first_line
from counterpoint.fabric.fabric import Json
from counterpoint.plan.plan import Plan
from counterpoint.planner.choose import PlanChoice, PlanTrial, candidates_to_measure, decide_by_trials
from counterpoint.planner.ranking import RejectedPlan
from counterpoint.runtime.loss.loss_parameters import find_trained_modules, model_of
from counterpoint.runtime.loss.loss_reduction import LossFunction
from counterpoint.runtime.microbatches import MicrobatchSource
from counterpoint.runtime.optimizer_spec import OptimizerSpec
from counterpoint.training.distributed_world import FabricWorld
from counterpoint.training.options import TrainingOptions
from counterpoint.training.plan_resolution import AutoStrategy
from counterpoint.training.ranks.local_ranks import LocalRanks
from counterpoint.training.ranks.step_trace import trace_step

WARM_STEPS = 2
"""Uncounted steps of each plan; the last one estimates how long the others will take."""
ROUNDS = 5
"""Plans alternate so often, in alternating order, so that changes of the machine's speed affect all of them."""
NEAR_FASTEST_FACTORS = (1.25, 1.1)
"""Plans within these factors of the fastest one are measured for another set of rounds each."""
ROUND_S = 0.5
"""Seconds that a plan's part of a round should take."""
MIN_STEPS, MAX_STEPS = 2, 50
"""Counted steps of a round; the one before them warms the caches after the previous plan."""
ABANDON_FACTOR = 4.0
"""A plan is abandoned if its last warm-up step took this many times as long as the fastest plan's."""


@dataclass(frozen=True, slots=True)
class TrialTarget:
    """What a plan is tried on.

    Args:
        model: the user's model; it is not changed.
        loss: from the model's output and the targets to the mean loss.
        optimizer_spec: the user's optimizer; it is not changed.
        options: the training options.
        open_world: opens a world for each trial.
        make_batch: from a number of microbatches to one global batch.
    """

    model: nn.Module
    loss: LossFunction
    optimizer_spec: OptimizerSpec
    options: TrainingOptions
    open_world: Callable[[], FabricWorld]
    make_batch: Callable[[int], MicrobatchSource]


@dataclass(slots=True)
class TrialRunner:
    """The ranks of this process under one plan, with the times of their steps.

    Args:
        plan: the plan that was asked for.
        local_ranks: built for it.
        batch: the batch of every step.
        number: of the next step.
        warm_s: the duration of the last warm-up step on the slowest rank.
        round_times_s: the mean step of each round on the slowest rank, the same on every rank.
    """

    plan: Plan
    local_ranks: LocalRanks
    batch: MicrobatchSource
    number: int = 0
    warm_s: float = 0.0
    round_times_s: list[float] = field(default_factory=list)

    def step(self) -> float:
        """Take a step and return its duration."""
        start_s = time.perf_counter()
        self.local_ranks.step(self.number, self.batch)
        self.number += 1
        return time.perf_counter() - start_s

    def max_over_ranks(self, seconds: float) -> float:
        """Return the longest time of all ranks, the same on every rank."""
        return max(cast("list[float]", all_gather_values(self.local_ranks, seconds)))

    def warm_up(self) -> None:
        """Take steps that do not count, and record how long the last one took."""
        self.warm_s = self.max_over_ranks([self.step() for _ in range(WARM_STEPS)][-1])

    def run_round(self) -> None:
        """Take a step that does not count, and some that do, equally many on every rank."""
        self.step()
        num_steps = min(MAX_STEPS, max(MIN_STEPS, math.ceil(ROUND_S / max(self.warm_s, 1e-6))))
        self.round_times_s.append(self.max_over_ranks(fmean(self.step() for _ in range(num_steps))))

    def to_trial(self) -> PlanTrial:
        """Return the median over rounds of the slowest rank's mean step, and the time of each round."""
        return PlanTrial(
            self.plan, median(self.round_times_s or [self.warm_s]), round_times_s=tuple(self.round_times_s)
        )


def select_plan(
    auto_strategy: AutoStrategy,
    target: TrialTarget,
    inputs: Any,  # noqa: ANN401 - whatever the model takes
    batch_size: int,
) -> tuple[Plan, PlanChoice | None]:
    """Return the plan to use, the same on every rank, and its alternatives.

    Args:
        auto_strategy: the choice to make.
        target: what will be trained.
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
    """Choose again by the measured times of the best plans and plain data parallelism.

    Args:
        choice: by predicted times.
        target: what is trained.
        count: the number of plans in addition to data parallelism.
        with_traces: whether each plan's trial ends with a traced step.
    """
    trials, untried = run_trials(candidates_to_measure(choice, count), target, with_traces=with_traces)
    return decide_by_trials(choice, trials, untried)


def run_trials(
    plans: Sequence[Plan], target: TrialTarget, *, with_traces: bool
) -> tuple[list[PlanTrial], list[RejectedPlan]]:
    """Return the trial of each plan, the same on every rank, and the plans that cannot be built.

    Args:
        plans: all for the same ranks; every rank has copies of its parts of the model for all of them at once.
        target: what is trained.
        with_traces: whether each plan's trial ends with a traced step.
    """
    runners: list[TrialRunner] = []
    untried: list[RejectedPlan] = []
    with ExitStack() as stack:
        stack.enter_context(accelerator_for(model_device(target.model)).preserve_rng())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # the run itself warns
        for plan in plans:
            result = build_runner(plan, target, stack)
            if isinstance(result, RejectedPlan):
                untried.append(result)
            else:
                runners.append(result)
        for runner in runners:
            runner.warm_up()
        run_interleaved(runners)
        trials = normalize_speed([runner.to_trial() for runner in runners])
        return list(map(add_trace, trials, runners)) if with_traces else trials, untried


def build_runner(plan: Plan, target: TrialTarget, stack: ExitStack) -> TrialRunner | RejectedPlan:
    """Build the ranks for a plan, closed with the stack; or return why some rank cannot be built for it."""
    batch, optimizer = target.make_batch(plan.global_num_microbatches), target.optimizer_spec.optimizer
    trained, loss = find_trained_modules(target.model, target.loss, optimizer), target.loss
    if trained is target.model:
        trained = copy.deepcopy(trained)
    else:  # a trial trains the parameters of the loss, too
        trained, loss = copy.deepcopy((trained, loss))
    optimizer_spec = target.optimizer_spec.rebind(dict(trained.named_parameters()))
    local_ranks = LocalRanks(target.open_world(), plan, model_of(trained), loss, optimizer_spec, target.options)
    stack.callback(local_ranks.close)
    local_ranks.use_buckets(replace(local_ranks.buckets, tune=False))  # a trial is too short to tune the bucket size
    reason = ""
    try:
        local_ranks.build(batch.inputs(0), batch.sizes[0])
    except PlanError as error:
        reason = first_line(error) or "it was refused"
    reasons = cast("list[str]", all_gather_values(local_ranks, reason))
    return RejectedPlan(plan, next(filter(None, reasons))) if any(reasons) else TrialRunner(plan, local_ranks, batch)


def run_interleaved(runners: Sequence[TrialRunner]) -> None:
    """Measure all plans that may still be the fastest, and those near the fastest again."""
    limit_s = ABANDON_FACTOR * min((runner.warm_s for runner in runners), default=0.0)
    remaining = [runner for runner in runners if runner.warm_s <= limit_s]
    run_rounds(remaining)
    for factor in NEAR_FASTEST_FACTORS:
        remaining = near_fastest(remaining, factor)
        if len(remaining) > 1:
            run_rounds(remaining)


def run_rounds(runners: Sequence[TrialRunner]) -> None:
    """Measure plans in rounds, in every other round in reverse order."""
    for number in range(ROUNDS):
        for runner in runners[:: -1 if number % 2 else 1]:
            runner.run_round()


def near_fastest(runners: Sequence[TrialRunner], factor: float) -> list[TrialRunner]:
    """Return the runners within a factor of the fastest one, the same on every rank."""
    steps = [trial.step_s for trial in normalize_speed([runner.to_trial() for runner in runners])]
    limit_s = factor * min(steps, default=0.0)
    return [runner for runner, step_s in zip(runners, steps, strict=True) if step_s <= limit_s]


def add_trace(trial: PlanTrial, runner: TrialRunner) -> PlanTrial:
    """Return a trial with one more step, which is traced."""
    return replace(trial, trace=trace_step(runner.local_ranks, runner.number, runner.batch)[1])


def normalize_speed(trials: Sequence[PlanTrial]) -> list[PlanTrial]:
    """Remove the machine's speed in each round from trials of the same rounds.

    The speed of a round is the geometric mean of the plans with the most rounds. A plan's time is the median of its
    times relative to that.

    Example:
        >>> one, other = normalize_speed(
        ...     [PlanTrial(Plan(), 6.0, round_times_s=(2.0, 6.0)), PlanTrial(Plan(), 4.0, round_times_s=(1.0, 3.0))]
        ... )
        >>> one.step_s / other.step_s
        2.0
    """
    num_rounds = max((len(trial.round_times_s) for trial in trials), default=0)
    complete = [trial.round_times_s for trial in trials if len(trial.round_times_s) == num_rounds]
    speeds = [geometric_mean(turns) for turns in zip(*complete, strict=True)]
    usual_s = median(speeds) if speeds else 0.0
    return [
        replace(
            trial,
            step_s=usual_s
            * median(time_s / round_speed for time_s, round_speed in zip(trial.round_times_s, speeds, strict=False)),
        )
        if trial.round_times_s
        else trial
        for trial in trials
    ]


def all_gather_values(local_ranks: LocalRanks, value: Json) -> Sequence[Json]:
    """Return the value of every process."""
    fabric = local_ranks.world.fabrics[0]
    if len(local_ranks.world.fabrics) == fabric.num_ranks:
        return [value]
    return fabric.gather_values("trial", value, tuple(range(fabric.num_ranks)))
