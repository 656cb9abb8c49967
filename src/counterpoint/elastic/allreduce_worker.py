"""Elastic training without servers: all current workers take the same steps together by allreduce.

The coordinator decides, by generations, which workers belong to the job. The workers of a generation rendezvous and sum
the gradients that each has computed of a batch. When one leaves, dies or joins, all abandon the group, rendezvous in
the next generation, and continue from the replica with the most steps. Replicas differ by at most one step, because a
step needs the gradients of all workers.

The sum of the slices of a batch is bitwise independent of the number of workers: it is a binary tree over the slices. A
worker's contiguous slices form whole subtrees ``(start, size)``; the worker that sums a range of the gradient receives
all subtrees and finishes the tree::

    slices      0   1   2   3   4   5   6
                +-+-+   +-+-+   +-+-+   |       worker 0, slices 0 to 2: (0, 2) (2, 1)
                  +---+---+       +--+--+       worker 1, slices 3 to 6: (3, 1) (4, 2) (6, 1)
                      +-------+------+
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

MAX_RENDEZVOUS = 3
"""Rendezvous attempts in one generation."""


class AllReduceWorker:
    """One incarnation of a worker of a job without servers.

    Args:
        replica: its model replica.
        session: of the worker.
        slices: the data.
        loss: from the model's output and the targets to the mean loss.
        config: options of the worker.
        should_stop: polled once per step; when it holds, the worker leaves before the next one.
        transport: see :func:`counterpoint.fabric.rendezvous.connect`.

    Raises:
        PlanError: the data is not the job's, or checkpoints have no folder.
        CheckpointError: the replica is a checkpoint of training on other data.
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
                f"checkpoint_every_slices={self.config.checkpoint_every_slices} needs a folder, since no server holds "
                "the weights; give train(..., folder=Path('checkpoints')), or 0"
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
        """Train and yield events until all steps have been taken or the worker should stop.

        Raises:
            PeerError: the job continues without this worker, or cannot continue.
        """
        view, attempt = self.session.view, 0
        while not self.should_stop():
            error: PeerError | None = None
            try:
                with form_group(
                    self.session, view, attempt, should_stop=self.should_stop, transport=self.transport
                ) as group:
                    num_recorded = self._num_recorded_steps() if group.fabric.rank == 0 else 0
                    broadcast_state(self.replica, group, num_recorded)
                    yield GroupFormed(
                        group.generation, tuple(member.name for member in group.members), self.replica.progress.steps
                    )
                    yield from self._run_steps(group)
            except JobStoppedError:
                raise
            except PeerError as found:
                error = found
            new_view = self._wait_new_view(view, error)
            is_over = error is None and self.is_complete and set(new_view.workers) <= set(view.workers)
            if is_over or self.should_stop():
                break
            attempt = attempt + 1 if new_view.generation == view.generation else 0
            self._check_can_retry(new_view, attempt, error)
            view = new_view
        self._leave()

    def run(self) -> list[WorkerEvent]:
        """Train until all steps have been taken or the worker should stop; return the events."""
        return list(self.events())

    def _leave(self) -> None:
        """Leave the job; save the replica first if no other worker is left."""
        self.has_left = not self.is_complete
        if self.has_left and len(self.session.view.workers) == 1:
            self.replica.save()
        self.session.leave()

    def _wait_new_view(self, view: MembershipView, error: PeerError | None) -> MembershipView:
        """Return the view after a group has ended, waiting a limited time for a new generation.

        Args:
            view: of the group.
            error: why it ended, unless by agreement.
        """
        timeouts = self.session.job.timeouts
        if error is not None:
            self.replica.progress.count_interruption()
            left_s = timeouts.failure_timeout_s + 2 * timeouts.heartbeat_s
        else:
            left_s = 0.0 if self.is_complete else timeouts.lease_s
        new_view = self.session.wait_view(view.generation, 0.0)
        while new_view.generation == view.generation and left_s > 0 and not self.should_stop():
            new_view = self.session.wait_view(view.generation, min(left_s, self.config.poll_s))
            left_s -= self.config.poll_s
        return new_view

    def _check_can_retry(self, view: MembershipView, attempt: int, error: PeerError | None) -> None:
        """Raise JobStoppedError if there were too many rendezvous attempts or interruptions of this step."""
        progress, retry_policy = self.replica.progress, self.session.job.retry_policy
        if attempt >= MAX_RENDEZVOUS:
            reason = error or "a worker announced that it leaves, but has not left"
            raise JobStoppedError(
                f"{attempt} rendezvous attempts failed in generation {view.generation}: {reason}"
            ) from error
        if progress.interruptions > retry_policy.max_preemptions:
            raise JobStoppedError(
                f"step {progress.steps} was interrupted {progress.interruptions} times, more than the "
                f"{retry_policy.max_preemptions} of the retry policy, the last time because {error}"
            ) from error

    # Steps

    def _run_steps(self, workers: WorkerGroup) -> Iterator[WorkerEvent]:
        """Take steps with these workers until all have been taken, or the membership changes.

        When a worker agrees on a step, it has taken all earlier steps; these are recorded with the coordinator.
        """
        while True:
            step = self.replica.progress.steps
            partial = self._compute_share(workers, step)
            has_failed, is_outdated, grad_counts = self._agree_on_step(workers, partial)
            if workers.fabric.rank == 0:
                self._record_steps(step)
            if self.is_complete:
                return
            if has_failed:
                yield from self._on_step_failure(workers, partial)
            else:
                self.replica.apply_step(self._reduce_gradients(workers, partial), grad_counts, self._lr_factor(step))
                yield from partial.events
            if is_outdated:
                return

    def _compute_share(self, workers: WorkerGroup, step: int) -> PartialGradient:
        partial = PartialGradient(torch.zeros(len(self.replica.parameters), dtype=torch.float64))
        start, stop = split_batch(self.slices.slices_per_step, len(workers.members))[workers.fabric.rank]
        try:
            for slice_in_step in range(start, stop) if step < self.num_steps else ():
                self._compute_slice(partial, step, slice_in_step)
        except Exception as error:  # whatever model, loss or dataset raise is the step's failure
            if isinstance(error, CounterpointError) and not isinstance(error, DataError):
                raise
            partial.error = error
        return partial

    def _compute_slice(self, partial: PartialGradient, step: int, slice_in_step: int) -> None:
        """Compute one slice of a step, and add it to the partial gradient."""
        epoch, batch = divmod(step, self.slices.sampler.num_batches)
        number = batch * self.slices.slices_per_step + slice_in_step
        slice_index = epoch * self.slices.num_slices + number
        trained = SliceTrained(slice_index, nan, 0)
        self.replica.optimizer.zero_grad()
        for minibatch in self.slices.read(epoch, number):
            trained = SliceTrained(slice_index, self._backward(minibatch, slice_index), minibatch.num_samples)
        nonfinite = self.replica.find_nonfinite_grad()
        if nonfinite and self.config.nonfinite == "error":
            raise DataError(
                f"the gradient of {nonfinite} in slice {slice_index} is not finite; check its samples, use a smaller "
                "learning rate, or give nonfinite='skip' to count it as zeros"
            )
        gradients, has_grad = self.replica.take_gradients()
        if nonfinite:
            gradients = {dtype: torch.zeros_like(gradient) for dtype, gradient in gradients.items()}
        if trained.num_samples and not isfinite(trained.loss):
            has_grad.fill_(1.0)  # a skipped slice counts as a gradient of zeros
        for dtype, gradient in gradients.items():
            add_partial_sum(partial.partial_sums.setdefault(dtype, []), PartialSum(slice_in_step, 1, gradient))
        partial.grad_counts += has_grad
        partial.events.append(trained)

    def _backward(self, minibatch: Minibatch, slice_index: int) -> float:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(sample_key(self.config.seed, slice_index, 0))
            loss = self.loss(self.replica.model(*minibatch.inputs), minibatch.fields[-1])
            value = float(loss.detach())
            if check_finite_loss(value, slice_index, self.config):
                (loss * minibatch.loss_factor).backward()  # type: ignore[no-untyped-call]
        return value

    def _agree_on_step(self, workers: WorkerGroup, partial: PartialGradient) -> tuple[bool, bool, Tensor]:
        """Return whether any worker failed, whether any saw a membership change, and the summed gradient counts."""
        flags = torch.tensor(
            [partial.error is not None, self.should_stop() or workers.is_outdated], dtype=torch.float64
        )
        agreed = torch.cat([flags, partial.grad_counts])
        workers.wait(workers.fabric.all_reduce("agreement", agreed, workers.ranks))
        return bool(agreed[0]), bool(agreed[1]), agreed[2:]

    def _reduce_gradients(self, workers: WorkerGroup, partial: PartialGradient) -> FlatGradients:
        num_parts = self.slices.slices_per_step
        return {
            dtype: tree_all_reduce(workers, partial.partial_sums.get(dtype, ()), num_parts, length, dtype)
            for dtype, length in self.replica.numel_by_dtype.items()
        }

    def _lr_factor(self, step: int) -> float:
        return 1.0 if self.config.schedule is None else self.config.schedule(step)

    def _on_step_failure(self, workers: WorkerGroup, partial: PartialGradient) -> Iterator[WorkerEvent]:
        """Record a failed step, which is then repeated.

        Raises:
            JobStoppedError: it has failed too often.
        """
        progress, retry_policy = self.replica.progress, self.session.job.retry_policy
        progress.count_failure()
        own_error = "" if partial.error is None else f"{type(partial.error).__name__}: {partial.error}"
        if own_error:
            yield TaskEnded(self._step_task(progress.steps, progress.failures - 1), "failed", own_error)
        errors = workers.fabric.gather_values("failures", own_error, workers.ranks)
        texts = [f"{member.name}: {text}" for member, text in zip(workers.members, errors, strict=True) if text]
        if progress.failures > retry_policy.max_failures:
            raise JobStoppedError(
                f"step {progress.steps} failed {progress.failures} times, more than the {retry_policy.max_failures} of "
                f"the retry policy: {'; '.join(texts)}; data is never skipped, so the job stops: fix the failure, or "
                "raise max_failures"
            ) from partial.error

    # Recording with the coordinator

    def _step_task(self, step: int, attempt: int) -> DataTask:
        epoch, batch = divmod(step, self.slices.sampler.num_batches)
        return DataTask(epoch, batch * self.slices.slices_per_step, (batch + 1) * self.slices.slices_per_step, attempt)

    def _num_recorded_steps(self) -> int:
        """Return how many steps the coordinator has recorded, by the next task, which is then leased to this worker.

        Raises:
            JobStoppedError: the coordinator assigns none.
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
        """Report the steps taken to the coordinator, and save a checkpoint if one is due."""
        num_batches, per_step = self.slices.sampler.num_batches, self.slices.slices_per_step
        while self._task is not None and self._task.epoch * num_batches + -(-self._task.stop // per_step) <= step:
            self.session.report(self._task, "done")
            self._task = None
            self._num_recorded_steps()
        steps_per_checkpoint = -(-self.config.checkpoint_every_slices // per_step)
        if step and steps_per_checkpoint and step % steps_per_checkpoint == 0:
            self.replica.save()


@dataclass(slots=True)
class PartialGradient:
    """What one worker has computed of a step.

    Attributes:
        grad_counts: for each parameter, how many of its slices had a gradient.
        partial_sums: sums of the gradients of its slices, by dtype.
        events: its slices.
        error: why it is incomplete.
    """

    grad_counts: Tensor
    partial_sums: dict[torch.dtype, list[PartialSum]] = field(default_factory=dict)
    events: list[SliceTrained] = field(default_factory=list)
    error: Exception | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PartialSum:
    """Sum of adjacent slices: a subtree.

    Args:
        start: first slice, a multiple of ``size``.
        size: number of slices, a power of two.
        value: their sum; may be modified in place.
    """

    start: int
    size: int
    value: Tensor


def add_partial_sum(partial_sums: list[PartialSum], partial_sum: PartialSum) -> None:
    """Append a subtree; two halves of a larger subtree are merged.

    Args:
        partial_sums: earlier ones, adjacent and in order.
        partial_sum: the next one.

    Example:
        >>> partial_sums = []
        >>> for part in range(7):
        ...     add_partial_sum(partial_sums, PartialSum(part, 1, torch.tensor([2.0**part])))
        >>> [(partial.start, partial.size, float(partial.value)) for partial in partial_sums]
        [(0, 4, 15.0), (4, 2, 48.0), (6, 1, 64.0)]
    """
    while (
        partial_sums
        and partial_sums[-1].size == partial_sum.size
        and partial_sums[-1].start % (2 * partial_sum.size) == 0
    ):
        other = partial_sums.pop()
        partial_sum = PartialSum(other.start, 2 * partial_sum.size, other.value.add_(partial_sum.value))
    partial_sums.append(partial_sum)


def finish_sum(partial_sums: Sequence[PartialSum]) -> Tensor:
    """Return the sum of all slices, combining the remaining subtrees from the right."""
    value = partial_sums[-1].value
    for tree in reversed(partial_sums[:-1]):
        value = tree.value.add_(value)
    return value


def aligned_ranges(start: int, stop: int) -> list[tuple[int, int]]:
    """Return start and size of the subtrees that a run of slices becomes.

    Example:
        >>> aligned_ranges(3, 7)
        [(3, 1), (4, 2), (6, 1)]
    """
    ranges = []
    while start < stop:
        size = 1
        while start % (2 * size) == 0 and start + 2 * size <= stop:
            size *= 2
        ranges.append((start, size))
        start += size
    return ranges


def tree_all_reduce(
    workers: WorkerGroup, partial_sums: Sequence[PartialSum], num_parts: int, length: int, dtype: torch.dtype
) -> Tensor:
    """Return the sum over all slices of a batch, of which each member has a contiguous run, as even as possible.

    Each member sums one range of the gradient and sends the result to the others.

    Args:
        workers: the members.
        partial_sums: subtrees of this member's run; modified in place.
        num_parts: slices of all members.
        length: of the gradient, a flat tensor.
        dtype: of the sum.

    Cost:
        with one slice per member, each sends ``2 (n - 1) / n`` of the gradient, as a ring does; with more, the first
        half of that once per subtree of a run, of which there are at most ``2 log2(slices)``.
    """
    fabric = workers.fabric
    count, label = fabric.num_ranks, f"gradients in {dtype_name(dtype)}"
    if count == 1:
        return finish_sum(partial_sums)
    bounds = [length * member // count for member in range(count + 1)]
    ranges = list(pairwise(bounds))
    runs = [aligned_ranges(*run) for run in split_batch(num_parts, count)]
    counts = [[len(run) * (stop - start) for start, stop in ranges] for run in runs]
    chunks = [tree.value[start:stop] for start, stop in ranges for tree in partial_sums]
    send_buffer = torch.cat(chunks) if chunks else torch.empty(0, dtype=dtype)
    received, work = fabric.all_to_all(label, send_buffer, counts, workers.ranks)
    workers.wait(work)
    low, high = ranges[fabric.rank]
    received_sums: list[PartialSum] = []
    for index, (start, size) in enumerate(chain.from_iterable(runs)):
        add_partial_sum(
            received_sums, PartialSum(start, size, received[index * (high - low) : (index + 1) * (high - low)])
        )
    gradient = torch.empty(length, dtype=dtype)
    gradient[low:high] = finish_sum(received_sums)
    workers.wait(fabric.all_gather(label, gradient, bounds, workers.ranks))
    return gradient
