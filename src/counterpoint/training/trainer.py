"""The trainer: a model, a loss, an optimizer and a word for the strategy; everything else follows from the plan."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn, optim

from counterpoint.compiler.compile import Compiled
from counterpoint.data.fetch import MapDataset
from counterpoint.data.sampler import Sampler, split
from counterpoint.errors import CheckpointError
from counterpoint.launchers.environment import RankEnvironment, detect
from counterpoint.optim.options import require_counts
from counterpoint.plan import Plan
from counterpoint.planner.choose import Choice
from counterpoint.runtime.optimizers import Factory
from counterpoint.training import saving
from counterpoint.training.apart import SaveBy
from counterpoint.training.checks import make_face, require_map_style, require_same_batch, require_schedule
from counterpoint.training.choice import FEW_SAMPLES, make_auto, make_options, make_plan, says_microbatches
from counterpoint.training.evaluation import Measure, evaluate, measuring
from counterpoint.training.events import Callback, History, every_rank
from counterpoint.training.failing import leave
from counterpoint.training.feeds import DatasetFeed
from counterpoint.training.goals import Evaluating, Goals, Reading, Saving
from counterpoint.training.memory import Memory, memory_of, remind
from counterpoint.training.norms import least_samples
from counterpoint.training.progress import Mode, ShowProgress
from counterpoint.training.run import Run
from counterpoint.training.team import Team
from counterpoint.training.trials import Subject, settle
from counterpoint.training.world import open_world

Schedule: TypeAlias = Callable[[optim.Optimizer], optim.lr_scheduler.LRScheduler]


class Trainer:
    """Trains a model under any strategy, with the same numbers.

    Args:
        model: any module; it has the trained weights after :meth:`fit`.
        loss: from the model's output and the targets to the mean loss of the samples.
        optimizer: a torch optimizer on the model's parameters, or a factory such as ``partial(AdamW, lr=3e-4)``.
        strategy: a plan, or its text: ``"zero3"`` takes all ranks there are, ``"pipeline(4) * data(2)"`` needs 8.
            Without a launcher, all ranks of the plan run in this process. Under ``"auto"`` the planner chooses when
            the first batch is known; ``plan`` is what it chose.
        num_microbatches: microbatches of the innermost program; by default 1, or what a pipeline can use.
        schedule: from the optimizer to a learning rate scheduler, stepped after every step, such as
            ``partial(cp.large_batch_schedule, batch_size=8192, ...)``.
        passes: what is done to the program afterwards; by default ``("overlap",)``, or what a plan that is no text
            says. Without any, ``()``, gradients are summed after the backward.
        callbacks: listeners to what happens.
        progress: how the run is shown on standard error: a bar on a terminal and plain lines elsewhere (``auto``),
            one of the two, ``json``, or ``off``.
        **options: fields of :class:`counterpoint.training.options.Options`.

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

    def __init__(  # noqa: PLR0913 - the options of a run, all by keyword
        self,
        model: nn.Module,
        *,
        loss: Callable[[Any, Any], Tensor],
        optimizer: optim.Optimizer | Factory,
        strategy: str | Plan = "data",
        num_microbatches: int | None = None,
        schedule: Schedule | None = None,
        passes: Sequence[str] | None = None,
        callbacks: Iterable[Callback] = (),
        progress: Mode = "auto",
        environment: RankEnvironment | None = None,
        **options: Any,  # noqa: ANN401 - checked by Options
    ) -> None:
        self.model = model
        self.loss = loss
        self.options = make_options(options)
        self.environment = environment if environment is not None else detect()
        self.plan = make_plan(strategy, self.environment, num_microbatches, passes)
        self.auto = make_auto(strategy, self.plan, num_microbatches, self.options)
        self.choice: Choice | None = None  # what the plan was weighed against, where that was left open
        self.has_fixed_micros = says_microbatches(strategy, num_microbatches)
        self.face = make_face(optimizer, model, strategy)
        self.schedule = schedule(self.face.optimizer) if schedule is not None else None
        require_schedule(self.schedule)
        self.callbacks = list(callbacks)
        if progress != "off" and not any(isinstance(callback, ShowProgress) for callback in self.callbacks):
            self.callbacks.append(ShowProgress(progress, name=type(model).__name__, stream=sys.stderr))
        self.progress = saving.Progress()
        self.team: Team | None = None
        self.is_running = False  # whether the ranks' weights are newer than the model's
        self.memory: Memory | None = None  # of the optimizers, between close() and the next ranks

    @property
    def optimizer(self) -> optim.Optimizer:
        """The optimizer whose options are used; change them, or put a scheduler on it."""
        return self.face.optimizer

    @property
    def rank(self) -> int:
        """This process's rank; 0 when all ranks are in this process."""
        return self.environment.rank if self.environment is not None else 0

    @property
    def compiled(self) -> Compiled | None:
        """The plan's program and its proof; None before the first batch is known."""
        return self.team.compiled if self.team is not None else None

    def fit(  # noqa: PLR0913 - the options of one fit, all by keyword
        self,
        dataset: MapDataset,
        *,
        batch_size: int,
        epochs: int = 1,
        max_steps: int | None = None,
        workers: int = 0,
        prefetch: int = 2,
        evaluation: MapDataset | None = None,
        measure: Measure | None = None,
        evaluate_every: int | None = None,
        save_to: str | Path | None = None,
        save_every: int | None = None,
        keep: int | None = 3,
        save_by: SaveBy = "run",
        resume: str | Path | None = None,
    ) -> History:
        """Train on a dataset; afterwards the model has the trained weights on every rank.

        A second call goes on from the model's weights as they are, with the optimizer's state and new epochs, also
        after :meth:`close` or an error that this process, with all ranks in it, survived.

        Args:
            dataset: map-style, samples ``(inputs..., target)``.
            batch_size: samples of one *global* batch, over all ranks.
            epochs: passes over the dataset.
            max_steps: steps of the whole run at most, those before a resume included.
            workers: processes of each rank that read its samples; 0 reads them when they are needed.
            prefetch: microbatches that each worker reads ahead.
            evaluation: held-out data, measured after every epoch and at the end.
            measure: from outputs and targets to tallies; by default the loss.
            evaluate_every: also measure after so many steps.
            save_to: folder of checkpoints, written at the end.
            save_every: also save after so many steps.
            save_by: ``stage`` has each stage of a plan without a flush save by itself, and wait for none.
            keep: how many checkpoints stay; None keeps all.
            resume: a checkpoint, or a folder of them, to go on from, in mid-epoch too.

        Returns:
            Every step and evaluation of this call.

        Raises:
            PlanError: the batch does not divide into the plan's microbatches, or a number makes no sense.
            DataError: a loss is not finite, a parameter is unused, a sample is wrong.
            CheckpointError: a checkpoint cannot be written or read.
        """
        require_counts(batch_size=batch_size)
        saves = Saving(Path(save_to) if save_to is not None else None, save_every, keep, save_by)
        measures = Evaluating(evaluation, measure if measure is not None else measuring(self.loss), evaluate_every)
        goals = Goals(epochs, max_steps, measures, saves, Reading(workers, prefetch))
        history = History()
        run = self.make_run(dataset, batch_size, goals, history)
        self.carry_out(run, Path(resume) if resume is not None else None)
        return history

    def make_run(self, dataset: MapDataset, batch_size: int, goals: Goals, history: History) -> Run:
        """Return a run that has not begun, of ranks that are ready for it; the history is told of all its steps.

        Raises:
            PlanError: the batch does not divide into the plan's microbatches.
            DataError: it is no dataset.
        """
        require_map_style(dataset)
        sampler = Sampler(len(dataset), batch_size, self.options.seed)
        require_same_batch(self.schedule, batch_size, sampler.num_batches)
        self.settle_plan(dataset, batch_size)
        self.plan.require_batch(batch_size)
        team = self.ready_team(dataset, batch_size)
        callbacks = self.callbacks if self.rank == 0 else every_rank(self.callbacks)
        return Run(team, dataset, sampler, goals, self.schedule, [history, *callbacks])

    def carry_out(self, run: Run, resume: Path | None) -> None:
        """Take all steps of a run; after an error nothing of the ranks is left.

        Args:
            run: not begun.
            resume: the checkpoint to go on from; None to go on from the fit before, if there was one.
        """
        error: BaseException | None = None
        self.is_running = True
        try:
            with torch.random.fork_rng(devices=[]), kept_modes(self.model):
                if resume is not None:
                    run.resume(resume)
                elif self.progress.step:
                    run.team.take()
                    run.go_on_after(self.progress)
                run.go()
        except BaseException as caught:
            error = caught
            raise
        finally:
            self.is_running = False
            self.progress = run.progress
            run.end(error)
            if error is not None:
                self.leave(run.team, error)

    def leave(self, team: Team, error: BaseException) -> None:
        """End the connection after an error; where all ranks are here, the model gets what was learned before it."""
        try:
            leave(team, error, "fit()")
        finally:
            self.close()

    def evaluate(
        self, dataset: MapDataset, *, measure: Measure | None = None, batch_size: int | None = None
    ) -> dict[str, float]:
        """Measure the model on a dataset in evaluation mode, with the plan's own ranks; the same on all of them.

        Args:
            dataset: map-style, samples ``(inputs..., target)``.
            measure: from outputs and targets to tallies; by default the loss.
            batch_size: samples at once; by default 64 per microbatch.
        """
        require_counts(optional=True, batch_size=batch_size)
        size = batch_size or 64 * self.plan.num_micros
        team = self.ready_team(dataset, size)
        team.flight.require_flushed("evaluate()")
        if not self.is_running:
            team.take()
        with kept_modes(self.model):
            return evaluate(team, dataset, measure if measure is not None else measuring(self.loss), size)

    def save(self, folder: str | Path, *, keep: int | None = None) -> Path:
        """Write a checkpoint of the whole run, durable and verified; all ranks call it together.

        Returns:
            The checkpoint's own folder.
        """
        if self.team is None or self.team.compiled is None:
            raise CheckpointError("there is nothing to save before the first step; call fit(...) first")
        self.team.flight.require_flushed("save()")
        if not self.is_running:
            self.team.take()
        return saving.save(self.team, Path(folder), self.progress, {}, keep=keep)

    def ready_team(self, dataset: MapDataset, batch_size: int) -> Team:
        """Return the ranks, made and built for microbatches of this dataset if they are not yet."""
        require_map_style(dataset)
        if self.team is None:
            self.settle_plan(dataset, batch_size)
            world = open_world(self.environment, self.plan.num_ranks, self.options.deadline_s)
            self.team = Team(world, self.plan, self.model, self.loss, self.face, self.options)
            self.team.choice = self.choice
        if self.team.compiled is None:
            self.build(self.team, dataset, batch_size)
        return self.team

    def settle_plan(self, dataset: MapDataset, batch_size: int) -> None:
        """The plan is chosen, where that was left open, and has microbatches for this batch size."""
        if self.auto is not None:
            few = first_samples(dataset, min(batch_size, len(dataset), FEW_SAMPLES)).inputs(0)
            self.plan, self.choice = settle(self.auto, self.subject(dataset, batch_size), few, batch_size)
            self.auto, self.has_fixed_micros = None, True
        elif self.team is None and self.memory is None and not self.has_fixed_micros:
            self.plan = self.plan.with_microbatches_for(batch_size, least=least_samples(self.model))

    def subject(self, dataset: MapDataset, batch_size: int) -> Subject:
        """Return what plans are tried on: this model, on the first batch of a dataset that is not shuffled."""
        ranks = partial(open_world, self.environment, self.plan.num_ranks, self.options.deadline_s)
        batch = partial(first_samples, dataset, min(batch_size, len(dataset)))
        return Subject(self.model, self.loss, self.face, self.options, ranks, batch)

    def build(self, team: Team, dataset: MapDataset, batch_size: int) -> None:
        """Build the ranks for microbatches of this dataset; if that fails, nothing is left of them."""
        try:
            first, stop = split(min(batch_size, len(dataset)), self.plan.num_micros)[0]
            feed = first_samples(dataset, stop - first)
            team.build(feed.inputs(0), len(feed.indices))
            if self.memory is not None:
                remind(team.ranks, self.memory)
                self.memory = None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the connection to the other ranks; the model keeps its weights, and the trainer the optimizer's state."""
        if self.team is not None:
            if self.team.compiled is not None:
                self.memory = memory_of(self.team.ranks)
            self.team.close()
            self.team = None

    def __enter__(self) -> Trainer:
        """Use the trainer in a ``with`` block, which closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def kept_modes(model: nn.Module) -> Iterator[None]:
    """Have every module in training or evaluation mode afterwards as it was before."""
    before = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, flag in before:
            module.training = flag


def first_samples(dataset: MapDataset, count: int, num_micros: int = 1) -> DatasetFeed:
    """Return at least one of a dataset's first samples as one batch."""
    return DatasetFeed(dataset, Sampler(len(dataset), max(count, 1), shuffle="sequential").batch(0, 0), num_micros)
