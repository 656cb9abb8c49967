"""One shard on one server: first or backup, what waits to be kept in two places, and who waits to read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from counterpoint.errors import ProtocolError
from counterpoint.server.actions import Action, Note, Send, Write, answer
from counterpoint.server.calls import Keepers
from counterpoint.server.job import Job
from counterpoint.server.messages import Members, Origin, Pull, Reason
from counterpoint.server.shard import Shard
from counterpoint.server.states import Change, Entry, Install, Replicate

MAX_PENDING = 256
"""Entries that wait for the backup; what comes then is told to come again."""
MAX_READS = 4096
"""Reads that wait for a version or a clock."""


@dataclass(slots=True)
class Backed:
    """What a server keeps of a shard that it does not lead.

    Attributes:
        shard: its copy; None where it has none.
        is_installed: whether the copy is the primary's, so that the next entries may be added.
    """

    shard: Shard | None
    is_installed: bool = False

    def keep(self, job: Job, message: Install | Replicate) -> Iterator[Note]:
        """The backup keeps what its primary gave it, if that comes next; yield what may become part of the journal."""
        if isinstance(message, Install):
            if not self.is_installed:
                self.shard, self.is_installed = Shard(job, message.shard, message.state), True
        elif self.is_installed and self.shard is not None and message.position == self.shard.position:
            self.shard.apply(message.entry)
            yield Note(message.shard, message.position, message.entry, is_certain=False)


@dataclass(slots=True)
class Primary:
    """What the first keeper of a shard has.

    Attributes:
        shard: everything that two keep.
        keepers: who they are.
        pending: entries that have a position but that the backup has not yet said it keeps.
        is_installed: whether the backup has the state, while it is not counted yet.
        reads: pulls that wait.
        sent_at: when something was last sent to the backup.
    """

    shard: Shard
    keepers: Keepers
    pending: deque[Entry] = field(default_factory=deque)
    is_installed: bool = False
    reads: dict[tuple[str, int, int], Pull] = field(default_factory=dict)
    sent_at: float = 0.0

    @property
    def is_alone(self) -> bool:
        """Whether the disk is the second place."""
        return self.keepers.is_complete and not self.keepers.backup

    def upcoming(self, change: Change) -> int | None:
        """Return the sequence that comes next from the sender of a request; None where it has no desk here."""
        desk = self.shard.desks.get(change.origin.member)
        if desk is None or desk.incarnation != change.origin.incarnation:
            return None
        waiting = sum(
            not isinstance(entry, Members) and entry.origin.member == change.origin.member for entry in self.pending
        )
        return desk.upcoming + waiting

    def ask(self, origin: Origin, change: Change, now: float) -> Iterator[Action]:
        """Yield what is to be done about a request to change something.

        Args:
            origin: of this server.
            change: the request.
            now: what the clock says.
        """
        upcoming = self.upcoming(change)
        if upcoming is None or not self.keepers.is_complete:
            yield self.refuse(change, "later", f"shard {self.shard.index} is being handed over")
        elif change.origin.sequence == upcoming:
            if len(self.pending) >= MAX_PENDING:
                yield self.refuse(change, "later", f"{len(self.pending)} requests wait for the backup")
            else:
                yield from self.append(origin, change, now)
        else:
            found = self.shard.desks[change.origin.member].answers.get(change.origin.sequence)
            if found is not None:
                yield answer(change.origin, found)

    def refuse(self, request: Change | Pull, reason: Reason, text: str) -> Send:
        """Return the answer that nothing was changed."""
        return answer(request.origin, self.shard.refusal(request, reason, text))

    def append(self, origin: Origin, entry: Entry, now: float) -> Iterator[Action]:
        """Yield what makes an entry part of the journal."""
        if self.is_alone:
            if self.shard.job.is_logged:
                yield Write(log_of(self.shard.index), entry)
            yield from self.apply(entry)
            return
        self.pending.append(entry)
        if self.keepers.backup and (self.keepers.is_complete or self.is_installed):
            position = self.shard.position + len(self.pending) - 1
            self.sent_at = now
            yield Send(self.keepers.backup, Replicate(origin, self.shard.index, position, entry))

    def apply(self, entry: Entry) -> Iterator[Action]:
        """The entry is part of the journal; yield what its sender is told, and reads that it lets go."""
        position = self.shard.position
        told = self.shard.apply(entry)
        yield Note(self.shard.index, position, entry, is_certain=True)
        if told is not None and not isinstance(entry, Members):
            yield answer(entry.origin, told)
        for name, pull in list(self.reads.items()):
            if self.shard.may_read(pull):
                del self.reads[name]
                yield answer(pull.origin, self.shard.read(pull))

    def keep(self, position: int) -> Iterator[Action]:
        """Yield what follows when the backup keeps everything before a position."""
        while self.pending and self.shard.position < position:
            yield from self.apply(self.pending.popleft())

    def pull(self, pull: Pull) -> Iterator[Action]:
        """Yield the answer to a pull, unless it has to wait."""
        if not self.keepers.is_complete:
            yield self.refuse(pull, "later", f"shard {self.shard.index} is being handed over")
            return
        try:
            may_read = self.shard.may_read(pull)
        except ProtocolError as error:
            yield self.refuse(pull, "request", str(error))
            return
        name = pull.origin.member, pull.origin.incarnation, pull.ticket
        if may_read:
            yield answer(pull.origin, self.shard.read(pull))
        elif name in self.reads or len(self.reads) < MAX_READS:
            self.reads[name] = pull
        else:
            yield self.refuse(pull, "later", f"{len(self.reads)} reads wait on shard {self.shard.index}")

    def again(self, origin: Origin, now: float) -> Iterator[Action]:
        """Yield once more what the backup has not answered."""
        self.sent_at = now
        if not self.keepers.backup:
            return
        if not self.keepers.is_complete and not self.is_installed:
            yield Send(self.keepers.backup, Install(origin, self.shard.index, self.shard.state))
            return
        for index, entry in enumerate(self.pending):
            message = Replicate(origin, self.shard.index, self.shard.position + index, entry)
            yield Send(self.keepers.backup, message)


def log_of(shard: int) -> str:
    """Return the name of the log of a shard that is kept alone."""
    return f"shard-{shard}"


def recovered(shard: Shard, lines: Sequence[Entry]) -> Shard:
    """Return the shard after the lines of its log."""
    for line in lines:
        shard.apply(line)
    return shard


def recalled(shard: Shard, lines: Sequence[Entry]) -> Iterator[Note]:
    """Yield the entries of the log that a shard has just been recovered from.

    The life that wrote them may have died after an entry stood in the log, and before it stood in the journal.
    """
    first = shard.position - len(lines)
    for index, entry in enumerate(lines):
        yield Note(shard.index, first + index, entry, is_certain=True)
