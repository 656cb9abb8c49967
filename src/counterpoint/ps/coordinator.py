"""The coordinator: one state machine that says who belongs to the job, who keeps what, and which data is next."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from counterpoint.ps.actions import AppendLog, PsAction, SendMessage, reply_to
from counterpoint.ps.coordinator_state import CoordinatorState, MemberState, assign_replicas
from counterpoint.ps.job_config import JobConfig
from counterpoint.ps.message_codec import PsMessage
from counterpoint.ps.messages import (
    Ack,
    BackupReady,
    CheckpointRequest,
    DataTask,
    Heartbeat,
    JoinReply,
    JoinRequest,
    LeaveRequest,
    Rejected,
    RejectReason,
    RequestHeader,
    ShardReplicas,
    SnapshotRequest,
    SnapshotSaved,
    TaskReport,
    TaskRequest,
)
from counterpoint.ps.write_ahead_log import (
    CheckpointRequested,
    CoordinatorRecord,
    JobLost,
    LeaseExpired,
    MemberJoined,
    MemberLeft,
    ReplicasAssigned,
    ShardSaved,
    SnapshotQuiesced,
    TaskAssigned,
    TaskReported,
)

COORDINATOR_LOG = "coordinator"
MAX_TASK_DURATIONS = 101
"""Of so many tasks that were done last, it is known how long they took."""


class Coordinator:
    """Decides, writes down, answers.

    Args:
        job: what all agree on.
        lines: the log of an earlier life; nothing in it is decided twice.
        now: what the clock says; silence and leases of before count from here.
    """

    def __init__(self, job: JobConfig, records: Sequence[CoordinatorRecord] = (), now: float = 0.0) -> None:
        self.job = job
        self.state = CoordinatorState(job, records)
        self._digest = job.digest()
        self._last_heard = dict.fromkeys(self.state.members, now)
        self._lease_started_at = {task: now for task, _ in self.state.tasks.doing.values()}
        self._task_durations_s: deque[float] = deque(maxlen=MAX_TASK_DURATIONS)
        self._snapshot_sent_at = now
        self._actions: list[PsAction] = []

    def on_event(self, message: PsMessage | None, now: float) -> list[PsAction]:
        """Take in a message, or the time, and return what is to be done about it.

        Args:
            message: what came; None where only time has passed.
            now: what the clock says.
        """
        self._actions = []
        generation = self.state.generation
        match message:
            case JoinRequest() if self.state.loss_reason:
                self._reject(RequestHeader(message.name, 0, 0), "lost", self.state.loss_reason)
            case None:
                self._on_tick(now)
            case JoinRequest():
                self._on_join(message, now)
            case Heartbeat() | BackupReady() | SnapshotSaved():
                self._on_notice(message, now)
            case TaskRequest() | TaskReport() | CheckpointRequest() | LeaveRequest():
                self._on_call(message, now)
            case _:
                pass
        if self.state.has_lost_weights:
            self._commit(
                JobLost(
                    f"the last worker of job {self.job.name} has gone, and the weights with it, when "
                    f"{len(self.state.tasks.done)} tasks were done; start the job anew: from the last checkpoint, if "
                    "its workers have saved one"
                )
            )
        if self.state.generation != generation:
            view = self.state.view
            self._actions += [SendMessage(name, view) for name in self.state.members]
        return self._actions

    def _commit(self, line: CoordinatorRecord) -> None:
        self._actions.append(AppendLog(COORDINATOR_LOG, line))
        self.state.apply(line)

    def _reject(self, origin: RequestHeader, reason: RejectReason, text: str) -> None:
        refused = Rejected(-1, origin.sequence, False, reason, text, self.state.generation)
        self._actions.append(reply_to(origin, refused))

    def _on_join(self, hello: JoinRequest, now: float) -> None:
        life = self.state.members.get(hello.name)
        if hello.job_digest != self._digest:
            text = f"{hello.name} has another job than this coordinator; start all with the same settings"
            self._reject(RequestHeader(hello.name, 0, 0), "identity", text)
            return
        if life is not None and life.joined.token != hello.token and not self._replace_member(hello, life, now):
            return
        if hello.name not in self.state.members:
            if hello.role == "server" and len(self.state.replicas) == 0 and self._has_all_servers():
                return
            self._commit(MemberJoined(hello.name, hello.role, hello.token, self.state.incarnation + 1, hello.address))
        self._last_heard[hello.name] = now
        incarnation = self.state.members[hello.name].joined.incarnation
        self._actions.append(SendMessage(hello.name, JoinReply(hello.token, incarnation, self.state.view)))

    def _has_all_servers(self) -> bool:
        return len(self.state.member_names("server")) >= self.job.num_servers

    def _replace_member(self, hello: JoinRequest, life: MemberState, now: float) -> bool:
        """Somebody comes with the name of a member: the member is gone, if it has been silent for long."""
        silent_s = now - self._last_heard[hello.name]
        if silent_s <= self.job.timeouts.failure_timeout_s:
            text = (
                f"{hello.name} belongs to the job already, as life {life.joined.incarnation}, heard {silent_s:.1f} s "
                f"ago; a name is one member's: give another, or wait until the other has been silent for "
                f"{self.job.timeouts.failure_timeout_s:g} s"
            )
            self._reject(RequestHeader(hello.name, 0, 0), "identity", text)
            return False
        if self.state.holds_last_copy(hello.name):
            shards = [index for index, one in enumerate(self.state.replicas) if one.primary == hello.name]
            self._commit(
                JobLost(
                    f"server {hello.name} has begun anew while it alone kept shards {shards}, whose newest updates are "
                    "lost; go on from the last checkpoint"
                )
            )
            return False
        self._commit(MemberLeft(hello.name))
        return True

    def _is_current(self, origin: RequestHeader) -> bool:
        life = self.state.members.get(origin.member)
        return life is not None and life.joined.incarnation == origin.incarnation

    def _on_notice(self, message: Heartbeat | BackupReady | SnapshotSaved, now: float) -> None:
        origin = message.header
        if not self._is_current(origin):
            text = f"life {origin.incarnation} of {origin.member} does not belong to the job; say hello as a new one"
            self._reject(origin, "identity", text)
            return
        self._last_heard[origin.member] = now
        if self.state.loss_reason and self.state.members[origin.member].joined.role == "worker":
            self._reject(origin, "over", self.state.loss_reason)
        if origin.generation != self.state.generation:
            self._actions.append(SendMessage(origin.member, self.state.view))
        elif isinstance(message, BackupReady) and message.shard < len(self.state.replicas):
            keepers = self.state.replicas[message.shard]
            if keepers.primary == origin.member and not keepers.is_backup_ready:
                self._commit(
                    ReplicasAssigned(
                        message.shard, ShardReplicas(keepers.primary, keepers.backup, is_backup_ready=True)
                    )
                )
        elif isinstance(message, SnapshotSaved) and self._awaits_shard(message):
            self._commit(ShardSaved(message.snapshot, message.shard, message.position))

    def _awaits_shard(self, saved: SnapshotSaved) -> bool:
        cut = self.state.snapshot
        is_here = (
            cut is not None and cut.is_quiesced and cut.number == saved.snapshot and saved.shard not in cut.positions
        )
        return is_here and saved.shard < len(self.state.replicas)

    def _on_call(self, message: TaskRequest | TaskReport | CheckpointRequest | LeaveRequest, now: float) -> None:
        origin = message.header
        if not self._is_current(origin):
            text = f"life {origin.incarnation} of {origin.member} does not belong to the job; say hello as a new one"
            self._reject(origin, "identity", text)
            return
        life = self.state.members[origin.member]
        self._last_heard[origin.member] = now
        if origin.sequence == life.next_sequence:
            self._execute(message, now)
        if life.reply is not None and life.reply.sequence == origin.sequence:
            self._actions.append(reply_to(origin, life.reply))

    def _execute(self, message: TaskRequest | TaskReport | CheckpointRequest | LeaveRequest, now: float) -> None:
        origin = message.header
        match message:
            case TaskRequest():
                self._assign_task(origin, now)
            case TaskReport():
                since = self._lease_started_at.pop(message.task, None)
                if since is not None and message.outcome == "done":
                    self._task_durations_s.append(now - since)
                self._commit(
                    TaskReported(
                        origin.member, origin.sequence, message.task, message.outcome, message.version, message.text
                    )
                )
            case CheckpointRequest():
                self._commit(CheckpointRequested(origin.member, origin.sequence))
            case LeaveRequest() if self.state.may_hold_last_copy(origin.member) and not self._may_leave(
                origin.member, now
            ):
                text = f"{origin.member} alone keeps a shard; once another has it too, it may go"
                self._reject(origin, "later", text)
            case LeaveRequest():
                self._commit(MemberLeft(origin.member))
                self._actions.append(reply_to(origin, Ack(-1, origin.sequence)))

    def _assign_task(self, origin: RequestHeader, now: float) -> None:
        stopped = self.state.loss_reason or self.state.tasks.stop_reason
        if stopped:
            self._reject(origin, "lost", stopped)
            return
        task = self.state.tasks.next_task(retries_only=self.state.snapshot is not None)
        slow = self._find_straggler(origin.member, now) if task == "later" else None
        if slow is not None:
            self._commit(LeaseExpired(slow))
            task = self.state.tasks.next_task(retries_only=True)
        if task == "later":
            self._reject(origin, "later", "all tasks that may be begun are being done")
            return
        if isinstance(task, DataTask):
            self._lease_started_at[task] = now
        self._commit(TaskAssigned(origin.member, origin.sequence, task))

    def _find_straggler(self, worker: str, now: float) -> DataTask | None:
        """Return the task of another worker that is to be given to this one, too; None where all go on as usual."""
        if not self.job.retry_policy.backup_after or not self._task_durations_s:
            return None
        usual_s = max(median(self._task_durations_s), self.job.timeouts.heartbeat_s)
        others = [
            (self._lease_started_at.get(task, now), task)
            for task, owner in self.state.tasks.doing.values()
            if owner != worker
        ]
        since, slowest = min(others, key=lambda pair: pair[0], default=(now, None))
        return slowest if now - since > self.job.retry_policy.backup_after * usual_s else None

    def _may_leave(self, name: str, now: float) -> bool:
        """Tell whether everything that a server keeps is kept completely by another that is heard."""
        heard = self.state.shards_per_server(self._silent_members(now))
        kept = [one for one in self.state.replicas if name in {one.primary, one.backup, one.former_replica}]
        return all(one.is_backup_ready and {one.primary, one.backup} <= heard.keys() for one in kept)

    def _silent_members(self, now: float) -> set[str]:
        limit_s = self.job.timeouts.failure_timeout_s
        return {name for name in self.state.members if now - self._last_heard.get(name, now) > limit_s}

    def _on_tick(self, now: float) -> None:
        silent = self._silent_members(now)
        for index, keepers in enumerate(self.state.replicas):
            wanted = assign_replicas(keepers, self.state.shards_per_server(silent))
            if wanted != keepers:
                self._commit(ReplicasAssigned(index, wanted))
        for name in sorted(silent):
            if not self.state.may_hold_last_copy(name):
                self._commit(MemberLeft(name))
        doing = {task for task, _ in self.state.tasks.doing.values()}
        self._lease_started_at = {task: self._lease_started_at.get(task, now) for task in doing}
        for task, since in list(self._lease_started_at.items()):
            if now - since > self.job.timeouts.lease_s:
                self._commit(LeaseExpired(task))
                del self._lease_started_at[task]
        self._advance_snapshot(now)

    def _advance_snapshot(self, now: float) -> None:
        cut = self.state.snapshot
        if cut is None or not self.state.replicas:
            return
        if not cut.is_quiesced:
            if not self.state.tasks.is_quiesced:
                return
            self._commit(SnapshotQuiesced(cut.number))
        elif now - self._snapshot_sent_at < self.job.timeouts.resend_s:
            return
        self._snapshot_sent_at = now
        waiting = {keepers.primary for index, keepers in enumerate(self.state.replicas) if index not in cut.positions}
        self._actions += [
            SendMessage(name, SnapshotRequest(self.state.generation, cut.number)) for name in sorted(waiting)
        ]
