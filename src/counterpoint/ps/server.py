"""A server: the state machine that holds shard replicas and serves requests, and the tracking of their journals.

Role of a server for one shard, by the newest view (see `ShardReplicas`)::

                   view: backup               view: primary
    no replica ------------------> Backup ------------------> Primary
        ^                          |    ^                        |
        |     view: not listed     |    |   view: former replica |
        +--------------------------+    +------------------------+

A backup without a copy that is made the primary shuts down: its copy was lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from counterpoint.ps.actions import COORDINATOR, AppendJournal, PsAction, SaveSnapshot, SendMessage, Shutdown, reply_to
from counterpoint.ps.job_config import JobConfig
from counterpoint.ps.membership import Membership
from counterpoint.ps.message_codec import PsMessage
from counterpoint.ps.messages import (
    BackupReady,
    InitRequest,
    InstallSnapshot,
    JoinClock,
    JoinReply,
    JournalEntry,
    LeaveClock,
    MembershipView,
    PullRequest,
    PushRequest,
    Rejected,
    RejectReason,
    ReplicateEntry,
    ReplicationAck,
    SetMembers,
    ShardReplicas,
    ShardState,
    SnapshotRequest,
    SnapshotSaved,
    WriteRequest,
)
from counterpoint.ps.replication import BackupReplica, PrimaryReplica, journal_from_log, replay_log
from counterpoint.ps.shard import PsShard


class ServerNode:
    """One incarnation of a server.

    Args:
        job: configuration.
        name: of the server.
        token: random number unique to this incarnation.
        address: where other members reach it.
        saved: shard states of the snapshot that the job restarts from.
        logs: logs of shards without a backup.
    """

    def __init__(
        self,
        job: JobConfig,
        name: str,
        token: int,
        address: str = "",
        *,
        saved: Mapping[int, ShardState] | None = None,
        logs: Mapping[int, Sequence[JournalEntry]] | None = None,
    ) -> None:
        self.job, self.name = job, name
        self.membership = Membership(job, name, "server", token, address)
        self.shard_replicas: dict[int, PrimaryReplica | BackupReplica] = {}
        self._saved, self._logs = dict(saved or {}), dict(logs or {})
        self._saved_snapshots: dict[int, tuple[int, int]] = {}

    @property
    def generation(self) -> int:
        """Newest membership generation that it knows."""
        return self.membership.view.generation

    def on_event(self, message: PsMessage | None, now: float) -> list[PsAction]:
        """Process a message or a clock tick, and return the resulting actions.

        Args:
            message: the message; None for a tick.
            now: current time.
        """
        return list(self._dispatch(message, now))

    def _dispatch(self, message: PsMessage | None, now: float) -> Iterator[PsAction]:
        match message:
            case None:
                yield from self.membership.on_tick(now)
                yield from self._retransmit(now)
            case JoinReply() | MembershipView():
                if self.membership.update(message):
                    yield from self._apply_view(now)
            case InitRequest() | PushRequest() | JoinClock() | LeaveClock() | PullRequest():
                yield from self._on_request(message, now)
            case InstallSnapshot() | ReplicateEntry():
                yield from self._on_replicate(message)
            case ReplicationAck():
                yield from self._on_replication_ack(message, now)
            case SnapshotRequest():
                yield from self._on_snapshot_request(message)
            case Rejected() if self.membership.is_eviction(message):
                yield Shutdown(message.text)
            case _:
                pass

    def _apply_view(self, now: float) -> Iterator[PsAction]:
        """Take the roles that the newest view assigns."""
        view = self.membership.view
        if self.membership.is_evicted:
            yield Shutdown(f"generation {view.generation} continues without this incarnation of {self.name}")
            return
        for index, replicas in enumerate(view.replicas):
            if self.name == replicas.primary:
                yield from self._become_primary(index, replicas, now)
            elif self.name == replicas.backup:
                self._become_backup(index, replicas)
            elif self.name != replicas.former_replica:
                self.shard_replicas.pop(index, None)
            elif isinstance(replica := self.shard_replicas.get(index), PrimaryReplica):
                self.shard_replicas[index] = BackupReplica(replica.shard)

    def _new_shard(self, index: int) -> PsShard:
        """Return a shard in its initial state, or recovered from its log."""
        return replay_log(PsShard(self.job, index, self._saved.get(index)), self._logs.pop(index, ()))

    def _become_primary(self, index: int, replicas: ShardReplicas, now: float) -> Iterator[PsAction]:
        replica = self.shard_replicas.get(index)
        if isinstance(replica, BackupReplica) and replica.shard is None:
            yield Shutdown(f"{self.name} was made primary of shard {index}, of which it has no copy")
            return
        if isinstance(replica, PrimaryReplica):
            is_same_backup = replica.replicas.backup == replicas.backup
            if not is_same_backup:
                replica.pending.clear()
            replica.is_installed = replica.is_installed and is_same_backup and replicas.is_backup_ready
            replica.replicas = replicas
            replica.waiting_pulls.clear()
        else:
            entries = self._logs.get(index, ())
            replica = self.shard_replicas[index] = PrimaryReplica(
                (replica and replica.shard) or self._new_shard(index), replicas
            )
            yield from journal_from_log(replica.shard, entries)
        view = self.membership.view
        header = self.membership.header()
        yield from replica.retransmit(header, now)
        yield from replica.append(header, SetMembers(view.generation, view.workers), now)

    def _become_backup(self, index: int, replicas: ShardReplicas) -> None:
        replica = self.shard_replicas.get(index)
        if not replicas.is_backup_ready:
            self.shard_replicas[index] = BackupReplica(None if replica is None else replica.shard)
        elif replica is None:
            self.shard_replicas[index] = BackupReplica(self._new_shard(index), is_installed=True)

    def _on_request(self, message: WriteRequest | PullRequest, now: float) -> Iterator[PsAction]:
        replica = self.shard_replicas.get(message.shard)
        header = message.header
        if header.generation != self.generation or not isinstance(replica, PrimaryReplica):
            text = f"generation {header.generation} was requested; {self.name} is at {self.generation}"
            yield self._rejection(message, "generation", text)
            return
        incarnations = {worker.name: worker.incarnation for worker in self.membership.view.workers}
        if incarnations.get(header.member) != header.incarnation:
            text = (
                f"incarnation {header.incarnation} of {header.member} does not belong to generation {self.generation}"
            )
            yield self._rejection(message, "identity", text)
        elif isinstance(message, PullRequest):
            yield from replica.on_pull(message)
        else:
            yield from replica.on_write(self.membership.header(), message, now)

    def _rejection(self, message: WriteRequest | PullRequest, reason: RejectReason, text: str) -> SendMessage:
        is_pull = isinstance(message, PullRequest)
        number = message.ticket if isinstance(message, PullRequest) else message.header.sequence
        rejected = Rejected(message.shard, number, is_pull, reason, text, self.generation)
        return reply_to(message.header, rejected)

    def _on_replicate(self, message: InstallSnapshot | ReplicateEntry) -> Iterator[PsAction]:
        replica = self.shard_replicas.get(message.shard)
        if message.header.generation != self.generation or not isinstance(replica, BackupReplica):
            return
        if message.header.member != self.membership.view.replicas[message.shard].primary:
            return
        yield from replica.apply_replication(self.job, message)
        if replica.is_installed and replica.shard is not None:
            yield SendMessage(
                message.header.member, ReplicationAck(self.membership.header(), message.shard, replica.shard.position)
            )

    def _on_replication_ack(self, message: ReplicationAck, now: float) -> Iterator[PsAction]:
        replica = self.shard_replicas.get(message.shard)
        if message.header.generation != self.generation or not isinstance(replica, PrimaryReplica):
            return
        if message.header.member != replica.replicas.backup:
            return
        if replica.replicas.is_backup_ready:
            yield from replica.on_ack(message.position)
        elif not replica.is_installed:
            replica.is_installed = True
            yield SendMessage(COORDINATOR, BackupReady(self.membership.header(), message.shard))
            yield from replica.retransmit(self.membership.header(), now)

    def _retransmit(self, now: float) -> Iterator[PsAction]:
        for index, replica in self.shard_replicas.items():
            if not isinstance(replica, PrimaryReplica) or now - replica.sent_at < self.job.timeouts.resend_s:
                continue
            if not replica.replicas.is_backup_ready and replica.is_installed:
                yield SendMessage(COORDINATOR, BackupReady(self.membership.header(), index))
            if replica.pending or not replica.replicas.is_backup_ready:
                yield from replica.retransmit(self.membership.header(), now)

    def _on_snapshot_request(self, message: SnapshotRequest) -> Iterator[PsAction]:
        """Save all primary shards as parts of a snapshot; ignore a request for an earlier snapshot.

        A late request for an earlier snapshot is harmless: that snapshot is complete, but the shards have changed
        since.
        """
        if message.generation != self.generation:
            return
        for index, replica in self.shard_replicas.items():
            if not isinstance(replica, PrimaryReplica) or not replica.replicas.is_backup_ready:
                continue
            saved_snapshot, position = self._saved_snapshots.get(index, (-1, 0))
            if message.snapshot < saved_snapshot:
                continue
            if saved_snapshot != message.snapshot:
                position = replica.shard.position
                self._saved_snapshots[index] = message.snapshot, position
                yield SaveSnapshot(message.snapshot, index, replica.shard.state)
            yield SendMessage(COORDINATOR, SnapshotSaved(self.membership.header(), index, message.snapshot, position))


class JournalTracker:
    """Journal entries seen by one incarnation of a server: committed, or committed only if it becomes primary."""

    def __init__(self) -> None:
        self._uncommitted: dict[int, dict[int, JournalEntry]] = {}
        self._transfer_generations: dict[int, int] = {}

    def before_message(self, node: ServerNode, message: PsMessage | None) -> None:
        """Drop uncommitted entries that the state in this message replaces."""
        if isinstance(message, InstallSnapshot):
            replica = node.shard_replicas.get(message.shard)
            if isinstance(replica, BackupReplica) and not replica.is_installed:
                self._uncommitted.pop(message.shard, None)

    def add(self, note: AppendJournal) -> dict[int, JournalEntry]:
        """Record an entry; return the entries that are committed now, by position."""
        if note.is_committed:
            return {note.position: note.entry}
        self._uncommitted.setdefault(note.shard, {})[note.position] = note.entry
        return {}

    def take_promoted(
        self, shard_replicas: Mapping[int, PrimaryReplica | BackupReplica]
    ) -> dict[int, dict[int, JournalEntry]]:
        """Return entries, by shard and position, that are committed because this server became the primary."""
        promoted = [
            shard
            for shard, replica in shard_replicas.items()
            if shard in self._uncommitted and isinstance(replica, PrimaryReplica) and replica.replicas.is_backup_ready
        ]
        return {shard: self._uncommitted.pop(shard) for shard in promoted}

    def take_transferred(self, node: ServerNode) -> dict[int, dict[int, JournalEntry]]:
        """Return entries, by shard and position, that this server passes to a new backup; once per generation.

        The backup receives them only as part of a state. If this server dies before it learns that the backup is ready,
        they are committed, and no other process has them.
        """
        transferred = {}
        for shard, replica in node.shard_replicas.items():
            is_primary = isinstance(replica, PrimaryReplica) and not replica.replicas.is_backup_ready
            if is_primary and shard in self._uncommitted and self._transfer_generations.get(shard) != node.generation:
                self._transfer_generations[shard] = node.generation
                transferred[shard] = self._uncommitted[shard].copy()
        return transferred


def fill_gaps(journal: dict[int, JournalEntry], transferred: Mapping[int, JournalEntry]) -> None:
    """Fill positions before the newest committed entry with transferred entries.

    Args:
        journal: committed entries, by position; extended.
        transferred: entries transferred last, by position; not committed if another entry took the position.
    """
    newest = max(journal, default=0)
    for position, entry in transferred.items():
        if position < newest:
            journal.setdefault(position, entry)
