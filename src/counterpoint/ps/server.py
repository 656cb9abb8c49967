"""A server: the shards it keeps, first or as a backup, and what is asked of it.

What has become part of the shards' journals, put together from what each of their keepers notes.
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
    """One life of a server.

    Args:
        job: what all agree on.
        name: of the server.
        token: a number that no other life has drawn.
        address: where it is reached.
        saved: the state of shards in the checkpoint that the job goes on from.
        logs: what stands in the logs of shards that it keeps alone.
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
        """The newest that it knows."""
        return self.membership.view.generation

    def on_event(self, message: PsMessage | None, now: float) -> list[PsAction]:
        """Take in a message, or the time, and return what is to be done about it.

        Args:
            message: what came; None where only time has passed.
            now: what the clock says.
        """
        return list(self._handle(message, now))

    def _handle(self, message: PsMessage | None, now: float) -> Iterator[PsAction]:
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
        """The newest view counts."""
        view = self.membership.view
        if self.membership.is_evicted:
            yield Shutdown(f"generation {view.generation} goes on without this life of {self.name}")
            return
        for index, keepers in enumerate(view.replicas):
            if self.name == keepers.primary:
                yield from self._become_primary(index, keepers, now)
            elif self.name == keepers.backup:
                self._become_backup(index, keepers)
            elif self.name != keepers.former_replica:
                self.shard_replicas.pop(index, None)
            elif isinstance(held := self.shard_replicas.get(index), PrimaryReplica):
                self.shard_replicas[index] = BackupReplica(held.shard)

    def _new_shard(self, index: int) -> PsShard:
        """Return a shard as the job begins, or as its log says."""
        return replay_log(PsShard(self.job, index, self._saved.get(index)), self._logs.pop(index, ()))

    def _become_primary(self, index: int, replicas: ShardReplicas, now: float) -> Iterator[PsAction]:
        held = self.shard_replicas.get(index)
        if isinstance(held, BackupReplica) and held.shard is None:
            yield Shutdown(f"{self.name} is to lead shard {index}, of which it has nothing")
            return
        if isinstance(held, PrimaryReplica):
            is_same_pair = held.replicas.backup == replicas.backup
            if not is_same_pair:
                held.pending.clear()
            held.is_installed = held.is_installed and is_same_pair and replicas.is_backup_ready
            held.replicas = replicas
            held.waiting_pulls.clear()
        else:
            lines = self._logs.get(index, ())
            held = self.shard_replicas[index] = PrimaryReplica(
                (held and held.shard) or self._new_shard(index), replicas
            )
            yield from journal_from_log(held.shard, lines)
        view = self.membership.view
        origin = self.membership.header()
        yield from held.retransmit(origin, now)
        yield from held.append(origin, SetMembers(view.generation, view.workers), now)

    def _become_backup(self, index: int, replicas: ShardReplicas) -> None:
        held = self.shard_replicas.get(index)
        if not replicas.is_backup_ready:
            self.shard_replicas[index] = BackupReplica(None if held is None else held.shard)
        elif held is None:
            self.shard_replicas[index] = BackupReplica(self._new_shard(index), is_installed=True)

    def _on_request(self, message: WriteRequest | PullRequest, now: float) -> Iterator[PsAction]:
        held = self.shard_replicas.get(message.shard)
        origin = message.header
        if origin.generation != self.generation or not isinstance(held, PrimaryReplica):
            text = f"generation {origin.generation} was asked for; {self.name} knows {self.generation}"
            yield self._rejection(message, "generation", text)
            return
        lives = {worker.name: worker.incarnation for worker in self.membership.view.workers}
        if lives.get(origin.member) != origin.incarnation:
            text = f"life {origin.incarnation} of {origin.member} does not belong to generation {self.generation}"
            yield self._rejection(message, "identity", text)
        elif isinstance(message, PullRequest):
            yield from held.on_pull(message)
        else:
            yield from held.on_write(self.membership.header(), message, now)

    def _rejection(self, message: WriteRequest | PullRequest, reason: RejectReason, text: str) -> SendMessage:
        is_pull = isinstance(message, PullRequest)
        number = message.ticket if isinstance(message, PullRequest) else message.header.sequence
        refused = Rejected(message.shard, number, is_pull, reason, text, self.generation)
        return reply_to(message.header, refused)

    def _on_replicate(self, message: InstallSnapshot | ReplicateEntry) -> Iterator[PsAction]:
        """Yield what a backup answers to its primary."""
        held = self.shard_replicas.get(message.shard)
        if message.header.generation != self.generation or not isinstance(held, BackupReplica):
            return
        if message.header.member != self.membership.view.replicas[message.shard].primary:
            return
        yield from held.apply_replication(self.job, message)
        if held.is_installed and held.shard is not None:
            yield SendMessage(
                message.header.member, ReplicationAck(self.membership.header(), message.shard, held.shard.position)
            )

    def _on_replication_ack(self, message: ReplicationAck, now: float) -> Iterator[PsAction]:
        held = self.shard_replicas.get(message.shard)
        if message.header.generation != self.generation or not isinstance(held, PrimaryReplica):
            return
        if message.header.member != held.replicas.backup:
            return
        if held.replicas.is_backup_ready:
            yield from held.on_ack(message.position)
        elif not held.is_installed:
            held.is_installed = True
            yield SendMessage(COORDINATOR, BackupReady(self.membership.header(), message.shard))
            yield from held.retransmit(self.membership.header(), now)

    def _retransmit(self, now: float) -> Iterator[PsAction]:
        """Yield once more what has not been answered for a while."""
        for index, held in self.shard_replicas.items():
            if not isinstance(held, PrimaryReplica) or now - held.sent_at < self.job.timeouts.resend_s:
                continue
            if not held.replicas.is_backup_ready and held.is_installed:
                yield SendMessage(COORDINATOR, BackupReady(self.membership.header(), index))
            if held.pending or not held.replicas.is_backup_ready:
                yield from held.retransmit(self.membership.header(), now)

    def _on_snapshot_request(self, message: SnapshotRequest) -> Iterator[PsAction]:
        """Yield the shards that it keeps first, as parts of a cut; of one that has a later one behind it, nothing.

        Cuts follow one another, so who asks for an earlier one was heard late. That one is whole, and the shards have
        counted more since.
        """
        if message.generation != self.generation:
            return
        for index, held in self.shard_replicas.items():
            if not isinstance(held, PrimaryReplica) or not held.replicas.is_backup_ready:
                continue
            cut, position = self._saved_snapshots.get(index, (-1, 0))
            if message.snapshot < cut:
                continue
            if cut != message.snapshot:
                position = held.shard.position
                self._saved_snapshots[index] = message.snapshot, position
                yield SaveSnapshot(message.snapshot, index, held.shard.state)
            yield SendMessage(COORDINATOR, SnapshotSaved(self.membership.header(), index, message.snapshot, position))


class JournalTracker:
    """What one life of a server has noted: certain entries, and those that are so only if it comes to lead."""

    def __init__(self) -> None:
        self._uncommitted: dict[int, dict[int, JournalEntry]] = {}
        self._transfer_generations: dict[int, int] = {}

    def before_message(self, node: ServerNode, message: PsMessage | None) -> None:
        """A message is about to be taken in: the state of a shard makes nought of what was noted of it."""
        if isinstance(message, InstallSnapshot):
            held = node.shard_replicas.get(message.shard)
            if isinstance(held, BackupReplica) and not held.is_installed:
                self._uncommitted.pop(message.shard, None)

    def add(self, note: AppendJournal) -> dict[int, JournalEntry]:
        """Return the entries that are certain now, by position."""
        if note.is_committed:
            return {note.position: note.entry}
        self._uncommitted.setdefault(note.shard, {})[note.position] = note.entry
        return {}

    def take_promoted(
        self, shard_replicas: Mapping[int, PrimaryReplica | BackupReplica]
    ) -> dict[int, dict[int, JournalEntry]]:
        """Return the entries, by shard and position, that are certain because this life leads now."""
        leading = [
            shard
            for shard, held in shard_replicas.items()
            if shard in self._uncommitted and isinstance(held, PrimaryReplica) and held.replicas.is_backup_ready
        ]
        return {shard: self._uncommitted.pop(shard) for shard in leading}

    def take_transferred(self, node: ServerNode) -> dict[int, dict[int, JournalEntry]]:
        """Return the entries, by shard and position, that this life hands on to a new backup; once in a generation.

        The backup gets a state that has them, and will never see them by themselves. If this life dies before it hears
        that the backup is complete, they are certain, and nobody else can say what they were.
        """
        found = {}
        for shard, held in node.shard_replicas.items():
            is_leading = isinstance(held, PrimaryReplica) and not held.replicas.is_backup_ready
            if is_leading and shard in self._uncommitted and self._transfer_generations.get(shard) != node.generation:
                self._transfer_generations[shard] = node.generation
                found[shard] = self._uncommitted[shard].copy()
        return found


def fill_gaps(journal: dict[int, JournalEntry], transferred: Mapping[int, JournalEntry]) -> None:
    """Positions before the newest entry that nobody was certain of have what was handed on there.

    Args:
        journal: certain entries by position.
        handed_on: what was handed on last, by position; an entry that another one has replaced is not certain.
    """
    newest = max(journal, default=0)
    for position, entry in transferred.items():
        if position < newest:
            journal.setdefault(position, entry)
