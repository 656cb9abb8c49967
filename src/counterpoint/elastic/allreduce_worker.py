"""Sums over the parts of a batch: the same bits, however many workers have computed them.

What floating point numbers add up to depends on the order. Here it is a tree over the parts, which their number alone
says. A worker has a run of parts, and so some whole subtrees; whoever adds up a range of the gradient gets the subtrees
of all workers and goes on where these have stopped.

Elastic training without servers: all workers take the same steps together, whoever they are at the moment.

Who belongs to the job is the coordinator's to say, by generations. The workers of a generation meet and add up what
each has computed of a batch. When one of them goes, dies or comes, all leave, meet in the next generation, and go on
from the copy of who has taken most steps. No two are more than one step apart, for a step is taken when the gradients
of all parts are added up, and that needs everybody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from math import isfinite, nan

import torch
from torch import Tensor

from counterpoint.data.sampler import sample_key, split_batch
from counterpoint.elastic.data_slices import DataSlices, Minibatch
from counterpoint.elastic.ps_worker import (
    GroupFormed,
    LossFunction,
    SliceTrained,
    TaskEnded,
    WorkerConfig,
    WorkerEvent,
    check_finite_loss,
    never_stop,
)
from counterpoint.elastic.replica import FlatGradients, ModelReplica, broadcast_state
from counterpoint.elastic.worker_group import JobStoppedError, WorkerGroup, form_group
from counterpoint.errors import CounterpointError, DataError, PeerError, PlanError
from counterpoint.fabric.fingerprint import dtype_name
from counterpoint.fabric.rendezvous import Transport
from counterpoint.ps.messages import DataTask, MembershipView
from counterpoint.ps.session import NoTaskYet, Session


@dataclass(frozen=True, slots=True, eq=False)
class PartialSum:
    """The sum of some adjacent parts.

    Args:
        start: the first of them, a multiple of ``size``.
        size: how many, a power of two.
        value: their sum; it may be added to where it lies.
    """

    start: int
    size: int
    value: Tensor


def add_partial_sum(partial_sums: list[PartialSum], partial_sum: PartialSum) -> None:
    """The subtree is the last one; two that are the halves of a larger one have become that one.

    Args:
        trees: those before, adjacent and in order.
        tree: the next one.

    Example:
        >>> trees = []
        >>> for part in range(7):
        ...     add(trees, Subtree(part, 1, torch.tensor([2.0**part])))
        >>> [(tree.start, tree.size, float(tree.value)) for tree in trees]
        [(0, 4, 15.0), (4, 2, 48.0), (6, 1, 64.0)]
    """
    while (
        partial_sums
        and partial_sums[-1].size == partial_sum.size
        and partial_sums[-1].start % (2 * partial_sum.size) == 0
    ):
        left = partial_sums.pop()
        partial_sum = PartialSum(left.start, 2 * partial_sum.size, left.value.add_(partial_sum.value))
    partial_sums.append(partial_sum)


def finish_sum(partial_sums: Sequence[PartialSum]) -> Tensor:
    """Return the sum of all parts: what is left of the tree, from its right end on."""
    value = partial_sums[-1].value
    for tree in reversed(partial_sums[:-1]):
        value = tree.value.add_(value)
    return value


def aligned_ranges(start: int, stop: int) -> list[tuple[int, int]]:
    """Return start and size of the subtrees that a run of parts becomes.

    Example:
        >>> subtrees(3, 7)
        [(3, 1), (4, 2), (6, 1)]
    """
    found = []
    while start < stop:
        size = 1
        while start % (2 * size) == 0 and start + 2 * size <= stop:
            size *= 2
        found.append((start, size))
        start += size
    return found


def tree_all_reduce(
    workers: WorkerGroup, partial_sums: Sequence[PartialSum], num_parts: int, length: int, dtype: torch.dtype
) -> Tensor:
    """Return the sum over all parts of a batch, which member ``i`` has run ``i`` of, cut as evenly as can be.

    Each member adds up a range of it, and tells it to the others.

    Args:
        circle: the members.
        trees: the subtrees of this member's run; they are used up.
        num_parts: of all members together.
        length: of the sum, a flat tensor.
        dtype: of the sum.

    Cost:
        with as many parts as members, each sends ``2 (n - 1) / n`` of the sum, as a ring does; with more of them, the
        first half of that once for each subtree of a run, of which there are at most ``2 log2(parts)``.
    """
    fabric = workers.fabric
    count, label = fabric.num_ranks, f"gradients in {dtype_name(dtype)}"
    if count == 1:
        return finish_sum(partial_sums)
    bounds = [length * member // count for member in range(count + 1)]
    ranges = list(pairwise(bounds))
    runs = [aligned_ranges(*run) for run in split_batch(num_parts, count)]
    counts = [[len(run) * (stop - start) for start, stop in ranges] for run in runs]
    pieces = [tree.value[start:stop] for start, stop in ranges for tree in partial_sums]
    own = torch.cat(pieces) if pieces else torch.empty(0, dtype=dtype)
    received, work = fabric.all_to_all(label, own, counts, workers.ranks)
    workers.wait(work)
    low, high = ranges[fabric.rank]
    mine: list[PartialSum] = []
    for at, (start, size) in enumerate(chain.from_iterable(runs)):
        add_partial_sum(mine, PartialSum(start, size, received[at * (high - low) : (at + 1) * (high - low)]))
    whole = torch.empty(length, dtype=dtype)
    whole[low:high] = finish_sum(mine)
    workers.wait(fabric.all_gather(label, whole, bounds, workers.ranks))
    return whole


MAX_RENDEZVOUS = 3
"""So often the workers of one generation try to meet."""


@dataclass(slots=True)
class PartialGradient:
    """What one worker has computed of a step.

    Attributes:
        had: for each parameter, how many of its parts had a gradient.
        trees: sums of the gradients of its parts, by dtype.
        trained: its parts.
        error: why it is not complete.
    """

    grad_counts: Tensor
    partial_sums: dict[torch.dtype, list[PartialSum]] = field(default_factory=dict)
    events: list[SliceTrained] = field(default_factory=list)
    error: Exception | None = None


class AllReduceWorker:
    """One life of a worker at a job without servers.

    Args:
        replica: its copy.
        session: its belonging to the job.
        portions: the data.
        loss: from the model's output and the targets to the mean loss.
        habits: how it works.
        must_go: asked once in a step; when it holds, the worker leaves before the next one.
        transport: see :func:`counterpoint.fabric.rendezvous.connect`.

    Raises:
        PlanError: the data is not the job's, or checkpoints have no folder.
        CheckpointError: the copy is a checkpoint of training on other data.
    """

    def __init__(  # noqa: PLR0913 - as of `Worker`, most by keyword
        self,
        replica: ModelReplica,
        session: Session,
        slices: DataSlices,
        loss: LossFunction,
        *,
        config: WorkerConfig | None = None,
        should_stop: Callable[[], bool] = never_stop,
        transport: Transport = "auto",
    ) -> None:
        slices.check_data_config(session.job.data)
        replica.set_data(str(slices.sampler))
        self.replica, self.session, self.slices, self.loss = replica, session, slices, loss
        self.config, self.should_stop, self.transport = config or WorkerConfig(), should_stop, transport
        self.has_left = False
        self._task: DataTask | None = None
        self._is_recorded = False
        if self.config.checkpoint_every_slices and replica.folder is None:
            raise PlanError(
                f"checkpoint_every={self.config.checkpoint_every_slices}, and no server keeps the weights; give the folder "
                "that workers save in, as train(..., folder=Path('checkpoints')), or 0"
            )

    @property
    def num_steps(self) -> int:
        """Steps of the whole job."""
        return self.session.job.data.num_epochs * self.slices.sampler.num_batches

    @property
    def is_complete(self) -> bool:
        """Whether all steps have been taken."""
        return self.replica.progress.steps >= self.num_steps

    def events(self) -> Iterator[WorkerEvent]:
        """Work, and yield what has been done, until all steps have been taken or the worker has to go.

        Raises:
            PeerError: the job goes on without this worker, or cannot go on at all.
        """
        view, attempt = self.session.view, 0
        while not self.should_stop():
            error: PeerError | None = None
            try:
                with form_group(
                    self.session, view, attempt, must_go=self.should_stop, transport=self.transport
                ) as circle:
                    recorded = self._num_recorded_steps() if circle.fabric.rank == 0 else 0
                    broadcast_state(self.replica, circle, recorded)
                    yield GroupFormed(
                        circle.generation, tuple(one.name for one in circle.members), self.replica.progress.steps
                    )
                    yield from self._run_steps(circle)
            except JobStoppedError:
                raise
            except PeerError as found:
                error = found
            newer = self._wait_new_view(view, error)
            is_over = error is None and self.is_complete and set(newer.workers) <= set(view.workers)
            if is_over or self.should_stop():
                break
            attempt = attempt + 1 if newer.generation == view.generation else 0
            self._check_can_retry(newer, attempt, error)
            view = newer
        self._leave()

    def run(self) -> list[WorkerEvent]:
        """Work until all steps have been taken or the worker has to go; return what was done."""
        return list(self.events())

    def _leave(self) -> None:
        """The worker belongs to the job no longer; if nobody else does, its copy is saved where it has a folder."""
        self.has_left = not self.is_complete
        if self.has_left and len(self.session.view.workers) == 1:
            self.replica.save()
        self.session.leave()

    def _wait_new_view(self, view: MembershipView, error: PeerError | None) -> MembershipView:
        """Return who belongs to the job after a meeting; this waits until that is news, but not for ever.

        Args:
            view: who met.
            error: why they have parted, if not by a common decision.
        """
        patience = self.session.job.timeouts
        if error is not None:
            self.replica.progress.interruptions += 1
            left_s = patience.failure_timeout_s + 2 * patience.heartbeat_s
        else:
            left_s = 0.0 if self.is_complete else patience.lease_s
        newer = self.session.wait_view(view.generation, 0.0)
        while newer.generation == view.generation and left_s > 0 and not self.should_stop():
            newer = self.session.wait_view(view.generation, min(left_s, self.config.poll_s))
            left_s -= self.config.poll_s
        return newer

    def _check_can_retry(self, view: MembershipView, attempt: int, error: PeerError | None) -> None:
        """It makes sense to meet once more.

        Raises:
            JobStoppedError: these have tried too often, or the step has been broken off too often.
        """
        progress, budget = self.replica.progress, self.session.job.retry_policy
        if attempt >= MAX_RENDEZVOUS:
            why = error or "somebody wanted to go, and has not gone"
            raise JobStoppedError(f"tried {attempt} times to meet in generation {view.generation}: {why}") from error
        if progress.interruptions > budget.max_preemptions:
            raise JobStoppedError(
                f"step {progress.steps} was broken off {progress.interruptions} times, more than the {budget.max_preemptions} of "
                f"the budget, the last time because {error}"
            ) from error

    # Steps

    def _run_steps(self, workers: WorkerGroup) -> Iterator[WorkerEvent]:
        """Take steps with these workers until all have been taken, or others are to come or to go.

        What everybody knows at the vote on a step is that everybody has taken all steps before it: these are recorded.
        """
        while True:
            step = self.replica.progress.steps
            share = self._compute_share(workers, step)
            has_failed, is_outdated, had = self._agree_on_step(workers, share)
            if workers.fabric.rank == 0:
                self._record_steps(step)
            if self.is_complete:
                return
            if has_failed:
                yield from self._on_step_failure(workers, share)
            else:
                self.replica.apply_step(self._reduce_gradients(workers, share), had, self._lr_factor(step))
                yield from share.events
            if is_outdated:
                return

    def _compute_share(self, workers: WorkerGroup, step: int) -> PartialGradient:
        share = PartialGradient(torch.zeros(len(self.replica.parameters), dtype=torch.float64))
        start, stop = split_batch(self.slices.slices_per_step, len(workers.members))[workers.fabric.rank]
        try:
            for part in range(start, stop) if step < self.num_steps else ():
                self._compute_slice(share, step, part)
        except Exception as error:  # whatever model, loss or dataset raise is the step's failure
            if isinstance(error, CounterpointError) and not isinstance(error, DataError):
                raise
            share.error = error
        return share

    def _compute_slice(self, share: PartialGradient, step: int, part: int) -> None:
        """One part of a step is computed, and belongs to the share."""
        epoch, batch = divmod(step, self.slices.sampler.num_batches)
        number = batch * self.slices.slices_per_step + part
        portion = epoch * self.slices.num_slices + number
        trained = SliceTrained(portion, nan, 0)
        self.replica.optimizer.zero_grad()
        for one in self.slices.read(epoch, number):
            trained = SliceTrained(portion, self._backward(one, portion), one.num_samples)
        flats, had = self.replica.take_gradients()
        if trained.num_samples and not isfinite(trained.loss):
            had.fill_(1.0)  # zeros are meant, not nothing
        for kind, flat in flats.items():
            add_partial_sum(share.partial_sums.setdefault(kind, []), PartialSum(part, 1, flat))
        share.grad_counts += had
        share.events.append(trained)

    def _backward(self, one: Minibatch, portion: int) -> float:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(sample_key(self.config.seed, portion, 0))
            loss = self.loss(self.replica.model(*one.inputs), one.fields[-1])
            value = float(loss.detach())
            if check_finite_loss(value, portion, self.config):
                (loss * one.loss_weight).backward()  # type: ignore[no-untyped-call]
        return value

    def _agree_on_step(self, workers: WorkerGroup, share: PartialGradient) -> tuple[bool, bool, Tensor]:
        """Return whether anybody has failed, whether anybody knows that others are to come or to go, and all `had`."""
        mine = torch.tensor([share.error is not None, self.should_stop() or workers.is_outdated], dtype=torch.float64)
        vote = torch.cat([mine, share.grad_counts])
        workers.wait(workers.fabric.all_reduce("vote", vote, workers.ranks))
        return bool(vote[0]), bool(vote[1]), vote[2:]

    def _reduce_gradients(self, workers: WorkerGroup, share: PartialGradient) -> FlatGradients:
        num_parts = self.slices.slices_per_step
        return {
            kind: tree_all_reduce(workers, share.partial_sums.get(kind, ()), num_parts, length, kind)
            for kind, length in self.replica.numel_by_dtype.items()
        }

    def _lr_factor(self, step: int) -> float:
        return 1.0 if self.config.schedule is None else self.config.schedule(step)

    def _on_step_failure(self, workers: WorkerGroup, share: PartialGradient) -> Iterator[WorkerEvent]:
        """A step that somebody could not compute is computed again, as often as the budget allows.

        Raises:
            JobStoppedError: it was too often.
        """
        progress, budget = self.replica.progress, self.session.job.retry_policy
        progress.failures += 1
        mine = "" if share.error is None else f"{type(share.error).__name__}: {share.error}"
        if mine:
            yield TaskEnded(self._step_task(progress.steps, progress.failures - 1), "failed", mine)
        told = workers.fabric.gather_values("failures", mine, workers.ranks)
        texts = [f"{member.name}: {text}" for member, text in zip(workers.members, told, strict=True) if text]
        if progress.failures > budget.max_failures:
            raise JobStoppedError(
                f"step {progress.steps} failed {progress.failures} times, more than the {budget.max_failures} of the "
                f"budget: {'; '.join(texts)}; data is never left out, so the job stops: mend what fails, or give "
                "Budget more"
            ) from share.error

    # What the coordinator knows

    def _step_task(self, step: int, attempt: int) -> DataTask:
        epoch, batch = divmod(step, self.slices.sampler.num_batches)
        return DataTask(epoch, batch * self.slices.slices_per_step, (batch + 1) * self.slices.slices_per_step, attempt)

    def _num_recorded_steps(self) -> int:
        """Return how many steps the coordinator knows of, by the task that comes next, which this worker has then.

        Raises:
            JobStoppedError: the coordinator gives none.
        """
        if self._task is None and not self._is_recorded:
            try:
                task = self.session.lease(self.session.job.timeouts.lease_s)
            except PeerError as error:
                raise JobStoppedError(str(error)) from error
            if isinstance(task, NoTaskYet):
                raise JobStoppedError(f"{self.session.name} is the oldest worker, but another one has the next step")
            self._task, self._is_recorded = task, task is None
        if self._task is None:
            return self.num_steps
        return self._task.epoch * self.slices.sampler.num_batches + self._task.start // self.slices.slices_per_step

    def _record_steps(self, step: int) -> None:
        """The coordinator has written down that so many steps have been taken, and they are saved where that is due."""
        num_batches, per_step = self.slices.sampler.num_batches, self.slices.slices_per_step
        while self._task is not None and self._task.epoch * num_batches + -(-self._task.stop // per_step) <= step:
            self.session.report(self._task, "done")
            self._task = None
            self._num_recorded_steps()
        every = -(-self.config.checkpoint_every_slices // per_step)
        if step and every and step % every == 0:
            self.replica.save()
