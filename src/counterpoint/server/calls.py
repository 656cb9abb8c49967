"""What is said to the coordinator and by it: who belongs to the job, who keeps what, which data is to be worked on."""

from __future__ import annotations

from dataclasses import dataclass

from counterpoint.server.choices import require
from counterpoint.server.messages import Member, Origin, Outcome, Role, require_name, require_numbers


@dataclass(frozen=True, slots=True)
class Hello:
    """Let me belong to the job.

    Args:
        name: of the worker or server; one at a time may have it.
        role: which of the two.
        token: a number that this life has drawn, so that a repeated hello is known.
        job: what the job is, as :meth:`Job.digest` writes it; all must have the same.
        address: where others reach it.
    """

    name: str
    role: Role
    token: int
    job: str
    address: str = ""

    def __post_init__(self) -> None:
        require_name(self.name)
        require_name(self.job)
        require_numbers(self.token)


@dataclass(frozen=True, slots=True)
class Keepers:
    """Who keeps a shard.

    Args:
        primary: who answers.
        backup: who has everything too, once it is complete; empty where there is none.
        is_complete: whether it is. Until then nothing is answered.
        former: whose copy is as good as the primary's until then; empty where there is none.
    """

    primary: str
    backup: str = ""
    is_complete: bool = False
    former: str = ""

    def __post_init__(self) -> None:
        require_name(self.primary)
        require(self.backup != self.primary, f"{self.primary} cannot be its own backup")


@dataclass(frozen=True, slots=True)
class View:
    """Who belongs to the job, and who keeps which shard, in this generation; the larger generation is the truth."""

    generation: int
    workers: tuple[Member, ...] = ()
    servers: tuple[Member, ...] = ()
    shards: tuple[Keepers, ...] = ()

    def __post_init__(self) -> None:
        require_numbers(self.generation)


@dataclass(frozen=True, slots=True)
class Welcome:
    """The life that drew this token belongs to the job and has this incarnation."""

    token: int
    incarnation: int
    view: View

    def __post_init__(self) -> None:
        require_numbers(self.token, self.incarnation)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """I live; the answer is the view, where mine is older."""

    origin: Origin


@dataclass(frozen=True, slots=True)
class Lease:
    """Give me a task."""

    origin: Origin


@dataclass(frozen=True, slots=True)
class Task:
    """Data to be worked on: portions ``start`` to ``stop`` (not included) of an epoch, and how often it was begun."""

    epoch: int
    start: int
    stop: int
    attempt: int = 0

    def __post_init__(self) -> None:
        require_numbers(self.epoch, self.start, self.stop, self.attempt)
        require(self.start < self.stop, f"a task of portions {self.start} to {self.stop}")


@dataclass(frozen=True, slots=True)
class Leased:
    """The answer to a lease: a task for a limited time; None where all data of all epochs has been counted."""

    sequence: int
    task: Task | None

    def __post_init__(self) -> None:
        require_numbers(self.sequence)


@dataclass(frozen=True, slots=True)
class Report:
    """How a task ended.

    Args:
        origin: who had it.
        task: which.
        outcome: done, when every push of it has been answered; failed or preempted, when it is to be given again.
        version: the newest that its pushes produced.
        text: why, if it failed.
    """

    origin: Origin
    task: Task
    outcome: Outcome
    version: int = 0
    text: str = ""

    def __post_init__(self) -> None:
        require_numbers(self.version)


@dataclass(frozen=True, slots=True)
class Leave:
    """I go, of my own will or because my machine is taken away; what I have leased is preempted."""

    origin: Origin


@dataclass(frozen=True, slots=True)
class Complete:
    """The backup of this shard has everything, in the generation of the origin."""

    origin: Origin
    shard: int

    def __post_init__(self) -> None:
        require_numbers(self.shard)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Save everything at a moment in which nothing is counted by halves."""

    origin: Origin


@dataclass(frozen=True, slots=True)
class Promised:
    """The answer to a checkpoint: it will be this cut, once nothing is counted by halves."""

    sequence: int
    cut: int

    def __post_init__(self) -> None:
        require_numbers(self.sequence, self.cut)


@dataclass(frozen=True, slots=True)
class Cut:
    """Save your shards now, as this cut."""

    generation: int
    cut: int

    def __post_init__(self) -> None:
        require_numbers(self.generation, self.cut)


@dataclass(frozen=True, slots=True)
class Saved:
    """The shard is durably saved for this cut, as of this position of its journal."""

    origin: Origin
    shard: int
    cut: int
    position: int

    def __post_init__(self) -> None:
        require_numbers(self.shard, self.cut, self.position)
