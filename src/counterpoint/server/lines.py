"""What is written down: the coordinator's decisions, one line each, and the entries of a shard that is kept alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from counterpoint.server.calls import Keepers, Task
from counterpoint.server.messages import Outcome, Role
from counterpoint.server.states import Entry


@dataclass(frozen=True, slots=True)
class Joined:
    """This life belongs to the job."""

    name: str
    role: Role
    token: int
    incarnation: int
    address: str


@dataclass(frozen=True, slots=True)
class Gone:
    """This member belongs to the job no longer: it said so, or was silent for too long."""

    name: str


@dataclass(frozen=True, slots=True)
class Assigned:
    """These are to keep this shard from now on."""

    shard: int
    keepers: Keepers


@dataclass(frozen=True, slots=True)
class Given:
    """This worker has been given this task, in answer to the request with this sequence; None where all is done."""

    worker: str
    sequence: int
    task: Task | None


@dataclass(frozen=True, slots=True)
class Ended:
    """This worker has said how a task ended, in the request with this sequence."""

    worker: str
    sequence: int
    task: Task
    outcome: Outcome
    version: int
    text: str


@dataclass(frozen=True, slots=True)
class Overdue:
    """This task is to be given again, because its lease is over."""

    task: Task


@dataclass(frozen=True, slots=True)
class Asked:
    """A worker has asked for a cut, in the request with this sequence."""

    worker: str
    sequence: int


@dataclass(frozen=True, slots=True)
class Drained:
    """Nothing is counted by halves; from here on the cut is saved."""

    cut: int


@dataclass(frozen=True, slots=True)
class Stored:
    """The part of a cut that belongs to this shard is saved, as of this position of its journal."""

    cut: int
    shard: int
    position: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The job cannot go on without its last checkpoint, and why."""

    text: str


@dataclass(frozen=True, slots=True)
class Resumed:
    """Everybody is gone, and the job goes on from this cut; what was decided after it is not in the log any more.

    Args:
        cut: which.
        generation: the newest that there was.
        incarnation: the newest life that there was.
    """

    cut: int
    generation: int
    incarnation: int


@dataclass(frozen=True, slots=True, eq=False)
class Noted:
    """This entry has this position in the journal of a shard; for those who keep journals to look at them later.

    Args:
        shard: which.
        position: from 0.
        entry: what stands there.
        handed_on: the generation in which a server handed the entry on without knowing whether it is certain; 0 where
            it is.
    """

    shard: int
    position: int
    entry: Entry
    handed_on: int = 0


Decision: TypeAlias = Joined | Gone | Assigned | Given | Ended | Overdue | Asked | Drained | Stored | Lost | Resumed
Line: TypeAlias = Decision | Entry | Noted
