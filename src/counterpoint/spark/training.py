"""Training on Spark as BigDL does it: data stays in its partitions, and a step is two Spark jobs.

The first job runs ``F B reduce_scatter(grad)``: tasks compute, and its shuffle distributes the gradient slices.
``commit`` runs on the driver, between the jobs. The second job runs ``U all_gather(weight)``: tasks update their
slices, and its shuffle distributes the weights.
"""

from __future__ import annotations

import secrets
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
from counterpoint.runtime.loss.loss_parameters import require_no_loss_params
from counterpoint.runtime.loss.loss_reduction import LossFunction
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
    TrainingSpec,
    check_no_running_stats,
    meta_copy,
    serialize_constants,
)
from counterpoint.spark.weight_slices import make_layout, make_slice_optimizer
from counterpoint.strategies.systems.bigdl import bigdl
from counterpoint.terminal_text import warn
from counterpoint.training.checkpointing.save_restore import TrainProgress
from counterpoint.training.model_checks.validation import require_directory_path, wrap_optimizer
from counterpoint.training.model_partition import drop_frozen_params


def compile_training(
    model: nn.Module, optimizer_spec: OptimizerSpec, num_partitions: int, num_microbatches: int
) -> CompiledPlan:
    """Return the verified program of a training on Spark: ZeRO level 1 over partitions.

    Args:
        model: called as a whole.
        optimizer_spec: of the model's optimizer.
        num_partitions: of the data.
        num_microbatches: into which each partition splits its part of a batch.
    """
    params = list_params(model)
    whole = LayerSpec("model", tuple(param.name for param in params))
    spec = drop_frozen_params(ModelSpec((Block((whole,), 0),), params), optimizer_spec)
    return compile_plan(Plan(bigdl(num_partitions), num_microbatches=num_microbatches), spec)


def partition_microbatches(compiled: CompiledPlan) -> tuple[tuple[int, ...], ...]:
    """Return the microbatches of each rank program, if two Spark jobs per step can run the program.

    Raises:
        PlanError: they cannot: an instruction breaks the order compute, reduce_scatter, commit, update, all_gather.

    Example:
        >>> from counterpoint.model.spec import linear_chain
        >>> partition_microbatches(compile_plan(Plan(bigdl(2), num_microbatches=2), linear_chain(1)))
        ((0, 1), (2, 3))
    """
    num_partitions = compiled.program.num_ranks
    return tuple(_rank_microbatches(rank_program, num_partitions) for rank_program in compiled.program.rank_programs)


def _rank_microbatches(rank_program: RankProgram, num_partitions: int) -> tuple[int, ...]:
    all_ranks, previous_stage = tuple(range(num_partitions)), 0
    if rank_program.prologue or rank_program.epilogue:
        raise PlanError(
            "an asynchronous pipeline has no end of a step, but a step on Spark is two jobs; use zero(n, level=1)"
        )
    for instruction in rank_program.body:
        stage = step_stage(instruction, all_ranks)
        if stage < previous_stage:
            raise PlanError(
                f"{format_instruction(instruction)} cannot run in two Spark jobs, which compute, reduce-scatter "
                "gradients, "
                "commit, update and all-gather weights, in this order and among all partitions; use zero(n, level=1)"
            )
        previous_stage = stage
    return tuple(instruction.micro for instruction in rank_program.body if isinstance(instruction, Forward))


def step_stage(instruction: Instruction, all_ranks: tuple[int, ...]) -> int:
    """Return the stage of a step in which an instruction runs; -1 if two Spark jobs cannot run it."""
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
    """Result of a training.

    Args:
        plan: as text.
        steps: of this call, without slices.
        step_bytes: bytes that all partitions send in a step, by the program's cost formula.
    """

    plan: str
    steps: tuple[SparkStep, ...]
    step_bytes: int

    @property
    def losses(self) -> list[float]:
        """The loss of each step."""
        return [step.loss for step in self.steps]


class SparkTraining:
    """A model, its loss and its optimizer, prepared for a number of partitions.

    Args:
        model: any module on the CPU whose forward has no side effects.
        loss: from the model's output and the targets to the mean loss of the samples.
        optimizer: of torch, on the model's parameters, or a factory such as ``partial(SGD, lr=0.1)``.
        options: of the run.
        num_partitions: of the data.

    Raises:
        PlanError: the arguments contradict each other, or Spark cannot run them.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction,
        optimizer: optim.Optimizer | TorchOptimizerFactory,
        options: SparkOptions,
        num_partitions: int,
    ) -> None:
        check_no_running_stats(model)
        check_on_cpu(model)
        require_directory_path(options.checkpoint_dir)
        if options.save_every is not None and options.checkpoint_dir is None:
            raise PlanError(f"save_every={options.save_every} needs a folder; give checkpoint_dir=FOLDER, too")
        require_no_loss_params(model, loss, "counterpoint.spark")
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
        """The bytes that all partitions send in a step, by the program's cost formula; with ``bf16`` in 16 bits."""
        total = sum(self.compiled.sent_bytes())
        return (
            int(total * (2 if self.options.codec == "bf16" else self.layout.dtype.itemsize))
            // self.layout.dtype.itemsize
        )

    def make_spec(self, constants: BroadcastBytes) -> TrainingSpec:
        """Return what every task needs."""
        model = meta_copy(self.model)
        code, seed = self.options.codec, self.options.seed
        return TrainingSpec(
            secrets.token_hex(8), model, constants, self.loss, self.slice_optimizer, self.layout, code, seed
        )

    def assign_batches(self, infos: Sequence[PartitionInfo]) -> BatchAssignment:
        """Return which samples are in which partition."""
        starts = tuple(accumulate((info.count for info in infos), initial=0))
        sampler = Sampler(starts[-1], self.options.batch_size, self.options.seed)
        return BatchAssignment(sampler, starts, tuple(info.digest for info in infos))

    def run(
        self,
        shuffle: Shuffle,
        spec: TrainingSpec,
        infos: Sequence[PartitionInfo],
        *,
        resume: Path | None = None,
        on_step: OnStep | None = None,
    ) -> SparkTrainResult:
        """Train; afterwards the model has the trained weights.

        Args:
            shuffle: between partitions that have the samples.
            spec: from :meth:`make_spec`.
            infos: contents of each partition.
            resume: a checkpoint, or a folder of them, to continue from.
            on_step: called after each step, including steps that are repeated.

        Raises:
            CheckpointError: one cannot be read or written.
            DataError: a loss is not finite, a parameter is unused, or a sample is wrong.
            LaunchError: Spark aborted a job.
        """
        slices, progress = initial_slices(self.target, self.num_partitions), TrainProgress()
        if resume is not None:
            slices, progress = load_slices(self.target, resume, self.num_partitions)
        loop = SparkTrainingLoop(shuffle, spec, self.assign_batches(infos), self.microbatches, self.options)
        steps: list[SparkStep] = []
        for step in self._run_with_retries(loop, slices, progress):
            if step.slices:
                load_into_model(self.target, step.slices)
                self._save(loop, step)
            matches = (
                position for position, earlier in enumerate(steps) if earlier.progress.step == step.progress.step
            )
            index = next(matches, len(steps))
            steps[index:] = [replace(step, slices=())]  # a retry repeats the steps after its slices
            if on_step is not None:
                on_step(step)
        return SparkTrainResult(str(self.compiled.plan), tuple(steps), self.step_bytes)

    def _run_with_retries(
        self, run: SparkTrainingLoop, slices: Sequence[bytes], progress: TrainProgress
    ) -> Iterator[SparkStep]:
        """Yield every step; after Spark aborts a job, restart from the last collected slices.

        Raises:
            LaunchError: Spark aborted more jobs than ``max_retries``.
        """
        for num_left in range(self.options.max_retries, -1, -1):
            try:
                for step in run.run(slices, progress):
                    if step.slices:
                        slices, progress = step.slices, step.progress
                    yield step
            except LaunchError as error:
                if num_left == 0:
                    raise
                warn(f"{error}; restarting from step {progress.step}", RuntimeWarning, stacklevel=2)
            else:
                return

    def _save(self, run: SparkTrainingLoop, spark_step: SparkStep) -> None:
        options = self.options
        if options.checkpoint_dir is None:
            return
        step = spark_step.progress.step
        if step == run.num_steps or (options.save_every is not None and step % options.save_every == 0):
            save_slices(self.target, spark_step.slices, spark_step.progress, options.checkpoint_dir, options.keep_last)


def check_on_cpu(model: nn.Module) -> None:
    """Check that a model's parameters and buffers are on the CPU.

    Raises:
        PlanError: one is not.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.device.type != "cpu":
            raise PlanError(
                f"{name} is on {tensor.device}, but Spark tasks compute on the CPU; move it with model.cpu()"
            )


def destroy_broadcast(broadcast: Broadcast[Any], context: SparkContext) -> None:
    """Destroy a broadcast, and remove it from PySpark's pending list, where a failed serialization leaves it."""
    context._pickled_broadcast_vars.clear()  # noqa: SLF001 - there is no public API
    broadcast.destroy()


def train(  # noqa: PLR0913 - mostly keyword-only
    data: RDD[Any] | DataFrame,
    model: nn.Module,
    *,
    loss: LossFunction,
    optimizer: optim.Optimizer | TorchOptimizerFactory,
    options: SparkOptions,
    columns: Sequence[str] = ("features", "label"),
    resume: str | Path | None = None,
    on_step: OnStep | None = None,
) -> SparkTrainResult:
    """Train on an RDD or a DataFrame, in two Spark jobs per step; afterwards the model has the trained weights.

    Partitions are replicas: each computes the samples of a global batch that it stores, updates a slice of the weights,
    and keeps the optimizer state of that slice. Data is converted to tensors once, which Spark caches.

    Args:
        data: an RDD of samples ``(inputs..., target)``, or a DataFrame; recomputing it must give the same samples.
        model: any module on the CPU whose forward has no side effects.
        loss: from the model's output and the targets to the mean loss of the samples.
        optimizer: an elementwise optimizer of torch, or a factory such as ``partial(SGD, lr=0.1)``.
        options: batch size, epochs and so on.
        columns: of a DataFrame: input columns, then the target column.
        resume: a checkpoint of any plan, or a folder of them, to continue from.
        on_step: called after each step.

    Raises:
        PlanError: the arguments contradict each other, cannot be serialized, or do not fit into a worker's memory.
        DataError: rows cannot be used, or a loss is not finite.
        CheckpointError: one cannot be read or written.
        LaunchError: Spark aborted a job, or executors have other versions of Python or torch.

    Promise:
        The same results as single-process training, up to rounding, for any number of partitions and any distribution
        of the samples, also if tasks run again. With ``codec="bf16"`` gradients and published weights have 8
        significant bits.

    Cost:
        Bytes sent per partition and step, for n partitions and P bytes of weights: 2 (n-1)/n P, half of it gradients
        and half weights. The state of a slice is sent, too, if Spark runs its task on another executor. Two jobs per
        step, or three with ``clip_norm``.

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
    loss: LossFunction,
    optimizer: optim.Optimizer | TorchOptimizerFactory,
    options: SparkOptions,
    resume: Path | None = None,
) -> SparkTrainResult:
    """Train as on Spark with partitions in this process, one after the other: for tests and experiments.

    Args:
        partitions: the samples of each.
        model: as in ``train``.
        loss: as in ``train``.
        optimizer: as in ``train``.
        options: as in ``train``.
        resume: as in ``train``.

    Example:
        >>> import torch
        >>> model, data = nn.Linear(1, 1), [(torch.ones(1), torch.ones(1))] * 3
        >>> options = SparkOptions(batch_size=2, max_steps=2)
        >>> result = train_local(
        ...     [data, data[:1]], model, loss=nn.functional.mse_loss, optimizer=optim.SGD, options=options
        ... )
        >>> [step.num_samples for step in result.steps], result.plan
        ([2, 2], 'zero(2, level=1)')
    """
    from counterpoint.spark.samples import inspect_local, pack_local
    from counterpoint.spark.shuffle import LocalShuffle

    training = SparkTraining(model, loss, optimizer, options, len(partitions))
    samples = pack_local(partitions, training.layout.dtype)
    spec = training.make_spec(LocalBytes(training.constants))
    return training.run(LocalShuffle(samples), spec, inspect_local(samples), resume=resume)
