"""All that a shard knows, as a value: what a new backup is given, what a cut saves, what recovery starts from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from counterpoint.server.choices import require
from counterpoint.server.messages import (
    Done,
    Enter,
    Init,
    Member,
    Members,
    Origin,
    Push,
    Pushed,
    Refused,
    Rest,
    Spec,
    require_name,
    require_numbers,
    require_rows,
)

Change: TypeAlias = Init | Push | Enter | Rest
"""What a worker asks a shard to change."""

Entry: TypeAlias = Init | Push | Enter | Rest | Members
"""A line of a shard's journal."""


@dataclass(frozen=True, slots=True)
class Clock:
    """How often a worker has pushed a key."""

    worker: str
    count: int

    def __post_init__(self) -> None:
        require_name(self.worker)
        require_numbers(self.count)


@dataclass(frozen=True, slots=True)
class Counts:
    """What a key has counted.

    Args:
        version: updates so far.
        portions: which data, as ``low, high`` of runs without a gap, in order.
        clocks: of the workers that are in.
        floors: ``version, slowest clock`` from that version on, in order.
    """

    version: int
    portions: tuple[int, ...] = ()
    clocks: tuple[Clock, ...] = ()
    floors: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require_numbers(self.version, *self.portions, *self.floors)
        require(len(self.portions) % 2 == 0 and len(self.floors) % 2 == 0, "counts of half a run")
        runs = zip(self.portions, self.portions[1:], strict=False)
        require(all(low < high for low, high in runs), f"runs {self.portions} of portions overlap")


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A gradient of a step that still lacks others."""

    portion: int
    values: Tensor
    rows: Tensor | None = None

    def __post_init__(self) -> None:
        require_numbers(self.portion)
        require_rows(self.rows, "a held gradient")


@dataclass(frozen=True, slots=True, eq=False)
class KeyState:
    """A key: what it is, what it has counted, its numbers and those of its rule, what waits for the rest of a step.

    Args:
        spec: what it is.
        counts: what it has counted.
        parts: its numbers, and those of its rule.
        rows: of a table, that have been pushed, each once, in the order of the parts.
        held: what waits for the rest of a step.
        earlier: the numbers before the last step, where they are kept; of a table those that it changed.
        earlier_rows: which these are.
    """

    spec: Spec
    counts: Counts
    parts: tuple[Tensor, ...]
    rows: Tensor | None = None
    held: tuple[Held, ...] = ()
    earlier: Tensor | None = None
    earlier_rows: Tensor | None = None

    def __post_init__(self) -> None:
        if self.rows is not None:
            found = f"rows of {self.spec.key} as {self.rows.dtype} with {self.rows.dim()} dims"
            require(self.rows.dtype == torch.int64 and self.rows.dim() == 1, found)
        require_rows(self.earlier_rows, self.spec.key)


@dataclass(frozen=True, slots=True)
class Session:
    """What has been answered to one life of a worker: the next sequence, and the answers that may be asked again."""

    worker: str
    incarnation: int
    upcoming: int
    answers: tuple[Pushed | Done | Refused, ...] = ()

    def __post_init__(self) -> None:
        require_name(self.worker)
        require_numbers(self.incarnation, self.upcoming)


@dataclass(frozen=True, slots=True, eq=False)
class ShardState:
    """A shard after so many entries of its journal."""

    position: int
    generation: int
    workers: tuple[Member, ...] = ()
    entered: tuple[str, ...] = ()
    sessions: tuple[Session, ...] = ()
    keys: tuple[KeyState, ...] = ()

    def __post_init__(self) -> None:
        require_numbers(self.position, self.generation)
        for name in self.entered:
            require_name(name)


@dataclass(frozen=True, slots=True, eq=False)
class Install:
    """Be the backup of this shard from here on: its whole state, as of the generation of the origin."""

    origin: Origin
    shard: int
    state: ShardState

    def __post_init__(self) -> None:
        require_numbers(self.shard)


@dataclass(frozen=True, slots=True, eq=False)
class Replicate:
    """Keep the entry with this position of the shard's journal."""

    origin: Origin
    shard: int
    position: int
    entry: Entry

    def __post_init__(self) -> None:
        require_numbers(self.shard, self.position)


@dataclass(frozen=True, slots=True)
class Kept:
    """The backup keeps everything before this position."""

    origin: Origin
    shard: int
    position: int

    def __post_init__(self) -> None:
        require_numbers(self.shard, self.position)
