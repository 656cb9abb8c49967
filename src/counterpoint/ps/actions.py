"""Effects that the state machines request, executed in order.

The state machines (coordinator, server, client) have no effects: ``on_event(message, now)`` returns actions, which
the caller executes. Sends and journal entries wait until every earlier `AppendLog` is durable.
"""

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
"""Recipient name of the coordinator."""


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Send a message to a member or the coordinator; it may be lost.

    Args:
        to: name of the recipient.
        message: to be sent.
        incarnation: the only incarnation that may receive it; 0 for the current one.
    """

    to: str
    message: PsMessage
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class AppendLog:
    """Append a record to the named log, durably."""

    log: str
    record: LogRecord


@dataclass(frozen=True, slots=True)
class AppendJournal:
    """An entry was added to a shard's journal; on a backup it is committed only once the backup becomes the primary."""

    shard: int
    position: int
    entry: JournalEntry
    is_committed: bool


@dataclass(frozen=True, slots=True)
class SaveSnapshot:
    """Save a shard's state durably as part of a snapshot; only the `SnapshotSaved` message waits for it."""

    snapshot: int
    shard: int
    state: ShardState


@dataclass(frozen=True, slots=True)
class DeliverReply:
    """Deliver a reply to the program that made the request."""

    reply: PushReply | PullReply | Ack | Rejected | TaskReply | CheckpointReply


@dataclass(frozen=True, slots=True)
class Shutdown:
    """End this incarnation, for the given reason; a new one may start."""

    reason: str


def reply_to(header: RequestHeader, message: PsMessage) -> SendMessage:
    """Return the action that sends a reply to the incarnation that sent the request."""
    return SendMessage(header.member, message, header.incarnation)


PsAction: TypeAlias = SendMessage | AppendLog | AppendJournal | SaveSnapshot | DeliverReply | Shutdown
