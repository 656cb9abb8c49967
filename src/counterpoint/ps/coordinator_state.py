"""Who keeps a shard when somebody falls silent: never is the last complete copy given up before another one is made.

What two servers keep *completely* is all that anybody has been told. When one of the two falls silent, the other goes
on with a new backup, and the silent one is remembered as ``former``: until the new backup is complete, nothing changes,
so its copy is as good as the other's, and either may lead.

The data that is left to do: tasks are given, taken back and done, and none is ever left out.

All that the coordinator knows for sure: the fold of its log.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, assert_never

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
    """Return who is to keep a shard.

    Args:
        keepers: who does.
        heard: the servers that are not silent, with the shards that each keeps.

    Example:
        >>> staffed(Keepers("a", "b", is_complete=True), {"b": 2, "c": 0})
        Keepers(primary='b', backup='c', is_complete=False, former='a')
        >>> staffed(Keepers("b", "c", former="a"), {"a": 1, "c": 1})
        Keepers(primary='a', backup='c', is_complete=False, former='b')
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
    """Return who keeps a shard when the copy of one server is gone for good; None where that was the last one."""
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
    """Return the server with the fewest shards that is none of the others; empty where there is none."""
    return min((name for name in load if name not in excluded), key=lambda name: (load[name], name), default="")


TaskKey: TypeAlias = tuple[int, int]
"""Epoch and first portion: what a task is, however often it is begun."""


@dataclass(frozen=True, slots=True)
class TaskCompletion:
    """How a task was done: the attempt that said so first, and the newest version its pushes made."""

    attempt: int
    version: int


class TaskQueue:
    """Tasks of all epochs, one epoch after the other.

    Args:
        work: what there is to do.
        budget: how often a task may go wrong.

    Example:
        >>> queue = Queue(Work(num_portions=3, num_epochs=1, task_portions=2), Budget())
        >>> first = queue.give("worker-0")
        >>> first
        Task(epoch=0, start=0, stop=2, attempt=0)
        >>> queue.end(first, "preempted", 0, "")
        >>> queue.upcoming()
        Task(epoch=0, start=0, stop=2, attempt=1)
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
            self.todo.extend(DataTask(self.epoch, at, min(last, at + self.data.slices_per_task)) for at in starts)

    @property
    def is_finished(self) -> bool:
        """Whether everything has been done."""
        return not self.todo and not self.doing

    @property
    def is_quiesced(self) -> bool:
        """Whether no task has been begun without being done."""
        return not self.doing and not any(task.attempt for task in self.todo)

    def next_task(self, *, retries_only: bool = False) -> DataTask | Literal["later"] | None:
        """Return the next task; ``later`` where one has to wait, None where all is done.

        Args:
            begun_only: pass over tasks that have never been begun.
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
        """Return the first step that is not done."""
        open_tasks = [task for task, _ in self.doing.values()]
        return min(self._step(task) for task in (*open_tasks, self.todo[0]))

    def assign(self, worker: str) -> DataTask | None:
        """The next task is this worker's; returns it, or None where there is none."""
        if not self.todo:
            return None
        task = self.todo.popleft()
        self.doing[task.epoch, task.start] = (task, worker)
        return task

    def finish(self, task: DataTask, outcome: TaskOutcome, version: int, text: str) -> None:
        """The task is done, or to be given again; what is done already stays so.

        Args:
            task: which.
            outcome: done, failed or preempted.
            version: the newest that its pushes made.
            text: why, if it failed.
        """
        place = task.epoch, task.start
        if place in self.done or task.stop != min(self.data.num_slices, task.start + self.data.slices_per_task):
            return
        if outcome == "done":
            if self.doing.pop(place, None) is None:
                self.todo = deque(one for one in self.todo if (one.epoch, one.start) != place)
            self.done[place] = TaskCompletion(task.attempt, version)
            if not self.todo and not self.doing:
                self.epoch += 1
                self._enqueue_epoch()
        elif self.doing.get(place, (None,))[0] == task:
            self._requeue(task, outcome, text)

    def _requeue(self, task: DataTask, outcome: TaskOutcome, text: str) -> None:
        place = task.epoch, task.start
        del self.doing[place]
        self.todo.appendleft(replace(task, attempt=task.attempt + 1))
        counts, most = (
            (self.failures, self.retry_policy.max_failures)
            if outcome == "failed"
            else (self.preemptions, self.retry_policy.max_preemptions)
        )
        counts[place] = counts.get(place, 0) + 1
        if counts[place] > most:
            self.stop_reason = (
                f"portions {task.start} to {task.stop} of epoch {task.epoch} were {outcome} {counts[place]} times, "
                f"more than the {most} of the budget{': ' if text else ''}{text}; data is never left out, so the job "
                "stops: mend what fails, or give Budget more, and go on from the last checkpoint"
            )

    def reclaim(self, worker: str) -> None:
        """What this worker has not done is to be given again."""
        for task, owner in list(self.doing.values()):
            if owner == worker:
                self._requeue(task, "preempted", f"{worker} is gone")


CoordinatorReply: TypeAlias = Ack | TaskReply | CheckpointReply


@dataclass(slots=True)
class MemberState:
    """A member, and the last answer to it."""

    joined: MemberJoined
    next_sequence: int = 0
    reply: CoordinatorReply | None = None


@dataclass(slots=True)
class SnapshotState:
    """The cut that is being made: asked for, drained, saved so far by shard."""

    number: int
    is_quiesced: bool = False
    positions: dict[int, int] = field(default_factory=dict)


class CoordinatorState:
    """Members, generations, keepers of shards, tasks and cuts.

    Args:
        job: what all agree on.
        lines: the log so far.
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
        for line in records:
            self.apply(line)

    def member_names(self, role: str) -> list[str]:
        """Return the names of the workers or of the servers, in order."""
        return sorted(name for name, life in self.members.items() if life.joined.role == role)

    @property
    def view(self) -> MembershipView:
        """Who belongs to the job, and who keeps what."""
        return MembershipView(
            self.generation, self._members_of_role("worker"), self._members_of_role("server"), tuple(self.replicas)
        )

    def _members_of_role(self, role: str) -> tuple[JobMember, ...]:
        found = (self.members[name].joined for name in self.member_names(role))
        return tuple(JobMember(joined.name, joined.incarnation, joined.address) for joined in found)

    def apply(self, record: CoordinatorRecord) -> None:
        """The book is as after one line more of its log."""
        match record:
            case MemberJoined():
                self._join(record)
            case MemberLeft():
                self._leave(record.name)
            case ReplicasAssigned():
                self.generation += 1
                self.replicas[record.shard] = record.replicas
            case TaskAssigned():
                given = self.tasks.assign(record.worker) if record.task else None
                self._reply(record.worker, TaskReply(record.sequence, given))
            case TaskReported():
                self.tasks.finish(record.task, record.outcome, record.version, record.text)
                self._reply(record.worker, Ack(-1, record.sequence))
            case LeaseExpired():
                self.tasks.finish(record.task, "preempted", 0, "its lease is over")
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
        life = self.members.get(worker)
        if life is not None:
            life.next_sequence, life.reply = reply.sequence + 1, reply

    def _advance_snapshot(self, line: SnapshotQuiesced | ShardSaved) -> None:
        if self.snapshot is None or self.snapshot.number != line.snapshot:
            return
        if isinstance(line, SnapshotQuiesced):
            self.snapshot.is_quiesced = True
            return
        self.snapshot.positions[line.shard] = line.position
        if len(self.snapshot.positions) == self.job.num_shards:
            self.snapshots[line.snapshot] = self.snapshot.positions
            self.snapshot = None

    def _join(self, line: MemberJoined) -> None:
        self.generation += 1
        self.incarnation = line.incarnation
        self.members[line.name] = MemberState(line)
        if line.role == "worker":
            return
        servers = self.member_names("server")
        if not self.replicas and len(servers) == self.job.num_servers:
            follower = servers[1:] + servers[:1] if self.job.is_replicated else servers
            self.replicas = [
                ShardReplicas(primary, backup if backup != primary else "", is_backup_ready=True)
                for primary, backup in zip(servers, follower, strict=True)
            ]

    def _leave(self, name: str) -> None:
        self.generation += 1
        self.members.pop(name, None)
        self.tasks.reclaim(name)
        if self.job.num_servers > 1:
            self.replicas = [remove_replica(keepers, name) or keepers for keepers in self.replicas]

    def _reset(self, line: JobLost | JobResumed) -> None:
        if isinstance(line, JobLost):
            self.loss_reason = line.text
            return
        self.generation = max(self.generation, line.generation) + 1
        self.incarnation = max(self.incarnation, line.incarnation)
        self.members.clear()
        self.replicas.clear()
        self.snapshot, self.loss_reason = None, ""

    @property
    def has_lost_weights(self) -> bool:
        """Whether the weights are lost: no server keeps them, and the last worker has gone before all was done."""
        is_begun = bool(self.tasks.done) and not self.tasks.is_finished
        return not self.job.num_servers and not self.members and is_begun and not self.loss_reason

    def shards_per_server(self, silent_members: set[str]) -> dict[str, int]:
        """Return how many shards each server keeps, of those that are not silent."""
        named = [name for keepers in self.replicas for name in (keepers.primary, keepers.backup)]
        return {name: named.count(name) for name in self.member_names("server") if name not in silent_members}

    def may_hold_last_copy(self, name: str) -> bool:
        """Tell whether a member that is silent may have what nobody else has, so that it is waited for."""
        if self.job.num_servers == 1 and self.job.is_logged:
            return False
        return any(name in {one.primary, one.backup, one.former_replica} for one in self.replicas)

    def holds_last_copy(self, name: str) -> bool:
        """Tell whether there is a shard of which only this server has everything."""
        is_only_in_memory = self.job.num_servers > 1 or not self.job.is_logged
        return is_only_in_memory and any(remove_replica(keepers, name) is None for keepers in self.replicas)
