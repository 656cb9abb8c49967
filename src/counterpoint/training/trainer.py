"""The trainer: a model, a loss, an optimizer and a strategy; the rest follows from the plan."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from torch import nn, optim
from torch.utils.data import DataLoader

from counterpoint.compiler.compile import CompiledPlan
from counterpoint.data.fetch import CollateFn
from counterpoint.data.sampler import split_batch
from counterpoint.errors import CheckpointError, PlanError, StoppedBySignal
from counterpoint.launchers.environment import RankEnvironment, detect
from counterpoint.launchers.signals import STOP_SIGNALS, collect_signals
from counterpoint.optim.validation import checked_call, renamed_hint, renamed_parameters, require_counts, shorten
from counterpoint.runtime.loss.loss_reduction import LossFunction
from counterpoint.runtime.sample_layout import SampleLayout
from counterpoint.training.agreement.rank_facts import CallFacts, describe_arguments, describe_ranks
from counterpoint.training.batches.batch_source import BatchSource, TrainingData, is_map_style, open_batches
from counterpoint.training.batches.dataset_batches import DataLoadingConfig
from counterpoint.training.callbacks.callback import Callback, History, callbacks_on_every_rank
from counterpoint.training.callbacks.progress import ProgressCallback, ProgressMode
from counterpoint.training.callbacks.run_folder import CHECKPOINTS, RunFolder, find_checkpoints
from counterpoint.training.checkpointing import save_restore
from counterpoint.training.checkpointing.checkpoint_dir import CheckpointDir
from counterpoint.training.checkpointing.per_stage import CheckpointMode
from counterpoint.training.distributed_world import open_world
from counterpoint.training.evaluation import MetricsFn, evaluate, require_metrics_function
from counterpoint.training.fit_loop import CheckpointConfig, EvaluationConfig, FitConfig, FitLoop
from counterpoint.training.initialization.materialize import begin_model, describe_sources
from counterpoint.training.model_checks.validation import (
    OptimizerArgument,
    min_microbatch_size,
    require_loss_function,
    require_scheduler_batch,
    require_step_scheduler,
    wrap_optimizer,
)
from counterpoint.training.optimizer_state import OptimizerStates, export_optimizer_states, restore_optimizer_states
from counterpoint.training.options import OTHER_FIT_OPTIONS, OTHER_OPTIONS, RENAMED_FIT_OPTIONS, TrainingOptions
from counterpoint.training.plan_resolution import (
    MAX_TRACE_SAMPLES,
    RequestedPlan,
    StrategyArgument,
    make_auto_strategy,
    parse_options,
    resolve_initial_plan,
)
from counterpoint.training.ranks.local_ranks import LocalRanks, abort_training
from counterpoint.training.ranks.placement import place_model
from counterpoint.training.recording import ONE_RANK, record_call

if TYPE_CHECKING:
    from counterpoint.planner.choose import PlanChoice
    from counterpoint.training.ranks.plan_trials import TrialTarget

LrSchedulerFactory: TypeAlias = Callable[[optim.Optimizer], optim.lr_scheduler.LRScheduler]


def require_known_options(given: Collection[str]) -> None:
    """Check that ``fit`` was given none of these names of options.

    Raises:
        PlanError: it was, with the present name of one that was renamed.
    """
    for name in given:
        own = list(inspect.signature(Trainer.fit).parameters)
        of_trainer = [*inspect.signature(Trainer).parameters, *TrainingOptions.__dataclass_fields__]
        near = get_close_matches(name, [*own, *of_trainer], n=1)
        hint = f"; did you mean {near[0]}?" if near else "; see Trainer.fit"
        hint = f"; {near[0]} is an option of Trainer(...)" if near and near[0] not in own else hint
        hint = f"; {OTHER_FIT_OPTIONS[name]}" if name in OTHER_FIT_OPTIONS else hint
        hint = f"; {OTHER_OPTIONS[name]}" if name in OTHER_OPTIONS else hint
        raise PlanError(f"fit has no option {name!r}{renamed_hint(name, RENAMED_FIT_OPTIONS) or hint}")


def list_callbacks(callbacks: object) -> list[Callback]:
    """Return callbacks as a list.

    Raises:
        PlanError: one is not a callback, or they are not in a list.
    """
    given = list(callbacks) if isinstance(callbacks, Iterable) else [callbacks]
    listed = [one for one in given if isinstance(one, Callback)]
    if len(listed) < len(given) or not isinstance(callbacks, Iterable):
        raise PlanError(
            f"callbacks={shorten(repr(callbacks))} is not a list of callbacks; give callbacks=[PrintLoss()], of a "
            "class that derives from cp.Callback and has on_step(self, event), or another of its methods"
        )
    return listed


def find_folders(
    run_dir: str | Path | RunFolder | None, checkpoint_dir: str | Path | None
) -> tuple[RunFolder | None, Path | None]:
    """Return what writes the folder of a run, and the folder of its checkpoints; None for none."""
    run_folder = run_dir if run_dir is None or isinstance(run_dir, RunFolder) else RunFolder(run_dir)
    if checkpoint_dir is None:
        return run_folder, run_folder.folder / CHECKPOINTS if run_folder is not None else None
    return run_folder, Path(checkpoint_dir)


def make_resume_config(
    resume: str | Path | None, checkpoint_dir: Path | None, batch_size: Literal["same", "new"]
) -> save_restore.ResumeConfig | None:
    """Return what a fit continues from; None if it is not asked to.

    Raises:
        PlanError: there is no folder to look for checkpoints, or no such batch size.
    """
    if batch_size not in {"same", "new"}:
        raise PlanError(f"resume_batch_size={batch_size!r} is not one of same, new")
    if resume is None:
        return None
    if not isinstance(resume, str | Path):
        raise PlanError(
            f"resume={resume!r} is neither 'auto' nor a folder; resume='auto' continues from the newest checkpoint in "
            "checkpoint_dir, and starts where there is none"
        )
    if resume != "auto":
        return save_restore.ResumeConfig(find_checkpoints(Path(resume)), "error", batch_size)
    if checkpoint_dir is None:
        raise PlanError(
            "resume='auto' continues from the newest checkpoint in checkpoint_dir, which is not given; give "
            "checkpoint_dir=FOLDER or run_dir=FOLDER as well, or resume=FOLDER"
        )
    return save_restore.ResumeConfig(checkpoint_dir, "start", batch_size)


class Trainer:
    """Trains a model under any strategy, with the same results as single-process training.

    Args:
        model: any module; it has the trained weights after :meth:`fit`.
        loss: from the model's output and the targets to the mean loss of the samples.
        optimizer: a torch optimizer on the model's parameters, a list of some that each have a part of them, or a
            factory such as ``partial(AdamW, lr=3e-4)``.
        strategy: a plan, or its text: ``"zero3"`` uses all ranks there are, ``"pipeline(4) * data(2)"`` needs 8; or a
            strategy of one's own, a tuple of strategies, applied from left to right, or a program. Without a launcher,
            all ranks of the plan run in this process. Under ``"auto"`` the planner chooses when the first batch is
            known; ``plan`` is its choice.
        num_microbatches: microbatches of the innermost program; by default 1, or as many as a pipeline can use.
        lr_scheduler: from the optimizer to a learning rate scheduler, stepped after every step, such as
            ``partial(cp.large_batch_schedule, batch_size=8192, ...)``.
        passes: passes over the program; by default ``("overlap",)``, or those of a plan object. Without any, ``()``,
            gradients are reduced after the backward.
        callbacks: called at the events of a run.
        progress: how the run is shown on standard error: a bar on a terminal and plain lines elsewhere (``auto``),
            one of the two, ``json``, or ``off``.
        **options: fields of :class:`counterpoint.training.options.TrainingOptions`.

    Raises:
        PlanError: the strategy, the model and the optimizer do not fit together.

    Example:
        >>> import torch, counterpoint as cp
        >>> from functools import partial
        >>> model = torch.nn.Linear(2, 1)
        >>> data = torch.utils.data.TensorDataset(torch.randn(8, 2), torch.randn(8, 1))
        >>> trainer = cp.Trainer(
        ...     model, loss=torch.nn.functional.mse_loss, optimizer=partial(torch.optim.SGD, lr=0.1), strategy="data(2)"
        ... )
        >>> len(trainer.fit(data, batch_size=4).losses)
        2
    """

    @checked_call
    def __init__(  # noqa: PLR0913 - the options of a run, all by keyword
        self,
        model: nn.Module,
        *,
        loss: LossFunction,
        optimizer: OptimizerArgument,
        strategy: StrategyArgument = "data",
        num_microbatches: int | None = None,
        lr_scheduler: LrSchedulerFactory | None = None,
        passes: Sequence[str] | None = None,
        callbacks: Iterable[Callback] = (),
        progress: ProgressMode = "auto",
        environment: RankEnvironment | None = None,
        **options: Any,  # noqa: ANN401 - checked by Options
    ) -> None:
        require_loss_function(loss)
        self.model = model
        self.loss = loss
        self.options = parse_options(options, type(self).__init__, fit=type(self).fit)
        self.sample_layout = SampleLayout(model, self.options.batch_dims or {}, self.options.shared)
        self.environment = environment if environment is not None else detect()
        requested_plan = RequestedPlan(strategy, num_microbatches, passes)
        self.recorder = record_call(requested_plan)
        if self.recorder is not None:
            self.options, self.environment = replace(self.options, num_measured_plans=0), None
            requested_plan, callbacks, progress = ONE_RANK, (), "off"
        self.plan = resolve_initial_plan(requested_plan, self.environment)
        self.plan_facts = requested_plan.describe(self.plan, self.options.profile)
        self.auto_strategy = make_auto_strategy(requested_plan, self.plan, self.options)
        self.choice: PlanChoice | None = None  # the candidates of strategy="auto"
        self.has_fixed_microbatches = requested_plan.has_explicit_microbatches
        self.initial_values = begin_model(model, loss, self.options, self.environment)
        self.plan_facts = [*self.plan_facts, *describe_sources(self.initial_values)]
        self.optimizer_spec = wrap_optimizer(optimizer, model, loss, strategy)
        self.accelerator = place_model(
            self.options.device, model, loss, self.optimizer_spec.user_optimizers, self.environment
        )
        self.lr_scheduler = lr_scheduler(self.optimizer_spec.optimizer) if lr_scheduler is not None else None
        require_step_scheduler(self.lr_scheduler)
        self.callbacks = list_callbacks(callbacks)
        if progress != "off" and not any(isinstance(callback, ProgressCallback) for callback in self.callbacks):
            self.callbacks.append(ProgressCallback(progress, name=type(model).__name__, stream=sys.stderr))
        self.progress = save_restore.TrainProgress()
        self.run_id = ""  # in its checkpoints
        self.local_ranks: LocalRanks | None = None
        self.ranks_are_newer = False  # whether the ranks have newer weights than the model
        self.optimizer_states: OptimizerStates | None = None  # kept between close() and the next ranks

    @property
    def optimizer(self) -> optim.Optimizer:
        """The optimizer whose options are used; change them, or put a scheduler on it."""
        return self.optimizer_spec.optimizer

    @property
    def rank(self) -> int:
        """This process's rank; 0 if all ranks are in this process."""
        return self.environment.rank if self.environment is not None else 0

    @property
    def has_peers(self) -> bool:
        """Whether other processes have ranks, too."""
        return self.environment is not None and self.environment.world_size > 1

    @property
    def compiled(self) -> CompiledPlan | None:
        """The plan's program and its verification result; None before the first batch is known."""
        return self.local_ranks.compiled if self.local_ranks is not None else None

    @checked_call
    def fit(  # noqa: PLR0913 - the options of one fit, all by keyword
        self,
        dataset: TrainingData,
        *,
        batch_size: int | None = None,
        collate_fn: CollateFn | None = None,
        epochs: int = 1,
        max_steps: int | None = None,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        eval_dataset: TrainingData | None = None,
        metrics: MetricsFn | None = None,
        evaluate_every: int | None = None,
        run_dir: str | Path | RunFolder | None = None,
        checkpoint_dir: str | Path | None = None,
        save_every: int | None = None,
        keep_last: int | None = 3,
        checkpoint_mode: CheckpointMode = "synchronous",
        resume: str | Path | None = None,
        resume_batch_size: Literal["same", "new"] = "same",
        **renamed: object,
    ) -> History:
        """Train on a dataset; afterwards the model has the trained weights on every rank.

        A second call continues from the model's current weights, with the optimizer's state and new epochs, also after
        :meth:`close` or after an error if all ranks are in this process.

        Args:
            dataset: with ``batch_size``, samples: a map-style dataset or any iterable of samples. Without it, global
                batches: a ``DataLoader``, whose batch size is that of the global batch, an iterable of batches, or a
                function that returns one. A batch or a sample is a tuple ``(inputs..., target)``, a dict, of which the
                model gets keyword arguments and the loss ``labels``, or another nest of tensors.
            batch_size: samples of one *global* batch, over all ranks.
            collate_fn: makes a batch of a list of samples, which are those of a global batch; by default each field is
                stacked.
            epochs: passes over the dataset.
            max_steps: the largest number of steps of the whole run, including those before a resume.
            num_workers: processes of each rank that read its samples; 0 reads them when they are needed.
            prefetch_factor: microbatches that each worker reads ahead.
            eval_dataset: held-out data, like ``dataset``, evaluated after every epoch and at the end.
            metrics: from outputs and targets to a dict of ``MeanMetric``; by default the loss.
            evaluate_every: also evaluate after this many steps.
            run_dir: folder of the run: plan, metrics, TensorBoard events, trace, report and checkpoints; a later fit of
                this trainer, or a resumed run, continues it.
            checkpoint_dir: folder of checkpoints, written at the end; ``checkpoints`` in ``run_dir`` if that is given.
            save_every: also save after this many steps.
            checkpoint_mode: ``per_stage`` lets each stage of an asynchronous pipeline save independently, without a
                flush.
            keep_last: how many checkpoints of this run are kept; None keeps all.
            resume: a run's folder, a folder of checkpoints, or a checkpoint, to continue from, also in mid-epoch;
                ``"auto"`` continues from the newest one in ``checkpoint_dir``, and starts where there is none.
            resume_batch_size: ``new`` continues with another batch size than the checkpoint's.
            **renamed: former names of options, which are errors that have the new name.

        Returns:
            Every step and evaluation of this call.

        Raises:
            PlanError: the batch does not divide into the plan's microbatches, or a number is not positive.
            DataError: a loss is not finite, a parameter is unused, a sample is wrong, ranks have different data.
            CheckpointError: the folder for checkpoints cannot be used, another run uses it, a checkpoint cannot be
                read, or the last one not be written.
            StoppedBySignal: SIGTERM or SIGUSR1 came; the step was finished, and a checkpoint written if there is a
                folder for them. It ends the process with exit code 143 or 138, unless it is caught.
        """
        require_known_options(renamed)
        require_counts(optional=True, batch_size=batch_size)
        run_folder, folder = find_folders(run_dir, checkpoint_dir)
        checkpoint = CheckpointConfig(folder, save_every, keep_last, checkpoint_mode)
        loading = DataLoadingConfig() if self.recorder is not None else DataLoadingConfig(num_workers, prefetch_factor)
        open_eval_batches = partial(self.open_eval_batches, eval_dataset, batch_size, collate_fn)
        evaluation = EvaluationConfig(None if eval_dataset is None else open_eval_batches, metrics, evaluate_every)
        start = make_resume_config(resume, folder, resume_batch_size)
        goals = FitConfig(epochs, max_steps, evaluation, checkpoint, start)
        if self.recorder is not None:
            goals, run_folder = goals.without_outputs(), None
        history = History()
        batches = open_batches(
            dataset,
            layout=self.sample_layout,
            batch_size=batch_size,
            collate_fn=collate_fn,
            loading=loading,
            seed=self.options.seed,
            first_epoch=self.progress.cursor.epoch + (self.progress.cursor.batch > 0),
        )
        arguments = {
            "batch_size": batch_size, "collate_fn": collate_fn, "metrics": metrics, "checkpoint_dir": folder,
            "save_every": save_every, "keep_last": keep_last, "checkpoint_mode": checkpoint_mode, "resume": resume,
            "epochs": epochs, "max_steps": max_steps, "evaluate_every": evaluate_every,
            "resume_batch_size": resume_batch_size, "run_dir": None if run_folder is None else run_folder.folder,
        }  # fmt: skip
        self.require_same_fit(batches, arguments, eval_dataset, open_eval_batches)
        records = [history] if run_folder is None or self.rank else [history, run_folder]
        self.run_fit(self.build_fit_loop(batches, goals, records))
        if self.recorder is not None:
            self.recorder.after_training()
        return history

    def open_eval_batches(
        self, dataset: TrainingData, batch_size: int | None, collate_fn: CollateFn | None
    ) -> BatchSource:
        """Return the batches of held-out data, in their order; by default of 64 samples per microbatch."""
        count = self.plan.global_num_microbatches
        if batch_size is not None:
            batch_size = max(batch_size, count)
        elif is_map_style(dataset) and not isinstance(dataset, list | tuple):
            batch_size = 64 * count
        return open_batches(
            dataset,
            layout=self.sample_layout,
            batch_size=None if isinstance(dataset, DataLoader) else batch_size,
            collate_fn=None if isinstance(dataset, DataLoader) else collate_fn,
            loading=DataLoadingConfig(),
            shuffle="sequential",
        )

    def require_same_fit(
        self,
        batches: BatchSource,
        arguments: Mapping[str, object],
        eval_dataset: TrainingData | None,
        open_eval_batches: Callable[[], BatchSource],
    ) -> None:
        """Check that all processes call ``fit`` alike; see :meth:`require_same_ranks`."""
        settings = {
            "eval_dataset": type(eval_dataset),
            "lr_scheduler": self.lr_scheduler,
            "callbacks": tuple(map(type, callbacks_on_every_rank(self.callbacks))),
        }
        if self.has_peers:
            eval_batches = open_eval_batches() if is_map_style(eval_dataset) else None
            self.require_same_ranks("Trainer.fit", batches, {**arguments, **settings}, eval_batches)

    def require_same_ranks(
        self, name: str, batches: BatchSource, arguments: Mapping[str, object], eval_batches: BatchSource | None = None
    ) -> None:
        """Check that all processes make the same call, with the same model and data; a collective call.

        Args:
            name: of the call.
            batches: what it reads.
            arguments: its arguments.
            eval_batches: the held-out data, if they have samples by index.

        Raises:
            PlanError: they do not, or have another model.
            DataError: they have other data.
        """
        if not self.has_peers:
            return
        world = open_world(self.environment, self.plan.num_ranks, self.options.timeout_s)
        held_out = [] if eval_batches is None else eval_batches.describe()
        texts = [text for name, text in held_out if name != "the order of samples"]
        data = [*batches.describe(), *([["the held-out data", ", ".join(texts)]] if texts else [])]
        call = CallFacts([["the call", name], *describe_arguments(arguments)], data)
        own = describe_ranks(self.model, self.plan_facts, self.optimizer, self.loss, self.options)
        call.require_same(world.fabrics[0], own)

    def build_fit_loop(self, batches: BatchSource, config: FitConfig, records: Sequence[Callback]) -> FitLoop:
        """Return a fit that has not started, with ranks that are ready for it.

        Args:
            batches: the training data.
            config: what the fit does.
            records: record its events in this process.

        Raises:
            PlanError: the batch does not divide into the plan's microbatches.
        """
        require_scheduler_batch(self.lr_scheduler, batches.batch_size, batches.num_batches)
        self.resolve_plan(batches)
        is_rest = config.resume is not None and batches.batch_size >= self.plan.global_num_microbatches
        if batches.is_fixed_size and not is_rest:  # the rest of a run may have got another number of ranks
            self.plan.require_batch(batches.batch_size)
        team = self.ensure_ranks(batches)
        callbacks = self.callbacks if self.rank == 0 else callbacks_on_every_rank(self.callbacks)
        return FitLoop(team, batches, config, self.lr_scheduler, [*records, *callbacks])

    def run_fit(self, fit_loop: FitLoop) -> None:
        """Take all steps of a fit that has not started; an error closes the ranks.

        It continues from a checkpoint if it is to, else from the previous fit if there was one.
        """
        error: BaseException | None = None
        self.ranks_are_newer = True
        ranks = fit_loop.local_ranks
        with collect_signals(STOP_SIGNALS, ranks.stop_signals, replaced="defaults"):
            ranks.stop_signals.clear()
            try:
                with ranks.accelerator.preserve_rng(), preserve_training_mode(self.model):
                    if fit_loop.config.resume is not None:
                        fit_loop.resume(fit_loop.config.resume)
                    elif self.progress.step:
                        ranks.import_if_current()
                        fit_loop.continue_from(self.progress, self.run_id)
                    fit_loop.run()
            except BaseException as raised:
                error = raised
                raise
            finally:
                self.ranks_are_newer = False
                self.progress, self.run_id = fit_loop.progress, fit_loop.run_id
                fit_loop.close(error)
                if error is not None and not isinstance(error, StoppedBySignal):
                    self.abort(ranks, error)

    def abort(self, local_ranks: LocalRanks, error: BaseException) -> None:
        """Close the connection after an error; if all ranks are here, the model gets the weights from before it."""
        try:
            abort_training(local_ranks, error, "fit()")
        finally:
            self.close()

    @renamed_parameters({"measure": RENAMED_FIT_OPTIONS["measure"]})
    @checked_call
    def evaluate(
        self,
        dataset: TrainingData,
        *,
        metrics: MetricsFn | None = None,
        batch_size: int | None = None,
        collate_fn: CollateFn | None = None,
    ) -> dict[str, float]:
        """Evaluate the model on a dataset, with the plan's own ranks; the result is the same on all of them.

        Args:
            dataset: like that of :meth:`fit`.
            metrics: from outputs and targets to a dict of ``MeanMetric``; by default the loss.
            batch_size: samples of a batch; for a dataset by default 64 per microbatch.
            collate_fn: makes a batch of a list of samples.
        """
        require_counts(optional=True, batch_size=batch_size)
        require_metrics_function(metrics)
        batches = self.open_eval_batches(dataset, batch_size, collate_fn)
        arguments = {"metrics": metrics, "batch_size": batch_size, "collate_fn": collate_fn}
        self.require_same_ranks("Trainer.evaluate", batches, arguments)
        team = self.ensure_ranks(batches)
        team.in_flight.require_flushed("evaluate()")
        if not self.ranks_are_newer:
            team.import_if_current()
        with preserve_training_mode(self.model):
            return evaluate(team, batches, metrics)

    @renamed_parameters({"keep": RENAMED_FIT_OPTIONS["keep"]})
    @checked_call
    def save(self, folder: str | Path, *, keep_last: int | None = None) -> Path:
        """Write a checkpoint of the whole run, durable and verified; a collective call.

        Returns:
            The checkpoint's own folder.
        """
        if self.recorder is not None:
            return Path(folder)
        if self.local_ranks is None or self.local_ranks.compiled is None:
            raise CheckpointError("there is nothing to save before the first step; call fit(...) first")
        self.local_ranks.in_flight.require_flushed("save()")
        if not self.ranks_are_newer:
            self.local_ranks.import_if_current()
        target = CheckpointDir(Path(folder), self.run_id)
        return save_restore.save_checkpoint(self.local_ranks, target, self.progress, {}, keep_last=keep_last)

    def full_optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's ``state_dict()`` in full, as torch's own optimizer has it; a collective call.

        If all ranks are in this process, ``trainer.optimizer.state_dict()`` returns the same, also after
        :meth:`close`.
        """
        if self.local_ranks is None:
            return self.optimizer.state_dict()
        return self.local_ranks.full_optimizer_state()

    def ensure_ranks(self, batches: BatchSource) -> LocalRanks:
        """Return the ranks, built for microbatches of these batches if they are not yet."""
        if self.local_ranks is None:
            self.resolve_plan(batches)
            world = open_world(self.environment, self.plan.num_ranks, self.options.timeout_s)
            self.local_ranks = LocalRanks(
                world,
                self.plan,
                self.model,
                self.loss,
                self.optimizer_spec,
                self.options,
                self.accelerator,
                self.initial_values,
            )
            self.local_ranks.use_plan(self.plan, self.choice)
            if self.recorder is not None:
                self.local_ranks.observe_steps(self.recorder)
        if self.local_ranks.compiled is None:
            self.build_ranks(self.local_ranks, batches)
        return self.local_ranks

    def resolve_plan(self, batches: BatchSource) -> None:
        """Choose the plan, if it is ``auto``, and the number of microbatches for this batch size."""
        if self.auto_strategy is not None:
            from counterpoint.training.ranks.plan_trials import select_plan

            sample_inputs = batches.sample_batch(min(batches.batch_size, MAX_TRACE_SAMPLES)).inputs(0)
            self.plan, self.choice = select_plan(
                self.auto_strategy, self.trial_target(batches), sample_inputs, batches.batch_size
            )
            self.auto_strategy, self.has_fixed_microbatches = None, True
        elif self.local_ranks is None and self.optimizer_states is None and not self.has_fixed_microbatches:
            min_samples = min_microbatch_size(self.model)
            self.plan = self.plan.with_microbatches_for(batches.batch_size, min_samples=min_samples)

    def trial_target(self, batches: BatchSource) -> TrialTarget:
        """Return what plans are tried on: this model, on the first batch."""
        from counterpoint.training.ranks.plan_trials import TrialTarget

        make_world = partial(open_world, self.environment, self.plan.num_ranks, self.options.timeout_s)
        batch = partial(batches.sample_batch, batches.batch_size)
        return TrialTarget(self.model, self.loss, self.optimizer_spec, self.options, make_world, batch)

    def build_ranks(self, local_ranks: LocalRanks, batches: BatchSource) -> None:
        """Build the ranks for microbatches of these batches; close everything if that fails."""
        try:
            whole = batches.sample_batch(batches.batch_size)
            count = sum(whole.sizes.values())
            start, stop = split_batch(count, self.plan.global_num_microbatches)[0]
            feed = batches.sample_batch(stop - start)
            has_new_state = self.optimizer_spec.has_new_state  # which was loaded since
            undivided = partial(whole.undivided, 0)
            with local_ranks.explain_build(feed.inputs(0), feed.sizes[0], undivided):
                local_ranks.build(feed.inputs(0), feed.sizes[0], undivided)
            if self.optimizer_states is not None:
                if not has_new_state:
                    restore_optimizer_states(local_ranks.ranks, self.optimizer_states)
                self.optimizer_states = None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection to the other ranks; the trainer keeps the optimizer's state."""
        if self.local_ranks is not None:
            if self.local_ranks.compiled is not None:
                self.optimizer_states = export_optimizer_states(self.local_ranks.ranks)
            self.local_ranks.close()
            self.local_ranks = None

    def __enter__(self) -> Trainer:
        """Use the trainer in a ``with`` block, which closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def preserve_training_mode(model: nn.Module) -> Iterator[None]:
    """Restore every module's training flag afterwards."""
    flags = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag
