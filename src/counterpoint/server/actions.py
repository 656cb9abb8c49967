"""What a state machine wants to happen. In their order: sends and notes wait for every `Write` before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from counterpoint.server.calls import Leased, Promised
from counterpoint.server.form import Message
from counterpoint.server.lines import Line
from counterpoint.server.messages import Done, Origin, Pulled, Pushed, Refused
from counterpoint.server.states import Entry, ShardState

COORDINATOR = "coordinator"
"""Where messages to the coordinator go."""


@dataclass(frozen=True, slots=True)
class Send:
    """Give a message to a member, or to the coordinator; it may be lost.

    Args:
        to: the name of the member.
        message: what is said.
        life: the incarnation that it is for, and for no other life of that name; 0 for whichever there is.
    """

    to: str
    message: Message
    life: int = 0


@dataclass(frozen=True, slots=True)
class Write:
    """Append to the log with this name, durably."""

    log: str
    line: Line


@dataclass(frozen=True, slots=True)
class Note:
    """An entry has become part of a shard's journal, for those who keep one; a backup's once it is the first."""

    shard: int
    position: int
    entry: Entry
    is_certain: bool


@dataclass(frozen=True, slots=True)
class Save:
    """Write a shard's state, durably, as a part of a cut; of what is sent, `Saved` alone waits for it."""

    cut: int
    shard: int
    state: ShardState


@dataclass(frozen=True, slots=True)
class Deliver:
    """Give an answer to the program on whose behalf it was asked."""

    answer: Pushed | Pulled | Done | Refused | Leased | Promised


@dataclass(frozen=True, slots=True)
class Stop:
    """This life is over, with its reason; a new one may begin."""

    text: str


def answer(origin: Origin, message: Message) -> Send:
    """Return the answer to who asked: to that life, and to no later one that has the name."""
    return Send(origin.member, message, origin.incarnation)


Action: TypeAlias = Send | Write | Note | Save | Deliver | Stop
