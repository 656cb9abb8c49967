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
from counterpoint.plan import Plan
from counterpoint.planner.choose import Choice, Trial, decide, worth_measuring
from counterpoint.planner.rank import Refusal
from counterpoint.runtime.feed import Feed
from counterpoint.runtime.optimizers import Face
from counterpoint.training.choice import Auto
from counterpoint.training.options import Options
from counterpoint.training.team import Team
from counterpoint.training.tracing import measured_step
from counterpoint.training.world import World

WARM_STEPS = 2
"""Steps of each plan that nobody counts; the last one says how long the others will take."""
ROUNDS = 5
"""Plans take turns so often, there and back, so that what changes on the machine meanwhile meets all of them."""
CLOSE = (1.25, 1.1)
"""Plans that have taken at most so many times as long as the fastest one have as many rounds again, and once more."""
TURN_S = 0.5
"""Seconds that a turn should take."""
FEWEST, MOST = 2, 50
"""Steps of a turn that count; the one before them finds what the plan before has left in the caches."""
HOPELESS = 4.0
"""A plan whose last warm step took so many times as long as that of another plan is given up."""


@dataclass(frozen=True, slots=True)
class Subject:
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
    face: Face
    options: Options
    open_world: Callable[[], World]
    feed: Callable[[int], Feed]


@dataclass(slots=True)
class Runner:
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
    team: Team
    feed: Feed
    number: int = 0
    warm_s: float = 0.0
    turns: list[float] = field(default_factory=list)

    def step(self) -> float:
        """Take a step and return its seconds."""
        began = time.perf_counter()
        self.team.step(self.number, self.feed)
        self.number += 1
        return time.perf_counter() - began

    def slowest(self, seconds: float) -> float:
        """Return the longest time of all ranks, the same on every rank."""
        return max(cast("list[float]", told(self.team, seconds)))

    def warm_up(self) -> None:
        """Take steps that do not count; how long the last one took is known."""
        self.warm_s = self.slowest([self.step() for _ in range(WARM_STEPS)][-1])

    def take_turn(self) -> None:
        """Take a step that does not count, and some that do, equally many on every rank."""
        self.step()
        num_steps = min(MOST, max(FEWEST, math.ceil(TURN_S / max(self.warm_s, 1e-6))))
        self.turns.append(self.slowest(fmean(self.step() for _ in range(num_steps))))

    def trial(self) -> Trial:
        """Return the median over turns of the slowest rank's mean step, and that of each turn."""
        return Trial(self.plan, median(self.turns or [self.warm_s]), turns=tuple(self.turns))


def settle(auto: Auto, subject: Subject, inputs: Any, batch_size: int) -> tuple[Plan, Choice | None]:  # noqa: ANN401
    """Return the plan that is taken, the same on every rank, and what it was weighed against.

    Args:
        auto: what is left open.
        subject: what will be trained.
        inputs: of a few samples.
        batch_size: samples of a global batch.

    Raises:
        PlanError: the model does not take the inputs, or there is no plan for this batch.
    """
    if auto.num_ranks == 1:
        return auto.alone, None
    choice = auto.weigh(subject.model, subject.face, inputs, subject.options, batch_size)
    if subject.options.measure:
        choice = measured(choice, subject, subject.options.measure)
    return choice.plan, choice


def measured(choice: Choice, subject: Subject, count: int, *, traced: bool = False) -> Choice:
    """Return the choice by what so many of the best plans and plain data parallelism take on these ranks.

    Args:
        choice: by what was predicted.
        subject: what is trained.
        count: plans beside data parallelism.
        traced: whether each plan's trial ends with a step that is measured word by word.
    """
    trials, untried = try_plans(worth_measuring(choice, count), subject, traced=traced)
    return decide(choice, trials, untried)


def try_plans(plans: Sequence[Plan], subject: Subject, *, traced: bool) -> tuple[list[Trial], list[Refusal]]:
    """Return what each plan takes, the same on every rank, and those that the model does not go along with.

    Args:
        plans: all for the same ranks; every rank has copies of its parts of the model for all of them meanwhile.
        subject: what is trained.
        traced: whether each plan's trial ends with a step that is measured word by word.
    """
    runners: list[Runner] = []
    untried: list[Refusal] = []
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # a run gives the notices of its own plan
        for plan in plans:
            found = build(plan, subject, stack)
            if isinstance(found, Refusal):
                untried.append(found)
            else:
                runners.append(found)
        for runner in runners:
            runner.warm_up()
        take_turns(runners)
        trials = at_one_speed([runner.trial() for runner in runners])
        return list(map(with_trace, trials, runners)) if traced else trials, untried


def build(plan: Plan, subject: Subject, stack: ExitStack) -> Runner | Refusal:
    """Return the ranks under a plan, closed when the stack is; or why some rank cannot be built for it."""
    model, feed = copy.deepcopy(subject.model), subject.feed(plan.num_micros)
    face = subject.face.on(dict(model.named_parameters()))
    team = Team(subject.open_world(), plan, model, subject.loss, face, subject.options)
    stack.callback(team.close)
    team.buckets = replace(team.buckets, tune=False)  # a trial is over before all sizes have been tried
    reason = ""
    try:
        team.build(feed.inputs(0), feed.sizes[0])
    except PlanError as error:
        reason = str(error).splitlines()[0]
    reasons = cast("list[str]", told(team, reason))
    return Refusal(plan, next(filter(None, reasons))) if any(reasons) else Runner(plan, team, feed)


def take_turns(runners: Sequence[Runner]) -> None:
    """Let all take turns that may still be the fastest, and those that are close to it again.

    What is several times as slow keeps nobody waiting.
    """
    limit_s = HOPELESS * min((runner.warm_s for runner in runners), default=0.0)
    left = [runner for runner in runners if runner.warm_s <= limit_s]
    take_rounds(left)
    for factor in CLOSE:
        left = close_ones(left, factor)
        if len(left) > 1:
            take_rounds(left)


def take_rounds(runners: Sequence[Runner]) -> None:
    """Let plans take turns, in every other round the last one first."""
    for number in range(ROUNDS):
        for runner in runners[:: -1 if number % 2 else 1]:
            runner.take_turn()


def close_ones(runners: Sequence[Runner], factor: float) -> list[Runner]:
    """Return those that have taken at most so many times as long as the fastest one, the same on every rank."""
    steps = [trial.step_s for trial in at_one_speed([runner.trial() for runner in runners])]
    limit_s = factor * min(steps, default=0.0)
    return [runner for runner, step_s in zip(runners, steps, strict=True) if step_s <= limit_s]


def with_trace(trial: Trial, runner: Runner) -> Trial:
    """Return a trial with one more step, measured word by word."""
    return replace(trial, trace=measured_step(runner.team, runner.number, runner.feed)[1])


def at_one_speed(trials: Sequence[Trial]) -> list[Trial]:
    """Return trials of the same rounds as if the machine had been equally fast in all of these.

    How fast it was in a round the turns of those plans say together that have had the most. A plan's time is the median
    of its turns beside that.

    Example:
        >>> one, other = at_one_speed([Trial(Plan(), 6.0, turns=(2.0, 6.0)), Trial(Plan(), 4.0, turns=(1.0, 3.0))])
        >>> one.step_s / other.step_s
        2.0
    """
    most = max((len(trial.turns) for trial in trials), default=0)
    steady = [trial.turns for trial in trials if len(trial.turns) == most]
    speeds = [geometric_mean(turns) for turns in zip(*steady, strict=True)]
    usual_s = median(speeds) if speeds else 0.0
    return [
        replace(trial, step_s=usual_s * median(own / of_all for own, of_all in zip(trial.turns, speeds, strict=False)))
        if trial.turns
        else trial
        for trial in trials
    ]


def told(team: Team, value: Json) -> Sequence[Json]:
    """Return what every process tells the others."""
    fabric = team.world.fabrics[0]
    if len(team.world.fabrics) == fabric.num_ranks:
        return [value]
    return fabric.gather_values("trial", value, tuple(range(fabric.num_ranks)))
