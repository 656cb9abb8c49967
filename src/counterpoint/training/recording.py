"""Record what a script trains: the arguments of its ``Trainer`` or ``parallelize``, and its first batches.

While a script is recorded, what it asks to train takes its steps on one rank of this process, without callbacks,
evaluations and checkpoints, and the script is stopped when enough batches are known::

    script        Trainer(...)      fit(...)          step 0        step 1        step 2
    recording     strategy, plan    on one rank       batch 0       batch 1       batch 2, stop
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from counterpoint.errors import PlanError
from counterpoint.launchers.script import ScriptStop, run_script
from counterpoint.runtime.commit.step_commit import StepResult
from counterpoint.runtime.loss.loss_parameters import find_loss_module, find_trained_modules
from counterpoint.runtime.loss.loss_reduction import LossFunction
from counterpoint.runtime.microbatches import Autocasts, MicrobatchSource, copy_tensors, current_autocasts
from counterpoint.runtime.optimizer_spec import OptimizerSpec
from counterpoint.training.model_checks.module_snapshot import ModuleSnapshot
from counterpoint.training.options import TrainingOptions
from counterpoint.training.plan_resolution import RequestedPlan
from counterpoint.training.ranks.local_ranks import LocalRanks

ONE_RANK = RequestedPlan("solo")
"""The plan that a recorded script trains with."""


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """What one step was given.

    Args:
        inputs: of the model, for the whole global batch.
        targets: of the loss.
        num_samples: samples of the batch.
        autocasts: under which it was computed.
        group_options: of the optimizer's groups, such as the learning rate.
    """

    inputs: Any
    targets: Any
    num_samples: int
    autocasts: Autocasts
    group_options: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """What is trained, and its first steps.

    Args:
        model: the model itself.
        loss: from the model's output and the targets to the loss.
        optimizer_spec: the optimizer.
        options: the training options.
        requested_plan: the plan that was asked for.
        snapshot: of the model, and of the loss if it is a module, before the first step.
        steps: the first ones, in order.
    """

    model: nn.Module
    loss: LossFunction
    optimizer_spec: OptimizerSpec
    options: TrainingOptions
    requested_plan: RequestedPlan
    snapshot: ModuleSnapshot
    steps: tuple[RecordedStep, ...]

    @property
    def first_step(self) -> RecordedStep:
        """The first step."""
        return self.steps[0]

    @property
    def trained(self) -> nn.Module:
        """The model, with the parameters of the loss."""
        return find_trained_modules(self.model, self.loss, self.optimizer_spec.optimizer)


@dataclass(slots=True)
class StepRecorder:
    """Records the steps of one ``Trainer`` or ``parallelize``, or skips them if it is not the one to record.

    Args:
        requested_plan: the plan that was asked for.
        num_steps: the number of steps to record; 0 to skip all, as if they had been taken.
        local_ranks: those that take the steps.
        snapshot: of what is trained, before the first step.
        steps: recorded so far.
    """

    requested_plan: RequestedPlan
    num_steps: int
    local_ranks: LocalRanks | None = None
    snapshot: ModuleSnapshot | None = None
    steps: list[RecordedStep] = field(default_factory=list)

    def before_step(self, local_ranks: LocalRanks, batch: MicrobatchSource) -> StepResult | None:
        """Record a step that is about to be taken; return its result if it is to be skipped.

        Raises:
            ScriptStop: enough steps are recorded.
        """
        if self.num_steps == 0:
            return StepResult(float("nan"), 0, float("nan"), 1.0, "")
        if self.snapshot is None:
            self.local_ranks, self.snapshot = local_ranks, snapshot_of(local_ranks.model, local_ranks.loss)
        if len(self.steps) < self.num_steps:
            self.steps.append(record_step(batch, local_ranks.optimizer_spec))
        if len(self.steps) == self.num_steps:
            raise ScriptStop
        return None

    def after_training(self) -> None:
        """Stop the script where it has taken fewer steps than were to be recorded.

        Raises:
            ScriptStop: there are some.
        """
        if self.steps:
            raise ScriptStop

    def to_run(self) -> RecordedRun:
        """Return what was recorded, with the model as it was before the first step."""
        assert self.local_ranks is not None, "a step was recorded"
        assert self.snapshot is not None, "a step was recorded"
        ranks = self.local_ranks
        ranks.close()
        self.snapshot.restore()
        return RecordedRun(
            ranks.model,
            ranks.loss,
            ranks.optimizer_spec,
            ranks.options,
            self.requested_plan,
            self.snapshot,
            tuple(self.steps),
        )


def snapshot_of(model: nn.Module, loss: LossFunction) -> ModuleSnapshot:
    """Return the state of a model, and of its loss if that has a module."""
    module = find_loss_module(loss)
    return ModuleSnapshot([model] if module is None else [model, module])


def record_step(batch: MicrobatchSource, optimizer_spec: OptimizerSpec) -> RecordedStep:
    """Return a batch of one microbatch and the current options of the optimizer, both copied.

    Raises:
        PlanError: it has several, as that of ``step.update()``.
    """
    if len(batch.sizes) > 1:
        raise PlanError(
            f"the step accumulates {len(batch.sizes)} batches, which cannot be recorded as one; pass one batch to the "
            "step while the script is checked"
        )
    options = tuple(
        copy.deepcopy(optimizer_spec.options(group)) for group in range(len(optimizer_spec.optimizer.param_groups))
    )
    inputs, targets = (copy_tensors(values, detached=True) for values in (batch.inputs(0), batch.targets(0)))
    return RecordedStep(inputs, targets, sum(batch.sizes.values()), current_autocasts(), options)


@dataclass(slots=True)
class ScriptRecorder:
    """Records one of the calls of a script: of ``Trainer`` or ``parallelize``, counted together.

    Args:
        which: the number of the call, from 1 on; the steps of the others are skipped.
        num_steps: the number of steps to record.
        calls: those that the script has made.
    """

    which: int
    num_steps: int
    calls: list[StepRecorder] = field(default_factory=list)

    def record_call(self, requested_plan: RequestedPlan) -> StepRecorder:
        """Return what records or skips the steps of a new call."""
        is_recorded = len(self.calls) + 1 == self.which
        self.calls.append(StepRecorder(requested_plan, self.num_steps if is_recorded else 0))
        return self.calls[-1]


_SCRIPT_RECORDER: ContextVar[ScriptRecorder | None] = ContextVar("_SCRIPT_RECORDER", default=None)
"""The recorder of the script that a command runs in this process."""


def record_call(requested_plan: RequestedPlan) -> StepRecorder | None:
    """Return the recorder of a new ``Trainer`` or ``parallelize``; None unless a command records the script."""
    recorder = _SCRIPT_RECORDER.get()
    return None if recorder is None else recorder.record_call(requested_plan)


@contextmanager
def recorded_calls(recorder: ScriptRecorder) -> Iterator[None]:
    """Let a recorder record the calls inside."""
    token = _SCRIPT_RECORDER.set(recorder)
    try:
        yield
    finally:
        _SCRIPT_RECORDER.reset(token)


def record_script(script: Path, arguments: Sequence[str], *, num_steps: int, which: int = 1) -> RecordedRun:
    """Run a script until it has begun a number of steps, and return what it trains.

    Args:
        script: its path.
        arguments: its own arguments.
        num_steps: the number of steps; fewer are recorded if the script ends before.
        which: which of its calls of ``Trainer`` and ``parallelize``, from 1 on.

    Raises:
        PlanError: the script does not take a step in such a call.
        LaunchError: it cannot be run, or ends with an error.
    """
    recorder = ScriptRecorder(which, num_steps)
    with recorded_calls(recorder):
        run_script(script, arguments)
    calls = recorder.calls
    if len(calls) < which:
        made = "without a call of cp.Trainer(...) or cp.parallelize(...)"
        if calls:
            made = f"after {len(calls)} of these calls, cp.Trainer(...) or cp.parallelize(...), and --which is {which}"
        raise PlanError(
            f"{script} ended {made}; a script has to train with one of them when it is run as `python {script}`, with "
            "its own arguments after --"
        )
    if not calls[which - 1].steps:
        raise PlanError(
            f"{script} ended before the first step of call {which} of cp.Trainer(...) and cp.parallelize(...); it has "
            "to call fit(...), or the step, when it is run, or give another --which"
        )
    return calls[which - 1].to_run()
