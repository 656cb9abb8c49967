"""What a command plans, profiles or shows: a built-in job, or what a user's script trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from counterpoint.errors import PlanError
from counterpoint.launchers.script import is_script

if TYPE_CHECKING:
    from torch import nn

    from counterpoint.model.model_profile import ModelProfile
    from counterpoint.runtime.loss.loss_reduction import LossFunction
    from counterpoint.runtime.microbatches import MicrobatchSource
    from counterpoint.runtime.optimizer_spec import OptimizerSpec
    from counterpoint.training.options import TrainingOptions
    from counterpoint.training.plan_resolution import RequestedPlan

JOB_HELP = "A script that trains, or a built-in job: text, digits, lines."
ScriptArguments = Annotated[
    list[str] | None, typer.Argument(metavar="[-- ARGUMENT...]", help="Arguments of the script, after --.")
]
Which = Annotated[
    int,
    typer.Option(min=1, help="Which of the script's calls of cp.Trainer and cp.parallelize; the others take no steps."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Write all figures as JSON.")]


@dataclass(frozen=True, slots=True)
class Workload:
    """What is trained, and its first batch.

    Args:
        name: of the job or the script.
        model: not trained yet.
        loss: from the model's output and the targets to the loss.
        optimizer_spec: the optimizer.
        options: the training options.
        batch_size: samples of a global batch.
        make_batch: from a number of samples and of microbatches to the first global batch.
        requested_plan: the plan that a script asks for; None for a job.
    """

    name: str
    model: nn.Module
    loss: LossFunction
    optimizer_spec: OptimizerSpec
    options: TrainingOptions
    batch_size: int
    make_batch: Callable[[int, int], MicrobatchSource]
    requested_plan: RequestedPlan | None = None

    def inputs(self, num_samples: int) -> Any:  # noqa: ANN401 - whatever the model takes
        """Return the model's inputs for the first samples, at most those of the first batch."""
        return self.make_batch(num_samples, 1).inputs(0)

    def profile(self, microbatch_sizes: Sequence[int], **options: Any) -> ModelProfile:  # noqa: ANN401 - see below
        """Return the profile of the model on the samples of its first batch.

        Args:
            microbatch_sizes: sizes of microbatches; without any those of ``cp.profile``.
            options: further ones of ``cp.profile``, such as ``roofline_device``.
        """
        from counterpoint.training.profiling import profile

        batch = self.make_batch(self.batch_size, 1)
        return profile(
            self.model,
            batch.inputs(0),
            batch.targets(0),
            loss=self.loss,
            optimizer=self.optimizer_spec.optimizer,
            microbatch_sizes=microbatch_sizes,
            batch_dims=self.options.batch_dims,
            shared=self.options.shared,
            **options,
        )


def load_workload(
    name: str, arguments: Sequence[str] = (), which: int = 1, *, computes_nothing: bool = False
) -> Workload:
    """Return a built-in job, or what a script trains, which is run until its first batch.

    Args:
        name: of a job, or the path of a script.
        arguments: of the script.
        which: which of its calls of ``Trainer`` and ``parallelize``.
        computes_nothing: whether the model is only looked at, so that it may be on torch's device ``meta``, and the
            script may ask for a device that is not there.

    Raises:
        PlanError: there is no such job, or the script trains nothing.
        LaunchError: the script cannot be run, or ends with an error.
    """
    if not is_script(name):
        return load_job(name)
    if not computes_nothing:
        return load_script(Path(name), arguments, which)
    from counterpoint.device.select import computing_nothing

    with computing_nothing():
        return load_script(Path(name), arguments, which)


def load_script(script: Path, arguments: Sequence[str], which: int) -> Workload:
    """Return what a script trains."""
    from counterpoint.data.sampler import split_batch
    from counterpoint.device.select import accelerator_for, computes_nothing, model_device
    from counterpoint.runtime.microbatches import SlicedBatch
    from counterpoint.runtime.sample_layout import SampleLayout
    from counterpoint.training.recording import record_script

    run = record_script(script, arguments, num_steps=1, which=which)
    step = run.first_step
    layout = SampleLayout(run.model, run.options.batch_dims or {}, run.options.shared)
    to_device = accelerator_for(model_device(run.model)).to_device if computes_nothing() else _keep
    marked = layout.mark(to_device(step.inputs), to_device(step.targets))

    def make_batch(num_samples: int, num_microbatches: int) -> MicrobatchSource:
        count = min(num_samples, step.num_samples)
        return SlicedBatch(marked, tuple(split_batch(count, num_microbatches)), step.autocasts)

    return Workload(
        script.name,
        run.model,
        run.loss,
        run.optimizer_spec,
        run.options,
        step.num_samples,
        make_batch,
        run.requested_plan,
    )


def _keep(values: Any) -> Any:  # noqa: ANN401 - any nest of tensors
    return values


def load_job(name: str) -> Workload:
    """Return a built-in job."""
    from counterpoint.jobs.registry import find_job
    from counterpoint.runtime.optimizer_spec import OptimizerSpec
    from counterpoint.training.batches.dataset_batches import take_first_samples
    from counterpoint.training.options import TrainingOptions

    job = find_job(name)
    model, (dataset, _) = job.build_model(0), job.build_data()
    optimizer_spec = OptimizerSpec(job.optimizer, dict(model.named_parameters()))

    def make_batch(num_samples: int, num_microbatches: int) -> MicrobatchSource:
        return take_first_samples(dataset, min(num_samples, len(dataset)), num_microbatches)

    options = TrainingOptions(batch_norm="deferred")
    return Workload(name, model, job.loss, optimizer_spec, options, job.batch_size, make_batch)


def require_script(name: str | None, arguments: Sequence[str] | None) -> None:
    """Check that arguments for a script come with one.

    Raises:
        PlanError: they do not.
    """
    if arguments and (name is None or not is_script(name)):
        raise PlanError(
            f"{' '.join(arguments)} are arguments of a script, but {name or 'nothing'} is not a script; give SCRIPT.py"
        )
