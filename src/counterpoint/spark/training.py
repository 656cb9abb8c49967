"""How two Spark jobs carry out a program: which words are computed where, and which collective is which shuffle.

``F B share(grad)`` is the first job: tasks compute, and its shuffle shares gradients out. ``commit`` is the driver,
between the jobs. ``U join(weight)`` is the second: tasks update their slices, and its shuffle hands out the weights.

Training on Spark as BigDL does it: data stay where they are, and an iteration is two jobs.
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn, optim

from counterpoint.compiler.compile import CompiledPlan, compile as compile_plan
from counterpoint.data.sampler import Sampler
from counterpoint.errors import LaunchError, PlanError
from counterpoint.model.spec import Block, LayerSpec, ModelSpec
from counterpoint.partitioning.partitioned_model import list_params
from counterpoint.plan.plan import Plan
from counterpoint.program.instruction import Backward, Collective, Commit, Forward, Instruction, Update
from counterpoint.program.program import RankProgram
from counterpoint.program.text import format_instruction
from counterpoint.runtime.optimizer_spec import OptimizerSpec, TorchOptimizerFactory
from counterpoint.spark.checkpoint import SparkTrainingTarget, initial_slices, load_into_model, load_slices, save_slices
from counterpoint.spark.samples import PartitionInfo, inspect_partitions, pack_partitions, to_sample_rdd
from counterpoint.spark.settings import check_worker_memory, warn_insecure_settings
from counterpoint.spark.shuffle import Shuffle, SparkShuffle
from counterpoint.spark.tasks import BatchAssignment
from counterpoint.spark.training_loop import SparkOptions, SparkStep, SparkTrainingLoop
from counterpoint.spark.training_spec import (
    BroadcastBytes,
    LocalBytes,
    Loss,
    TrainingSpec,
    check_no_running_stats,
    meta_copy,
    serialize_constants,
)
from counterpoint.spark.weight_slices import make_layout, make_slice_optimizer
from counterpoint.strategies.systems.bigdl import bigdl
from counterpoint.training.checkpointing.save_restore import TrainProgress
from counterpoint.training.model_partition import drop_frozen_params
from counterpoint.training.validation import require_directory_path, wrap_optimizer


def compile_training(
    model: nn.Module, optimizer_spec: OptimizerSpec, num_partitions: int, num_microbatches: int
) -> CompiledPlan:
    """Return the program of a training on Spark: ZeRO of level 1 over partitions, proved.

    Args:
        model: called as a whole.
        face: its optimizer.
        num_places: partitions.
        micros: into how many microbatches a partition cuts its share of a batch.
    """
    params = list_params(model)
    whole = LayerSpec("model", tuple(param.name for param in params))
    spec = drop_frozen_params(ModelSpec((Block((whole,), 0),), params), optimizer_spec)
    return compile_plan(Plan(bigdl(num_partitions), num_microbatches=num_microbatches), spec)


def partition_microbatches(compiled: CompiledPlan) -> tuple[tuple[int, ...], ...]:
    """Return the microbatches of each row of a program that two jobs can carry out.

    Raises:
        PlanError: they cannot: a row goes another way than compute, share, commit, update, join.

    Example:
        >>> from counterpoint.model.spec import linear_chain
        >>> partition_microbatches(compile_plan(Plan(bigdl(2), num_microbatches=2), linear_chain(1)))
        ((0, 1), (2, 3))
    """
    num_places = compiled.program.num_ranks
    return tuple(_rank_microbatches(row, num_places) for row in compiled.program.rank_programs)


def _rank_microbatches(rank_program: RankProgram, num_partitions: int) -> tuple[int, ...]:
    everyone, before = tuple(range(num_partitions)), 0
    if rank_program.prologue or rank_program.epilogue:
        raise PlanError("a plan without a flush has no steps that end, but a step on Spark is two jobs; take zero(n)")
    for word in rank_program.body:
        stage = step_stage(word, everyone)
        if stage < before:
            raise PlanError(
                f"{format_instruction(word)} cannot be carried out by two Spark jobs, which compute, share gradients "
                "out, agree, update and join weights, in this order and among all partitions; take zero(n, level=1)"
            )
        before = stage
    return tuple(word.micro for word in rank_program.body if isinstance(word, Forward))


def step_stage(instruction: Instruction, all_ranks: tuple[int, ...]) -> int:
    """Return how far a step is when a word comes; -1 for one that has no place in it."""
    match instruction:
        case Forward(block=0, version=0) | Backward(block=0, version=0, part=""):
            return 0
        case Collective(op="reduce_scatter", tensor=value, group=group) if value.name == "grad" and group == all_ranks:
            return 1
        case Commit(group=group) if group == all_ranks:
            return 2
        case Update():
            return 3
        case Collective(op="all_gather", tensor=value, group=group) if value.name == "weight" and group == all_ranks:
            return 4
        case _:
            return -1


if TYPE_CHECKING:
    from pyspark import RDD, Broadcast, SparkContext
    from pyspark.sql import DataFrame

OnStep = Callable[[SparkStep], None]


@dataclass(frozen=True, slots=True)
class SparkTrainResult:
    """What a training did.

    Args:
        plan: what it ran, as text.
        steps: of this call, without slices.
        step_bytes: what the program's formula says that all places send each other in a step.
    """

    plan: str
    steps: tuple[SparkStep, ...]
    step_bytes: int

    @property
    def losses(self) -> list[float]:
        """The loss of each step."""
        return [done.loss for done in self.steps]


class SparkTraining:
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
        optimizer: optim.Optimizer | TorchOptimizerFactory,
        options: SparkOptions,
        num_partitions: int,
    ) -> None:
        check_no_running_stats(model)
        check_on_cpu(model)
        require_directory_path(options.checkpoint_dir)
        if options.save_every is not None and options.checkpoint_dir is None:
            raise PlanError(
                f"save_every={options.save_every} says when, but not where; give checkpoint_dir=FOLDER as well"
            )
        self.model, self.loss, self.options, self.num_partitions = model, loss, options, num_partitions
        face = wrap_optimizer(optimizer, model)
        self.slice_optimizer = make_slice_optimizer(face)
        self.layout = make_layout(model, face.group_index, num_partitions)
        self.compiled = compile_training(model, face, num_partitions, options.num_microbatches)
        self.microbatches = partition_microbatches(self.compiled)
        self.constants = serialize_constants(model, face.group_index)
        plan = str(self.compiled.plan)
        self.target = SparkTrainingTarget(model, face, self.layout, plan, options.batch_size, options.seed)

    @property
    def step_bytes(self) -> int:
        """What all places send each other in a step, by the program's formula, or half of it with a code of 16 bits."""
        total = sum(self.compiled.sent_bytes())
        return (
            int(total * (2 if self.options.codec == "bf16" else self.layout.dtype.itemsize))
            // self.layout.dtype.itemsize
        )

    def make_spec(self, constants: BroadcastBytes) -> TrainingSpec:
        """Return what tasks have to know."""
        model = meta_copy(self.model)
        code, seed = self.options.codec, self.options.seed
        return TrainingSpec(
            secrets.token_hex(8), model, constants, self.loss, self.slice_optimizer, self.layout, code, seed
        )

    def assign_batches(self, infos: Sequence[PartitionInfo]) -> BatchAssignment:
        """Return which samples are where."""
        starts = tuple(accumulate((one.count for one in infos), initial=0))
        sampler = Sampler(starts[-1], self.options.batch_size, self.options.seed)
        return BatchAssignment(sampler, starts, tuple(one.digest for one in infos))

    def run(
        self,
        shuffle: Shuffle,
        spec: TrainingSpec,
        infos: Sequence[PartitionInfo],
        *,
        resume: Path | None = None,
        on_step: OnStep | None = None,
    ) -> SparkTrainResult:
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
        slices, progress = initial_slices(self.target, self.num_partitions), TrainProgress()
        if resume is not None:
            slices, progress = load_slices(self.target, resume, self.num_partitions)
        run = SparkTrainingLoop(shuffle, spec, self.assign_batches(infos), self.microbatches, self.options)
        steps: list[SparkStep] = []
        for done in self._run_with_retries(run, slices, progress):
            if done.slices:
                load_into_model(self.target, done.slices)
                self._save(run, done)
            again = next((at for at, one in enumerate(steps) if one.progress.step == done.progress.step), len(steps))
            steps[again:] = [replace(done, slices=())]  # what Spark gave up afterwards is taken once more
            if on_step is not None:
                on_step(done)
        return SparkTrainResult(str(self.compiled.plan), tuple(steps), self.step_bytes)

    def _run_with_retries(
        self, run: SparkTrainingLoop, slices: Sequence[bytes], progress: TrainProgress
    ) -> Iterator[SparkStep]:
        """Yield every step; where Spark gives up a job, again from the last slices at the driver, if that may be.

        Raises:
            LaunchError: Spark gave up a job once more than the options allow.
        """
        for left in range(self.options.max_retries, -1, -1):
            try:
                for done in run.run(slices, progress):
                    if done.slices:
                        slices, progress = done.slices, done.progress
                    yield done
            except LaunchError as error:
                if left == 0:
                    raise
                warnings.warn(f"{error}; going on from step {progress.step}", RuntimeWarning, stacklevel=2)
            else:
                return

    def _save(self, run: SparkTrainingLoop, done: SparkStep) -> None:
        options = self.options
        if options.checkpoint_dir is None:
            return
        step = done.progress.step
        if step == run.num_steps or (options.save_every is not None and step % options.save_every == 0):
            save_slices(self.target, done.slices, done.progress, options.checkpoint_dir, options.keep_last)


def check_on_cpu(model: nn.Module) -> None:
    """Check that a model's numbers are on the CPU.

    Raises:
        PlanError: they are not.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.device.type != "cpu":
            raise PlanError(f"{name} is on {tensor.device}, but tasks of Spark's compute on the CPU; move it there")


def destroy_broadcast(broadcast: Broadcast[Any], context: SparkContext) -> None:
    """End a broadcast, also in the list of those to ship: a closure that could not be shipped leaves it to the next."""
    context._pickled_broadcast_vars.clear()  # noqa: SLF001 - nothing public empties it
    broadcast.destroy()


def train(  # noqa: PLR0913 - what a training may be given, most by keyword
    data: RDD[Any] | DataFrame,
    model: nn.Module,
    *,
    loss: Loss,
    optimizer: optim.Optimizer | TorchOptimizerFactory,
    options: SparkOptions,
    columns: Sequence[str] = ("features", "label"),
    resume: str | Path | None = None,
    on_step: OnStep | None = None,
) -> SparkTrainResult:
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

    rows = to_sample_rdd(data, columns) if isinstance(data, DataFrame) else data
    context, settings = rows.context, dict(rows.context.getConf().getAll())
    warn_insecure_settings(context.master, settings)
    training = SparkTraining(model, loss, optimizer, options, rows.getNumPartitions())
    check_worker_memory(training.layout.num_elements * training.layout.dtype.itemsize, context.master, settings)
    samples = pack_partitions(rows, training.layout.dtype)
    still = context.broadcast(training.constants)
    try:
        found = inspect_partitions(samples, training.num_partitions)
        exchange = SparkShuffle(context, samples, training.num_partitions)
        path = Path(resume) if resume is not None else None
        return training.run(exchange, training.make_spec(still), found, resume=path, on_step=on_step)
    finally:
        samples.unpersist()
        destroy_broadcast(still, context)


def train_local(
    partitions: Sequence[Sequence[Any]],
    model: nn.Module,
    *,
    loss: Loss,
    optimizer: optim.Optimizer | TorchOptimizerFactory,
    options: SparkOptions,
    resume: Path | None = None,
) -> SparkTrainResult:
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
        >>> options = SparkOptions(batch_size=2, max_steps=2)
        >>> done = train_local(
        ...     [data, data[:1]], model, loss=nn.functional.mse_loss, optimizer=optim.SGD, options=options
        ... )
        >>> [step.num_samples for step in done.steps], done.plan
        ([2, 2], 'zero(2, level=1)')
    """
    from counterpoint.spark.samples import inspect_local, pack_local
    from counterpoint.spark.shuffle import LocalShuffle

    training = SparkTraining(model, loss, optimizer, options, len(partitions))
    parcels = pack_local(partitions, training.layout.dtype)
    recipe = training.make_spec(LocalBytes(training.constants))
    return training.run(LocalShuffle(parcels), recipe, inspect_local(parcels), resume=resume)
