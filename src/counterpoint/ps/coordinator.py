"""The coordinator: a state machine for membership, shard replicas, tasks and snapshots."""

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
"""Number of recent task durations whose median decides which task is a straggler."""


class Coordinator:
    """Decide on events, log each decision, and reply.

    Args:
        job: configuration.
        records: log of an earlier incarnation, which is replayed.
        now: current time; timeouts and leases from before restart here.
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
        """Process a message or a clock tick, and return the resulting actions.

        Args:
            message: the message; None for a tick.
            now: current time.
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
                    f"the last worker of job {self.job.name} left, and the weights are lost with it, after "
                    f"{len(self.state.tasks.done)} tasks; restart the job, from the last checkpoint if there is one"
                )
            )
        if self.state.generation != generation:
            view = self.state.view
            self._actions += [SendMessage(name, view) for name in self.state.members]
        return self._actions

    def _commit(self, record: CoordinatorRecord) -> None:
        self._actions.append(AppendLog(COORDINATOR_LOG, record))
        self.state.apply(record)

    def _reject(self, header: RequestHeader, reason: RejectReason, text: str) -> None:
        rejected = Rejected(-1, header.sequence, False, reason, text, self.state.generation)
        self._actions.append(reply_to(header, rejected))

    def _on_join(self, request: JoinRequest, now: float) -> None:
        member = self.state.members.get(request.name)
        if request.job_digest != self._digest:
            text = f"{request.name} has another job configuration than this coordinator; start all with the same one"
            self._reject(RequestHeader(request.name, 0, 0), "identity", text)
            return
        if (
            member is not None
            and member.joined.token != request.token
            and not self._replace_member(request, member, now)
        ):
            return
        if request.name not in self.state.members:
            if request.role == "server" and len(self.state.replicas) == 0 and self._has_all_servers():
                return
            self._commit(
                MemberJoined(request.name, request.role, request.token, self.state.incarnation + 1, request.address)
            )
        self._last_heard[request.name] = now
        incarnation = self.state.members[request.name].joined.incarnation
        self._actions.append(SendMessage(request.name, JoinReply(request.token, incarnation, self.state.view)))

    def _has_all_servers(self) -> bool:
        return len(self.state.member_names("server")) >= self.job.num_servers

    def _replace_member(self, request: JoinRequest, member: MemberState, now: float) -> bool:
        """Tell whether a new member may take over a name: only after the previous one has timed out."""
        silent_s = now - self._last_heard[request.name]
        if silent_s <= self.job.timeouts.failure_timeout_s:
            text = (
                f"{request.name} already belongs to the job, as incarnation {member.joined.incarnation}; its last "
                f"message was {silent_s:.1f} s ago; names are unique: choose another one, or wait until it has been "
                f"silent for {self.job.timeouts.failure_timeout_s:g} s"
            )
            self._reject(RequestHeader(request.name, 0, 0), "identity", text)
            return False
        if self.state.holds_last_copy(request.name):
            shards = [index for index, replicas in enumerate(self.state.replicas) if replicas.primary == request.name]
            self._commit(
                JobLost(
                    f"server {request.name} restarted while it held the only copy of shards {shards}, whose newest "
                    "updates are lost; restart from the last checkpoint"
                )
            )
            return False
        self._commit(MemberLeft(request.name))
        return True

    def _is_current(self, header: RequestHeader) -> bool:
        member = self.state.members.get(header.member)
        return member is not None and member.joined.incarnation == header.incarnation

    def _on_notice(self, message: Heartbeat | BackupReady | SnapshotSaved, now: float) -> None:
        header = message.header
        if not self._is_current(header):
            text = f"incarnation {header.incarnation} of {header.member} does not belong to the job; join again"
            self._reject(header, "identity", text)
            return
        self._last_heard[header.member] = now
        if self.state.loss_reason and self.state.members[header.member].joined.role == "worker":
            self._reject(header, "over", self.state.loss_reason)
        if header.generation != self.state.generation:
            self._actions.append(SendMessage(header.member, self.state.view))
        elif isinstance(message, BackupReady) and message.shard < len(self.state.replicas):
            replicas = self.state.replicas[message.shard]
            if replicas.primary == header.member and not replicas.is_backup_ready:
                self._commit(
                    ReplicasAssigned(
                        message.shard, ShardReplicas(replicas.primary, replicas.backup, is_backup_ready=True)
                    )
                )
        elif isinstance(message, SnapshotSaved) and self._awaits_shard(message):
            self._commit(ShardSaved(message.snapshot, message.shard, message.position))

    def _awaits_shard(self, saved: SnapshotSaved) -> bool:
        snapshot = self.state.snapshot
        is_missing = (
            snapshot is not None
            and snapshot.is_quiesced
            and snapshot.number == saved.snapshot
            and saved.shard not in snapshot.positions
        )
        return is_missing and saved.shard < len(self.state.replicas)

    def _on_call(self, message: TaskRequest | TaskReport | CheckpointRequest | LeaveRequest, now: float) -> None:
        header = message.header
        if not self._is_current(header):
            text = f"incarnation {header.incarnation} of {header.member} does not belong to the job; join again"
            self._reject(header, "identity", text)
            return
        member = self.state.members[header.member]
        self._last_heard[header.member] = now
        if header.sequence == member.next_sequence:
            self._execute(message, now)
        if member.reply is not None and member.reply.sequence == header.sequence:
            self._actions.append(reply_to(header, member.reply))

    def _execute(self, message: TaskRequest | TaskReport | CheckpointRequest | LeaveRequest, now: float) -> None:
        header = message.header
        match message:
            case TaskRequest():
                self._assign_task(header, now)
            case TaskReport():
                started_at = self._lease_started_at.pop(message.task, None)
                if started_at is not None and message.outcome == "done":
                    self._task_durations_s.append(now - started_at)
                self._commit(
                    TaskReported(
                        header.member, header.sequence, message.task, message.outcome, message.version, message.text
                    )
                )
            case CheckpointRequest():
                self._commit(CheckpointRequested(header.member, header.sequence))
            case LeaveRequest() if self.state.may_hold_last_copy(header.member) and not self._may_leave(
                header.member, now
            ):
                text = f"{header.member} holds the only copy of a shard; it may leave once there is another copy"
                self._reject(header, "later", text)
            case LeaveRequest():
                self._commit(MemberLeft(header.member))
                self._actions.append(reply_to(header, Ack(-1, header.sequence)))

    def _assign_task(self, header: RequestHeader, now: float) -> None:
        stop_reason = self.state.loss_reason or self.state.tasks.stop_reason
        if stop_reason:
            self._reject(header, "lost", stop_reason)
            return
        task = self.state.tasks.next_task(retries_only=self.state.snapshot is not None)
        straggler = self._find_straggler(header.member, now) if task == "later" else None
        if straggler is not None:
            self._commit(LeaseExpired(straggler))
            task = self.state.tasks.next_task(retries_only=True)
        if task == "later":
            self._reject(header, "later", "all tasks that may be started are assigned")
            return
        if isinstance(task, DataTask):
            self._lease_started_at[task] = now
        self._commit(TaskAssigned(header.member, header.sequence, task))

    def _find_straggler(self, worker: str, now: float) -> DataTask | None:
        """Return another worker's task that should be assigned to this worker, too; None if there is none."""
        if not self.job.retry_policy.backup_after or not self._task_durations_s:
            return None
        usual_s = max(median(self._task_durations_s), self.job.timeouts.heartbeat_s)
        leases = [
            (self._lease_started_at.get(task, now), task)
            for task, owner in self.state.tasks.doing.values()
            if owner != worker
        ]
        started_at, slowest = min(leases, key=lambda pair: pair[0], default=(now, None))
        return slowest if now - started_at > self.job.retry_policy.backup_after * usual_s else None

    def _may_leave(self, name: str, now: float) -> bool:
        """Tell whether everything that a server holds is also held completely by another live server."""
        alive = self.state.shards_per_server(self._silent_members(now))
        held = [
            replicas
            for replicas in self.state.replicas
            if name in {replicas.primary, replicas.backup, replicas.former_replica}
        ]
        return all(
            replicas.is_backup_ready and {replicas.primary, replicas.backup} <= alive.keys() for replicas in held
        )

    def _silent_members(self, now: float) -> set[str]:
        limit_s = self.job.timeouts.failure_timeout_s
        return {name for name in self.state.members if now - self._last_heard.get(name, now) > limit_s}

    def _on_tick(self, now: float) -> None:
        silent = self._silent_members(now)
        for index, replicas in enumerate(self.state.replicas):
            assigned = assign_replicas(replicas, self.state.shards_per_server(silent))
            if assigned != replicas:
                self._commit(ReplicasAssigned(index, assigned))
        for name in sorted(silent):
            if not self.state.may_hold_last_copy(name):
                self._commit(MemberLeft(name))
        running = {task for task, _ in self.state.tasks.doing.values()}
        self._lease_started_at = {task: self._lease_started_at.get(task, now) for task in running}
        for task, started_at in list(self._lease_started_at.items()):
            if now - started_at > self.job.timeouts.lease_s:
                self._commit(LeaseExpired(task))
                del self._lease_started_at[task]
        self._advance_snapshot(now)

    def _advance_snapshot(self, now: float) -> None:
        snapshot = self.state.snapshot
        if snapshot is None or not self.state.replicas:
            return
        if not snapshot.is_quiesced:
            if not self.state.tasks.is_quiesced:
                return
            self._commit(SnapshotQuiesced(snapshot.number))
        elif now - self._snapshot_sent_at < self.job.timeouts.resend_s:
            return
        self._snapshot_sent_at = now
        waiting = {
            replicas.primary for index, replicas in enumerate(self.state.replicas) if index not in snapshot.positions
        }
        self._actions += [
            SendMessage(name, SnapshotRequest(self.state.generation, snapshot.number)) for name in sorted(waiting)
        ]
