"""Primary and backup replicas of one shard: replication of journal entries, and pulls that wait.

A write is acknowledged once two servers hold it (or, without a backup, once it is in the log)::

    worker        primary                       backup
      | push(seq 7) |                             |
      |------------>| pending[position 41]        |
      |             |--- ReplicateEntry(41) ----->| apply
      |             |<-- ReplicationAck(42) ------|
      |<- PushReply-| apply, reply, serve pulls   |

A worker that gets no reply sends its write again with the same sequence number. It is then answered with the recorded
reply, and is not applied again (:meth:`PrimaryReplica.on_write`).

A new backup first gets the whole state (`InstallSnapshot`), then entries from that position on; it counts as ready when
the coordinator has recorded `BackupReady`. Until then the primary does not reply.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from counterpoint.errors import ProtocolError
from counterpoint.ps.actions import AppendJournal, AppendLog, PsAction, SendMessage, reply_to
from counterpoint.ps.job_config import JobConfig
from counterpoint.ps.messages import (
    InstallSnapshot,
    JournalEntry,
    PullRequest,
    RejectReason,
    ReplicateEntry,
    RequestHeader,
    SetMembers,
    ShardReplicas,
    WriteRequest,
)
from counterpoint.ps.shard import PsShard

MAX_PENDING = 256
"""Journal entries that may wait for the backup; further writes are rejected with ``later``."""


MAX_WAITING_PULLS = 4096
"""Pulls that may wait for a version or a clock."""


@dataclass(slots=True)
class PrimaryReplica:
    """A shard of which this server is the primary.

    Attributes:
        shard: state after all committed entries.
        replicas: current assignment.
        pending: entries that the backup has not acknowledged yet.
        is_installed: whether the backup has the state, although it is not ready yet.
        waiting_pulls: pulls that cannot be served yet.
        sent_at: time of the last message to the backup.
    """

    shard: PsShard
    replicas: ShardReplicas
    pending: deque[JournalEntry] = field(default_factory=deque)
    is_installed: bool = False
    waiting_pulls: dict[tuple[str, int, int], PullRequest] = field(default_factory=dict)
    sent_at: float = 0.0

    @property
    def has_no_backup(self) -> bool:
        """Whether the log takes the place of a backup."""
        return self.replicas.is_backup_ready and not self.replicas.backup

    def next_sequence(self, request: WriteRequest) -> int | None:
        """Return the sender's next expected sequence, pending entries included; None for an unknown sender."""
        client = self.shard.clients.get(request.header.member)
        if client is None or client.incarnation != request.header.incarnation:
            return None
        num_pending = sum(
            not isinstance(entry, SetMembers) and entry.header.member == request.header.member for entry in self.pending
        )
        return client.next_sequence + num_pending

    def on_write(self, header: RequestHeader, request: WriteRequest, now: float) -> Iterator[PsAction]:
        """Yield the actions for a write request.

        Args:
            header: of this server.
            request: of a worker.
            now: current time.
        """
        next_sequence = self.next_sequence(request)
        if next_sequence is None or not self.replicas.is_backup_ready:
            yield self.reject(request, "later", f"shard {self.shard.index} is changing replicas")
        elif request.header.sequence == next_sequence:
            if len(self.pending) >= MAX_PENDING:
                yield self.reject(request, "later", f"{len(self.pending)} requests are waiting for the backup")
            else:
                yield from self.append(header, request, now)
        else:
            reply = self.shard.clients[request.header.member].replies.get(request.header.sequence)
            if reply is not None:  # otherwise the request waits for the backup, and its reply follows
                yield reply_to(request.header, reply)

    def reject(self, request: WriteRequest | PullRequest, reason: RejectReason, text: str) -> SendMessage:
        """Return the reply that nothing changed."""
        return reply_to(request.header, self.shard.rejection(request, reason, text))

    def append(self, header: RequestHeader, entry: JournalEntry, now: float) -> Iterator[PsAction]:
        """Yield the actions that add an entry to the journal."""
        if self.has_no_backup:
            if self.shard.job.is_logged:
                yield AppendLog(shard_log_name(self.shard.index), entry)
            yield from self.apply(entry)
            return
        self.pending.append(entry)
        if self.replicas.backup and (self.replicas.is_backup_ready or self.is_installed):
            position = self.shard.position + len(self.pending) - 1
            self.sent_at = now
            yield SendMessage(self.replicas.backup, ReplicateEntry(header, self.shard.index, position, entry))

    def apply(self, entry: JournalEntry) -> Iterator[PsAction]:
        """Apply a committed entry; yield the reply to its sender, and to pulls that can be served now."""
        position = self.shard.position
        reply = self.shard.apply(entry)
        yield AppendJournal(self.shard.index, position, entry, is_committed=True)
        if reply is not None and not isinstance(entry, SetMembers):
            yield reply_to(entry.header, reply)
        for pull_id, pull in list(self.waiting_pulls.items()):
            if self.shard.can_read(pull):
                del self.waiting_pulls[pull_id]
                yield reply_to(pull.header, self.shard.read(pull))

    def on_ack(self, position: int) -> Iterator[PsAction]:
        """Commit all entries before a position, which the backup has acknowledged."""
        while self.pending and self.shard.position < position:
            yield from self.apply(self.pending.popleft())

    def on_pull(self, pull: PullRequest) -> Iterator[PsAction]:
        """Yield the reply to a pull, or let it wait."""
        if not self.replicas.is_backup_ready:
            yield self.reject(pull, "later", f"shard {self.shard.index} is changing replicas")
            return
        try:
            may_read = self.shard.can_read(pull)
        except ProtocolError as error:
            yield self.reject(pull, "request", str(error))
            return
        pull_id = pull.header.member, pull.header.incarnation, pull.ticket
        if may_read:
            yield reply_to(pull.header, self.shard.read(pull))
        elif pull_id in self.waiting_pulls or len(self.waiting_pulls) < MAX_WAITING_PULLS:
            self.waiting_pulls[pull_id] = pull
        else:
            yield self.reject(pull, "later", f"{len(self.waiting_pulls)} pulls are waiting on shard {self.shard.index}")

    def retransmit(self, header: RequestHeader, now: float) -> Iterator[PsAction]:
        """Yield again what the backup has not acknowledged."""
        self.sent_at = now
        if not self.replicas.backup:
            return
        if not self.replicas.is_backup_ready and not self.is_installed:
            yield SendMessage(self.replicas.backup, InstallSnapshot(header, self.shard.index, self.shard.state))
            return
        for index, entry in enumerate(self.pending):
            message = ReplicateEntry(header, self.shard.index, self.shard.position + index, entry)
            yield SendMessage(self.replicas.backup, message)


@dataclass(slots=True)
class BackupReplica:
    """A shard of which this server is not the primary.

    Attributes:
        shard: its copy; None if it has none.
        is_installed: whether the copy was installed by the current primary, so that entries may be applied.
    """

    shard: PsShard | None
    is_installed: bool = False

    def apply_replication(self, job: JobConfig, message: InstallSnapshot | ReplicateEntry) -> Iterator[AppendJournal]:
        """Apply what the primary sent, if it is the next entry; yield entries that may turn out to be committed."""
        if isinstance(message, InstallSnapshot):
            if not self.is_installed:
                self.shard, self.is_installed = PsShard(job, message.shard, message.state), True
        elif self.is_installed and self.shard is not None and message.position == self.shard.position:
            self.shard.apply(message.entry)
            yield AppendJournal(message.shard, message.position, message.entry, is_committed=False)


def shard_log_name(shard: int) -> str:
    """Return the name of the log of a shard without a backup."""
    return f"shard-{shard}"


def replay_log(shard: PsShard, entries: Sequence[JournalEntry]) -> PsShard:
    """Return the shard after the entries of its log."""
    for entry in entries:
        shard.apply(entry)
    return shard


def journal_from_log(shard: PsShard, entries: Sequence[JournalEntry]) -> Iterator[AppendJournal]:
    """Yield the logged entries of a recovered shard as committed journal entries.

    The incarnation that logged them may have died before it recorded them in the journal.
    """
    first = shard.position - len(entries)
    for index, entry in enumerate(entries):
        yield AppendJournal(shard.index, first + index, entry, is_committed=True)
