"""What a state machine wants to happen. In their order: sends and notes wait for every `AppendLog` before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from counterpoint.ps.message_codec import PsMessage
from counterpoint.ps.messages import (
    Ack,
    CheckpointReply,
    JournalEntry,
    PullReply,
    PushReply,
    Rejected,
    RequestHeader,
    ShardState,
    TaskReply,
)
from counterpoint.ps.write_ahead_log import LogRecord

COORDINATOR = "coordinator"
"""Where messages to the coordinator go."""


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Give a message to a member, or to the coordinator; it may be lost.

    Args:
        to: the name of the member.
        message: what is said.
        life: the incarnation that it is for, and for no other life of that name; 0 for whichever there is.
    """

    to: str
    message: PsMessage
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class AppendLog:
    """Append to the log with this name, durably."""

    log: str
    record: LogRecord


@dataclass(frozen=True, slots=True)
class AppendJournal:
    """An entry has become part of a shard's journal, for those who keep one; a backup's once it is the first."""

    shard: int
    position: int
    entry: JournalEntry
    is_committed: bool


@dataclass(frozen=True, slots=True)
class SaveSnapshot:
    """Write a shard's state, durably, as a part of a cut; of what is sent, `Saved` alone waits for it."""

    snapshot: int
    shard: int
    state: ShardState


@dataclass(frozen=True, slots=True)
class DeliverReply:
    """Give an answer to the program on whose behalf it was asked."""

    reply: PushReply | PullReply | Ack | Rejected | TaskReply | CheckpointReply


@dataclass(frozen=True, slots=True)
class Shutdown:
    """This life is over, with its reason; a new one may begin."""

    reason: str


def reply_to(header: RequestHeader, message: PsMessage) -> SendMessage:
    """Return the answer to who asked: to that life, and to no later one that has the name."""
    return SendMessage(header.member, message, header.incarnation)


PsAction: TypeAlias = SendMessage | AppendLog | AppendJournal | SaveSnapshot | DeliverReply | Shutdown
