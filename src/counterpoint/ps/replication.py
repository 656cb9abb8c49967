"""One shard on one server: first or backup, what waits to be kept in two places, and who waits to read."""

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
"""Entries that wait for the backup; what comes then is told to come again."""
MAX_WAITING_PULLS = 4096
"""Reads that wait for a version or a clock."""


@dataclass(slots=True)
class BackupReplica:
    """What a server keeps of a shard that it does not lead.

    Attributes:
        shard: its copy; None where it has none.
        is_installed: whether the copy is the primary's, so that the next entries may be added.
    """

    shard: PsShard | None
    is_installed: bool = False

    def apply_replication(self, job: JobConfig, message: InstallSnapshot | ReplicateEntry) -> Iterator[AppendJournal]:
        """The backup keeps what its primary gave it, if that comes next; yield what may become part of the journal."""
        if isinstance(message, InstallSnapshot):
            if not self.is_installed:
                self.shard, self.is_installed = PsShard(job, message.shard, message.state), True
        elif self.is_installed and self.shard is not None and message.position == self.shard.position:
            self.shard.apply(message.entry)
            yield AppendJournal(message.shard, message.position, message.entry, is_committed=False)


@dataclass(slots=True)
class PrimaryReplica:
    """What the first keeper of a shard has.

    Attributes:
        shard: everything that two keep.
        keepers: who they are.
        pending: entries that have a position but that the backup has not yet said it keeps.
        is_installed: whether the backup has the state, while it is not counted yet.
        reads: pulls that wait.
        sent_at: when something was last sent to the backup.
    """

    shard: PsShard
    replicas: ShardReplicas
    pending: deque[JournalEntry] = field(default_factory=deque)
    is_installed: bool = False
    waiting_pulls: dict[tuple[str, int, int], PullRequest] = field(default_factory=dict)
    sent_at: float = 0.0

    @property
    def has_no_backup(self) -> bool:
        """Whether the disk is the second place."""
        return self.replicas.is_backup_ready and not self.replicas.backup

    def next_sequence(self, change: WriteRequest) -> int | None:
        """Return the sequence that comes next from the sender of a request; None where it has no desk here."""
        desk = self.shard.clients.get(change.header.member)
        if desk is None or desk.incarnation != change.header.incarnation:
            return None
        waiting = sum(
            not isinstance(entry, SetMembers) and entry.header.member == change.header.member for entry in self.pending
        )
        return desk.next_sequence + waiting

    def on_write(self, header: RequestHeader, change: WriteRequest, now: float) -> Iterator[PsAction]:
        """Yield what is to be done about a request to change something.

        Args:
            origin: of this server.
            change: the request.
            now: what the clock says.
        """
        upcoming = self.next_sequence(change)
        if upcoming is None or not self.replicas.is_backup_ready:
            yield self.reject(change, "later", f"shard {self.shard.index} is being handed over")
        elif change.header.sequence == upcoming:
            if len(self.pending) >= MAX_PENDING:
                yield self.reject(change, "later", f"{len(self.pending)} requests wait for the backup")
            else:
                yield from self.append(header, change, now)
        else:
            found = self.shard.clients[change.header.member].replies.get(change.header.sequence)
            if found is not None:
                yield reply_to(change.header, found)

    def reject(self, request: WriteRequest | PullRequest, reason: RejectReason, text: str) -> SendMessage:
        """Return the answer that nothing was changed."""
        return reply_to(request.header, self.shard.rejection(request, reason, text))

    def append(self, header: RequestHeader, entry: JournalEntry, now: float) -> Iterator[PsAction]:
        """Yield what makes an entry part of the journal."""
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
        """The entry is part of the journal; yield what its sender is told, and reads that it lets go."""
        position = self.shard.position
        told = self.shard.apply(entry)
        yield AppendJournal(self.shard.index, position, entry, is_committed=True)
        if told is not None and not isinstance(entry, SetMembers):
            yield reply_to(entry.header, told)
        for name, pull in list(self.waiting_pulls.items()):
            if self.shard.can_read(pull):
                del self.waiting_pulls[name]
                yield reply_to(pull.header, self.shard.read(pull))

    def on_ack(self, position: int) -> Iterator[PsAction]:
        """Yield what follows when the backup keeps everything before a position."""
        while self.pending and self.shard.position < position:
            yield from self.apply(self.pending.popleft())

    def on_pull(self, pull: PullRequest) -> Iterator[PsAction]:
        """Yield the answer to a pull, unless it has to wait."""
        if not self.replicas.is_backup_ready:
            yield self.reject(pull, "later", f"shard {self.shard.index} is being handed over")
            return
        try:
            may_read = self.shard.can_read(pull)
        except ProtocolError as error:
            yield self.reject(pull, "request", str(error))
            return
        name = pull.header.member, pull.header.incarnation, pull.ticket
        if may_read:
            yield reply_to(pull.header, self.shard.read(pull))
        elif name in self.waiting_pulls or len(self.waiting_pulls) < MAX_WAITING_PULLS:
            self.waiting_pulls[name] = pull
        else:
            yield self.reject(pull, "later", f"{len(self.waiting_pulls)} reads wait on shard {self.shard.index}")

    def retransmit(self, header: RequestHeader, now: float) -> Iterator[PsAction]:
        """Yield once more what the backup has not answered."""
        self.sent_at = now
        if not self.replicas.backup:
            return
        if not self.replicas.is_backup_ready and not self.is_installed:
            yield SendMessage(self.replicas.backup, InstallSnapshot(header, self.shard.index, self.shard.state))
            return
        for index, entry in enumerate(self.pending):
            message = ReplicateEntry(header, self.shard.index, self.shard.position + index, entry)
            yield SendMessage(self.replicas.backup, message)


def shard_log_name(shard: int) -> str:
    """Return the name of the log of a shard that is kept alone."""
    return f"shard-{shard}"


def replay_log(shard: PsShard, entries: Sequence[JournalEntry]) -> PsShard:
    """Return the shard after the lines of its log."""
    for line in entries:
        shard.apply(line)
    return shard


def journal_from_log(shard: PsShard, entries: Sequence[JournalEntry]) -> Iterator[AppendJournal]:
    """Yield the entries of the log that a shard has just been recovered from.

    The life that wrote them may have died after an entry stood in the log, and before it stood in the journal.
    """
    first = shard.position - len(entries)
    for index, entry in enumerate(entries):
        yield AppendJournal(shard.index, first + index, entry, is_committed=True)
