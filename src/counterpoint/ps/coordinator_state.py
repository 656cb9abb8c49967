"""State of the coordinator, a pure function of its log: members, shard replicas, the task queue and snapshots.

Replicas of one shard (``p`` primary, ``b`` backup, ``f`` former replica)::

    p=A b=B ready --B times out--> p=A b=C f=B, not ready --C has a full copy--> p=A b=C ready
                  --A times out--> p=B b=C f=A, not ready --C has a full copy--> p=B b=C ready

While the backup is not ready, no request is served, so the copy of the former replica stays as recent as the primary's,
and either may become the primary. A shard's last complete copy is never dropped before another one exists.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, assert_never

from msgspec.structs import replace

from counterpoint.ps.job_config import DataConfig, JobConfig, RetryPolicy
from counterpoint.ps.messages import (
    Ack,
    CheckpointReply,
    DataTask,
    JobMember,
    MembershipView,
    ShardReplicas,
    TaskOutcome,
    TaskReply,
)
from counterpoint.ps.write_ahead_log import (
    CheckpointRequested,
    CoordinatorRecord,
    JobLost,
    JobResumed,
    LeaseExpired,
    MemberJoined,
    MemberLeft,
    ReplicasAssigned,
    ShardSaved,
    SnapshotQuiesced,
    TaskAssigned,
    TaskReported,
)


def assign_replicas(replicas: ShardReplicas, load: Mapping[str, int]) -> ShardReplicas:
    """Return the replicas that a shard should have.

    Args:
        replicas: current ones.
        load: servers that are alive, with the number of shards that each holds.

    Example:
        >>> assign_replicas(ShardReplicas("a", "b", is_backup_ready=True), {"b": 2, "c": 0})
        ShardReplicas(primary='b', backup='c', is_backup_ready=False, former_replica='a')
        >>> assign_replicas(ShardReplicas("b", "c", former_replica="a"), {"a": 1, "c": 1})
        ShardReplicas(primary='a', backup='c', is_backup_ready=False, former_replica='b')
    """
    if replicas.is_backup_ready:
        return _replace_silent_replica(replicas, load)
    primary, former = replicas.primary, replicas.former_replica
    if primary not in load and former in load:
        primary, former = former, primary
    backup = replicas.backup if replicas.backup in load and replicas.backup != primary else ""
    backup = backup or least_loaded_server(load, primary, former) or least_loaded_server(load, primary)
    return ShardReplicas(primary, backup, is_backup_ready=False, former_replica=former)


def _replace_silent_replica(replicas: ShardReplicas, load: Mapping[str, int]) -> ShardReplicas:
    pair = (replicas.primary, replicas.backup)
    staying = [name for name in pair if name in load]
    backup = least_loaded_server(load, *pair)
    if not replicas.backup or len(staying) != 1 or not backup:
        return replicas
    (silent,) = set(pair) - set(staying)
    return ShardReplicas(staying[0], backup, is_backup_ready=False, former_replica=silent)


def remove_replica(replicas: ShardReplicas, name: str) -> ShardReplicas | None:
    """Return the replicas of a shard after one server's copy is lost; None if that was the last one."""
    if name == replicas.primary:
        successor = replicas.backup if replicas.is_backup_ready else replicas.former_replica
        return ShardReplicas(successor) if successor else None
    if name == replicas.backup:
        former = "" if replicas.former_replica == name else replicas.former_replica
        return ShardReplicas(replicas.primary, former_replica=former)
    if name == replicas.former_replica:
        return ShardReplicas(replicas.primary, replicas.backup, replicas.is_backup_ready)
    return replicas


def least_loaded_server(load: Mapping[str, int], *excluded: str) -> str:
    """Return the server with the fewest shards that is not excluded; empty if there is none."""
    return min((name for name in load if name not in excluded), key=lambda name: (load[name], name), default="")


TaskKey: TypeAlias = tuple[int, int]
"""Epoch and first slice, which identify a task over all of its attempts."""


@dataclass(frozen=True, slots=True)
class TaskCompletion:
    """The attempt that first reported a task as done, and the newest version that its pushes produced."""

    attempt: int
    version: int


class TaskQueue:
    """Tasks of all epochs, one epoch after the other.

    Args:
        data: slices and tasks.
        retry_policy: how often a task may be retried.

    Example:
        >>> queue = TaskQueue(DataConfig(num_slices=3, num_epochs=1, slices_per_task=2), RetryPolicy())
        >>> first = queue.assign("worker-0")
        >>> first
        DataTask(epoch=0, start=0, stop=2, attempt=0)
        >>> queue.finish(first, "preempted", 0, "")
        >>> queue.next_task()
        DataTask(epoch=0, start=0, stop=2, attempt=1)
    """

    def __init__(self, data: DataConfig, retry_policy: RetryPolicy) -> None:
        self.data, self.retry_policy = data, retry_policy
        self.epoch = 0
        self.todo: deque[DataTask] = deque()
        self.doing: dict[TaskKey, tuple[DataTask, str]] = {}
        self.done: dict[TaskKey, TaskCompletion] = {}
        self.failures: dict[TaskKey, int] = {}
        self.preemptions: dict[TaskKey, int] = {}
        self.stop_reason = ""
        self._enqueue_epoch()

    def _enqueue_epoch(self) -> None:
        if self.epoch < self.data.num_epochs:
            starts = range(0, self.data.num_slices, self.data.slices_per_task)
            last = self.data.num_slices
            self.todo.extend(
                DataTask(self.epoch, start, min(last, start + self.data.slices_per_task)) for start in starts
            )

    @property
    def is_finished(self) -> bool:
        """Whether all tasks are done."""
        return not self.todo and not self.doing

    @property
    def is_quiesced(self) -> bool:
        """Whether no task has been started without being done."""
        return not self.doing and not any(task.attempt for task in self.todo)

    def next_task(self, *, retries_only: bool = False) -> DataTask | Literal["later"] | None:
        """Return the next task; ``later`` if none may be started now, None if all are done.

        Args:
            retries_only: skip tasks that have never been started.
        """
        if self.is_finished:
            return None
        if not self.todo or (retries_only and not self.todo[0].attempt):
            return "later"
        task = self.todo[0]
        if self.data.slices_per_step and self._step(task) > self._first_open_step():
            return "later"
        return task

    def _step(self, task: DataTask) -> int:
        return (task.epoch * self.data.num_slices + task.start) // self.data.slices_per_step

    def _first_open_step(self) -> int:
        open_tasks = [task for task, _ in self.doing.values()]
        return min(self._step(task) for task in (*open_tasks, self.todo[0]))

    def assign(self, worker: str) -> DataTask | None:
        """Assign the next task to a worker and return it; None if there is none."""
        if not self.todo:
            return None
        task = self.todo.popleft()
        self.doing[task.epoch, task.start] = (task, worker)
        return task

    def finish(self, task: DataTask, outcome: TaskOutcome, version: int, text: str) -> None:
        """Mark a task as done, or queue it again; a task that is done stays done.

        Args:
            task: which.
            outcome: done, failed or preempted.
            version: newest version that its pushes produced.
            text: error message, if it failed.
        """
        key = task.epoch, task.start
        if key in self.done or task.stop != min(self.data.num_slices, task.start + self.data.slices_per_task):
            return
        if outcome == "done":
            if self.doing.pop(key, None) is None:
                self.todo = deque(task_left for task_left in self.todo if (task_left.epoch, task_left.start) != key)
            self.done[key] = TaskCompletion(task.attempt, version)
            if not self.todo and not self.doing:
                self.epoch += 1
                self._enqueue_epoch()
        elif self.doing.get(key, (None,))[0] == task:
            self._requeue(task, outcome, text)

    def _requeue(self, task: DataTask, outcome: TaskOutcome, text: str) -> None:
        key = task.epoch, task.start
        del self.doing[key]
        self.todo.appendleft(replace(task, attempt=task.attempt + 1))
        counts, limit = (
            (self.failures, self.retry_policy.max_failures)
            if outcome == "failed"
            else (self.preemptions, self.retry_policy.max_preemptions)
        )
        counts[key] = counts.get(key, 0) + 1
        if counts[key] > limit:
            self.stop_reason = (
                f"slices {task.start} to {task.stop} of epoch {task.epoch} were {outcome} {counts[key]} times, more "
                f"than the {limit} of the retry policy{': ' if text else ''}{text}; data is never skipped, so the job "
                "stops: fix the failure, or raise the limit, and restart from the last checkpoint"
            )

    def reclaim(self, worker: str) -> None:
        """Queue again all unfinished tasks of a worker."""
        for task, owner in list(self.doing.values()):
            if owner == worker:
                self._requeue(task, "preempted", f"{worker} left or timed out")


CoordinatorReply: TypeAlias = Ack | TaskReply | CheckpointReply


@dataclass(slots=True)
class MemberState:
    """A member, and the last reply to it."""

    joined: MemberJoined
    next_sequence: int = 0
    reply: CoordinatorReply | None = None


@dataclass(slots=True)
class SnapshotState:
    """The snapshot in progress: its number, and the journal position of each shard saved so far."""

    number: int
    is_quiesced: bool = False
    positions: dict[int, int] = field(default_factory=dict)


class CoordinatorState:
    """The coordinator's state after the records of its log.

    Args:
        job: configuration.
        records: the log so far.
    """

    def __init__(self, job: JobConfig, records: Sequence[CoordinatorRecord] = ()) -> None:
        self.job = job
        self.generation = 0
        self.incarnation = 0
        self.members: dict[str, MemberState] = {}
        self.replicas: list[ShardReplicas] = []
        self.tasks = TaskQueue(job.data, job.retry_policy)
        self.snapshot: SnapshotState | None = None
        self.snapshots: dict[int, dict[int, int]] = {}
        self.loss_reason = ""
        for record in records:
            self.apply(record)

    def member_names(self, role: str) -> list[str]:
        """Return the sorted names of all workers or all servers."""
        return sorted(name for name, member in self.members.items() if member.joined.role == role)

    @property
    def view(self) -> MembershipView:
        """Current members and shard replicas."""
        return MembershipView(
            self.generation, self._members_of_role("worker"), self._members_of_role("server"), tuple(self.replicas)
        )

    def _members_of_role(self, role: str) -> tuple[JobMember, ...]:
        joins = (self.members[name].joined for name in self.member_names(role))
        return tuple(JobMember(joined.name, joined.incarnation, joined.address) for joined in joins)

    def apply(self, record: CoordinatorRecord) -> None:
        """Apply one log record."""
        match record:
            case MemberJoined():
                self._join(record)
            case MemberLeft():
                self._leave(record.name)
            case ReplicasAssigned():
                self.generation += 1
                self.replicas[record.shard] = record.replicas
            case TaskAssigned():
                task = self.tasks.assign(record.worker) if record.task else None
                self._reply(record.worker, TaskReply(record.sequence, task))
            case TaskReported():
                self.tasks.finish(record.task, record.outcome, record.version, record.text)
                self._reply(record.worker, Ack(-1, record.sequence))
            case LeaseExpired():
                self.tasks.finish(record.task, "preempted", 0, "its lease expired")
            case CheckpointRequested():
                self.snapshot = self.snapshot or SnapshotState(len(self.snapshots))
                self._reply(record.worker, CheckpointReply(record.sequence, self.snapshot.number))
            case SnapshotQuiesced() | ShardSaved():
                self._advance_snapshot(record)
            case JobLost() | JobResumed():
                self._reset(record)
            case _:
                assert_never(record)

    def _reply(self, worker: str, reply: CoordinatorReply) -> None:
        member = self.members.get(worker)
        if member is not None:
            member.next_sequence, member.reply = reply.sequence + 1, reply

    def _advance_snapshot(self, record: SnapshotQuiesced | ShardSaved) -> None:
        if self.snapshot is None or self.snapshot.number != record.snapshot:
            return
        if isinstance(record, SnapshotQuiesced):
            self.snapshot.is_quiesced = True
            return
        self.snapshot.positions[record.shard] = record.position
        if len(self.snapshot.positions) == self.job.num_shards:
            self.snapshots[record.snapshot] = self.snapshot.positions
            self.snapshot = None

    def _join(self, record: MemberJoined) -> None:
        self.generation += 1
        self.incarnation = record.incarnation
        self.members[record.name] = MemberState(record)
        if record.role == "worker":
            return
        servers = self.member_names("server")
        if not self.replicas and len(servers) == self.job.num_servers:
            backups = servers[1:] + servers[:1] if self.job.is_replicated else servers
            self.replicas = [
                ShardReplicas(primary, backup if backup != primary else "", is_backup_ready=True)
                for primary, backup in zip(servers, backups, strict=True)
            ]

    def _leave(self, name: str) -> None:
        self.generation += 1
        self.members.pop(name, None)
        self.tasks.reclaim(name)
        if self.job.num_servers > 1:
            self.replicas = [remove_replica(replicas, name) or replicas for replicas in self.replicas]

    def _reset(self, record: JobLost | JobResumed) -> None:
        if isinstance(record, JobLost):
            self.loss_reason = record.text
            return
        self.generation = max(self.generation, record.generation) + 1
        self.incarnation = max(self.incarnation, record.incarnation)
        self.members.clear()
        self.replicas.clear()
        self.snapshot, self.loss_reason = None, ""

    @property
    def has_lost_weights(self) -> bool:
        """Whether the weights are lost: no servers, and the last worker left before all data was processed."""
        has_started = bool(self.tasks.done) and not self.tasks.is_finished
        return not self.job.num_servers and not self.members and has_started and not self.loss_reason

    def shards_per_server(self, silent_members: set[str]) -> dict[str, int]:
        """Return how many shards each server holds, without the silent ones."""
        holders = [name for replicas in self.replicas for name in (replicas.primary, replicas.backup)]
        return {name: holders.count(name) for name in self.member_names("server") if name not in silent_members}

    def may_hold_last_copy(self, name: str) -> bool:
        """Tell whether a silent member may hold the only copy of some data, so that the job must wait for it."""
        if self.job.num_servers == 1 and self.job.is_logged:
            return False
        return any(name in {replicas.primary, replicas.backup, replicas.former_replica} for replicas in self.replicas)

    def holds_last_copy(self, name: str) -> bool:
        """Tell whether some shard has no other complete copy."""
        is_only_in_memory = self.job.num_servers > 1 or not self.job.is_logged
        return is_only_in_memory and any(remove_replica(replicas, name) is None for replicas in self.replicas)
