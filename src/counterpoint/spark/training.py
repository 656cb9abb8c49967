"""Training on Spark as BigDL does it: data stay where they are, and an iteration is two jobs."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn, optim

from counterpoint.data.sampler import Sampler
from counterpoint.errors import LaunchError, PlanError
from counterpoint.runtime.optimizers import Factory
from counterpoint.spark.driver import Done, Options, Run
from counterpoint.spark.exchange import Exchange, OnSpark
from counterpoint.spark.program import compiled_for, micros_of
from counterpoint.spark.recipe import Known, Loss, Recipe, Still, require_no_statistics, still_values, without_numbers
from counterpoint.spark.samples import Look, looks, packed, rows_of
from counterpoint.spark.saving import Subject, first_slices, load_slices, put_back, save_slices
from counterpoint.spark.settings import require_room, warn_of_open
from counterpoint.spark.slices import layout_of, rule_of
from counterpoint.spark.works import Share
from counterpoint.training.checks import make_face, require_folder
from counterpoint.training.saving import Progress

if TYPE_CHECKING:
    from pyspark import RDD, Broadcast, SparkContext
    from pyspark.sql import DataFrame

OnStep = Callable[[Done], None]


@dataclass(frozen=True, slots=True)
class Trained:
    """What a training did.

    Args:
        plan: what it ran, as text.
        steps: of this call, without slices.
        step_bytes: what the program's formula says that all places send each other in a step.
    """

    plan: str
    steps: tuple[Done, ...]
    step_bytes: int

    @property
    def losses(self) -> list[float]:
        """The loss of each step."""
        return [done.loss for done in self.steps]


class Training:
    """A model, its loss and its optimizer, ready for an exchange of so many places.

    Args:
        model: any module on the CPU that leaves nothing behind in a forward.
        loss: from the model's output and the targets to the mean loss of the samples.
        optimizer: of torch, on the model's parameters, or a factory such as ``partial(SGD, lr=0.1)``.
        options: how long, and how.
        num_places: partitions.

    Raises:
        PlanError: the parts do not go together, or not with Spark.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: optim.Optimizer | Factory,
        options: Options,
        num_places: int,
    ) -> None:
        require_no_statistics(model)
        require_here(model)
        require_folder(options.save_to)
        if options.save_every is not None and options.save_to is None:
            raise PlanError(f"save_every={options.save_every} says when, but not where; give save_to=FOLDER as well")
        self.model, self.loss, self.options, self.num_places = model, loss, options, num_places
        face = make_face(optimizer, model)
        self.rule = rule_of(face)
        self.layout = layout_of(model, face.group_of, num_places)
        self.compiled = compiled_for(model, face, num_places, options.micros)
        self.micros = micros_of(self.compiled)
        self.still = still_values(model, face.group_of)
        plan = str(self.compiled.plan)
        self.subject = Subject(model, face, self.layout, plan, options.batch_size, options.seed)

    @property
    def step_bytes(self) -> int:
        """What all places send each other in a step, by the program's formula, or half of it with a code of 16 bits."""
        total = sum(self.compiled.sent_bytes())
        return (
            int(total * (2 if self.options.code == "bf16" else self.layout.dtype.itemsize))
            // self.layout.dtype.itemsize
        )

    def recipe(self, still: Still) -> Recipe:
        """Return what tasks have to know."""
        model = without_numbers(self.model)
        code, seed = self.options.code, self.options.seed
        return Recipe(secrets.token_hex(8), model, still, self.loss, self.rule, self.layout, code, seed)

    def share(self, found: Sequence[Look]) -> Share:
        """Return which samples are where."""
        starts = tuple(accumulate((one.count for one in found), initial=0))
        sampler = Sampler(starts[-1], self.options.batch_size, self.options.seed)
        return Share(sampler, starts, tuple(one.digest for one in found))

    def run(
        self,
        exchange: Exchange,
        recipe: Recipe,
        found: Sequence[Look],
        *,
        resume: Path | None = None,
        on_step: OnStep | None = None,
    ) -> Trained:
        """Train; afterwards the model has the weights that came out.

        Args:
            exchange: between places that have the samples.
            recipe: from ``recipe``.
            found: what is in each place.
            resume: a checkpoint, or a folder of them, to go on from.
            on_step: called after each step, also of those that are taken again.

        Raises:
            CheckpointError: one cannot be read or written.
            DataError: a loss is not finite, a parameter is unused, or a sample is wrong.
            LaunchError: Spark gave up a job.
        """
        slices, progress = first_slices(self.subject, self.num_places), Progress()
        if resume is not None:
            slices, progress = load_slices(self.subject, resume, self.num_places)
        run = Run(exchange, recipe, self.share(found), self.micros, self.options)
        steps: list[Done] = []
        for done in self._steps(run, slices, progress):
            if done.slices:
                put_back(self.subject, done.slices)
                self._save(run, done)
            again = next((at for at, one in enumerate(steps) if one.progress.step == done.progress.step), len(steps))
            steps[again:] = [replace(done, slices=())]  # what Spark gave up afterwards is taken once more
            if on_step is not None:
                on_step(done)
        return Trained(str(self.compiled.plan), tuple(steps), self.step_bytes)

    def _steps(self, run: Run, slices: Sequence[bytes], progress: Progress) -> Iterator[Done]:
        """Yield every step; where Spark gives up a job, again from the last slices at the driver, if that may be.

        Raises:
            LaunchError: Spark gave up a job once more than the options allow.
        """
        for left in range(self.options.retries, -1, -1):
            try:
                for done in run.steps(slices, progress):
                    if done.slices:
                        slices, progress = done.slices, done.progress
                    yield done
            except LaunchError as error:
                if left == 0:
                    raise
                warnings.warn(f"{error}; going on from step {progress.step}", RuntimeWarning, stacklevel=2)
            else:
                return

    def _save(self, run: Run, done: Done) -> None:
        options = self.options
        if options.save_to is None:
            return
        step = done.progress.step
        if step == run.num_steps or (options.save_every is not None and step % options.save_every == 0):
            save_slices(self.subject, done.slices, done.progress, options.save_to, options.keep)


def require_here(model: nn.Module) -> None:
    """Check that a model's numbers are on the CPU.

    Raises:
        PlanError: they are not.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.device.type != "cpu":
            raise PlanError(f"{name} is on {tensor.device}, but tasks of Spark's compute on the CPU; move it there")


def forget(still: Broadcast[Any], context: SparkContext) -> None:
    """End a broadcast, also in the list of those to ship: a closure that could not be shipped leaves it to the next."""
    context._pickled_broadcast_vars.clear()  # noqa: SLF001 - nothing public empties it
    still.destroy()


def train(  # noqa: PLR0913 - what a training may be given, most by keyword
    data: RDD[Any] | DataFrame,
    model: nn.Module,
    *,
    loss: Loss,
    optimizer: optim.Optimizer | Factory,
    options: Options,
    columns: Sequence[str] = ("features", "label"),
    resume: str | Path | None = None,
    on_step: OnStep | None = None,
) -> Trained:
    """Train on an RDD or a DataFrame, in two Spark jobs a step; afterwards the model has the trained weights.

    Partitions are replicas: each computes those samples of a global batch that it has, updates a slice of the weights,
    and has the optimizer's state of that slice. Data do not move but once, to be kept as tensors by Spark.

    Args:
        data: an RDD of samples ``(inputs..., target)``, or a DataFrame; the same whenever Spark computes it again.
        model: any module on the CPU whose forward leaves nothing behind in it.
        loss: from the model's output and the targets to the mean loss of the samples.
        optimizer: of torch, one that treats every number apart, or a factory such as ``partial(SGD, lr=0.1)``.
        options: batch size, epochs and the rest.
        columns: of a DataFrame: those of the inputs, and that of the target last.
        resume: a checkpoint, or a folder of them, of any plan, to go on from.
        on_step: called after each step.

    Raises:
        PlanError: the parts do not go together, or cannot be shipped, or there is no room for them.
        DataError: rows cannot be used, or what is computed from them.
        CheckpointError: one cannot be read or written.
        LaunchError: Spark gave up a job, or executors have other versions.

    Promise:
        The same numbers as on one rank, to rounding, whatever the number of partitions and however samples are spread
        over them; also when tasks run again. With ``code="bf16"`` gradients and published weights have 8 bits.

    Cost:
        Bytes sent per partition and step, n of them, of P: 2 (n-1)/n P, half of it gradients and half of it weights.
        The state of a slice travels, too, where Spark runs its task elsewhere. Two jobs, or three with clip_norm.

    Source:
        Dai et al., BigDL: A Distributed Deep Learning Framework for Big Data, SoCC 2019, section 3.
    """
    from pyspark.sql import DataFrame

    rows = rows_of(data, columns) if isinstance(data, DataFrame) else data
    context, settings = rows.context, dict(rows.context.getConf().getAll())
    warn_of_open(context.master, settings)
    training = Training(model, loss, optimizer, options, rows.getNumPartitions())
    require_room(training.layout.num_elements * training.layout.dtype.itemsize, context.master, settings)
    samples = packed(rows, training.layout.dtype)
    still = context.broadcast(training.still)
    try:
        found = looks(samples, training.num_places)
        exchange = OnSpark(context, samples, training.num_places)
        path = Path(resume) if resume is not None else None
        return training.run(exchange, training.recipe(still), found, resume=path, on_step=on_step)
    finally:
        samples.unpersist()
        forget(still, context)


def train_here(
    partitions: Sequence[Sequence[Any]],
    model: nn.Module,
    *,
    loss: Loss,
    optimizer: optim.Optimizer | Factory,
    options: Options,
    resume: Path | None = None,
) -> Trained:
    """Train as on Spark with partitions in this process, one after the other: for tests, and to try things out.

    Args:
        partitions: the samples of each.
        model: as in ``train``.
        loss: likewise.
        optimizer: likewise.
        options: likewise.
        resume: likewise.

    Example:
        >>> import torch
        >>> model, data = nn.Linear(1, 1), [(torch.ones(1), torch.ones(1))] * 3
        >>> options = Options(batch_size=2, max_steps=2)
        >>> done = train_here(
        ...     [data, data[:1]], model, loss=nn.functional.mse_loss, optimizer=optim.SGD, options=options
        ... )
        >>> [step.num_samples for step in done.steps], done.plan
        ([2, 2], 'zero(2, level=1)')
    """
    from counterpoint.spark.exchange import Here
    from counterpoint.spark.samples import looks_here, packed_here

    training = Training(model, loss, optimizer, options, len(partitions))
    parcels = packed_here(partitions, training.layout.dtype)
    recipe = training.recipe(Known(training.still))
    return training.run(Here(parcels), recipe, looks_here(parcels), resume=resume)
