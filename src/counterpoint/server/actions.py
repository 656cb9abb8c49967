"""What a state machine wants to happen. In their order: sends and notes wait for every write before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from counterpoint.server.calls import Leased
from counterpoint.server.form import Message
from counterpoint.server.lines import Line
from counterpoint.server.messages import Done, Pulled, Pushed, Refused
from counterpoint.server.states import Entry, ShardState

COORDINATOR = "coordinator"
"""Where messages to the coordinator go."""


@dataclass(frozen=True, slots=True)
class Send:
    """Give a message to a member, or to the coordinator; it may be lost."""

    to: str
    message: Message


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
    """Write a shard's state, durably, as a part of a cut."""

    cut: int
    shard: int
    state: ShardState


@dataclass(frozen=True, slots=True)
class Deliver:
    """Give an answer to the program on whose behalf it was asked."""

    answer: Pushed | Pulled | Done | Refused | Leased


@dataclass(frozen=True, slots=True)
class Stop:
    """This life is over, with its reason; a new one may begin."""

    text: str


Action: TypeAlias = Send | Write | Note | Save | Deliver | Stop
