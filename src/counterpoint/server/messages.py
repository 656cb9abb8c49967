"""What workers, servers and the coordinator say to each other: frozen values of numbers, names and tensors.

A worker asks a shard (`Init`, `Push`, `Enter`, `Rest` change it, in the order of their sequence; `Pull` reads) and
the coordinator (`Hello`, `Heartbeat`, `Lease`, `Report`, `Leave`, `Checkpoint`). A primary tells its backup
(`Install`, `Replicate`) and the coordinator (`Complete`, `Saved`). What is well formed by itself is checked here, what
fits a table by the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from counterpoint.errors import ProgramError
from counterpoint.fabric.coding import ALONE
from counterpoint.program.codes import find_code
from counterpoint.server.choices import Aggregate, Rule, Start, require, unmeant
from counterpoint.server.sums import Sums, require_sums

MAX_NAME = 512
MAX_NUMBER = (1 << 63) - 1
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NO_PORTION = -1

Role: TypeAlias = Literal["worker", "server"]
Outcome: TypeAlias = Literal["done", "failed", "preempted"]
Reason: TypeAlias = Literal["generation", "later", "full", "request", "identity", "lost", "over"]
"""Why nothing was changed: another generation; ask again soon; no room; it cannot be meant; the name is taken, or its
owner is not (or no longer) of this job; what it asks for is gone; the whole job is."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Who asks.

    Args:
        member: the name of the worker or server.
        incarnation: which of its lives, a number that no other life of any member has.
        generation: the newest it knows.
        sequence: the number of this request among those of this life that change the shard (or the coordinator); a
            request that only reads has the number of the next that will change, and sees all before it.
        settled: answers up to here (this number not included) have arrived, and need not be remembered.
    """

    member: str
    incarnation: int
    generation: int
    sequence: int = 0
    settled: int = 0

    def __post_init__(self) -> None:
        require_name(self.member)
        require_numbers(self.incarnation, self.generation, self.sequence, self.settled)
        if self.settled > self.sequence:
            raise unmeant(f"answers up to {self.settled} cannot settle request {self.sequence}")


@dataclass(frozen=True, slots=True)
class Spec:
    """What a key is.

    Args:
        key: its name.
        dtype: of its numbers and of what is pushed.
        low: the first element that the shard keeps, of the key as a flat tensor; 0 for rows.
        high: the end of what it keeps; for rows, the number of rows over all shards.
        width: numbers of a row; 0 for a range.
        rule: how a push changes it.
        start: how rows begin; None for a range, which begins as it is made.
    """

    key: str
    dtype: str
    low: int
    high: int
    width: int
    rule: Rule
    start: Start | None = None

    def __post_init__(self) -> None:
        require_name(self.key)
        require_numbers(self.low, self.high, self.width)
        require(self.dtype in DTYPES, f"{self.key} of dtype {self.dtype!r}; one of {', '.join(DTYPES)} can be kept")
        require(self.low <= self.high, f"{self.key} from {self.low} to {self.high}")
        require((self.width > 0) == (self.start is not None), f"{self.key} needs a start if it has rows, and only then")
        require(not self.width or not isinstance(self.rule, Aggregate), f"rows of {self.key} without an optimizer")


@dataclass(frozen=True, slots=True, eq=False)
class Init:
    """Make a key, unless it is there as described; a range begins as ``value``, rows by their start.

    Args:
        origin: who asks.
        shard: where.
        spec: what the key is.
        value: ``(high - low,)`` for a range, ``(len(rows), width)`` for rows that begin otherwise.
        rows: the numbers of these, int64, ascending and each once; None for a range, or where there are none.
    """

    origin: Origin
    shard: int
    spec: Spec
    value: Tensor | None = None
    rows: Tensor | None = None

    def __post_init__(self) -> None:
        require_numbers(self.shard)
        require_rows(self.rows, self.spec.key)
        spec, value, rows = self.spec, self.value, self.rows
        has_value = rows is not None if spec.width else rows is None
        require((value is not None) == has_value, f"{spec.key} begins as a tensor if it is a range, or for given rows")
        if value is not None:
            require(value.dtype == DTYPES[spec.dtype], f"{spec.key} of {spec.dtype} begins as {value.dtype}")
            expected = (spec.high - spec.low,) if rows is None else (len(rows), spec.width)
            require(tuple(value.shape) == expected, f"{spec.key} of {expected} begins as {tuple(value.shape)}")


@dataclass(frozen=True, slots=True, eq=False)
class Push:
    """Count a gradient.

    Args:
        origin: who asks.
        shard: where.
        key: of which key.
        portion: the data it comes from, counted over the whole run; -1 where that has no name.
        read: the version of the key it was computed from.
        values: ``(high - low,)`` for a range, ``(len(rows), width)`` for rows; the bytes of a code.
        rows: their numbers, int64, ascending and each once; None for a range.
        code: how a range is written, as ``int8``; empty for as it is.
        sums: of which values each row's gradient is the sum; None where each row has a value of its own.
    """

    origin: Origin
    shard: int
    key: str
    portion: int
    read: int
    values: Tensor
    rows: Tensor | None = None
    code: str = ""
    sums: Sums | None = None

    def __post_init__(self) -> None:
        require_name(self.key)
        require_numbers(self.shard, self.read, self.portion + 1)
        require_rows(self.rows, self.key)
        if self.code:
            require(self.sums is None, f"sums pushed to {self.key} in a code")
            require_written(self)
            return
        dims = 1 if self.rows is None else 2
        if self.values.dim() != dims or self.values.dtype not in DTYPES.values():
            raise unmeant(f"a push to {self.key} of {self.values.dtype} {tuple(self.values.shape)}")
        if self.sums is not None:
            require_sums(self.sums, self.key, self.rows, self.values)
        elif self.rows is not None and self.rows.shape[0] != self.values.shape[0]:
            raise unmeant(f"{len(self.rows)} rows and {len(self.values)} values pushed to {self.key}")


def require_written(push: Push) -> None:
    """The values are bytes of a range in a code that stands for itself."""
    try:
        is_known = find_code(push.code).name in ALONE
    except ProgramError:
        is_known = False
    require(is_known, f"a push to {push.key} in the code {push.code[:40]!r}; the codes are {', '.join(ALONE)}")
    fits = push.rows is None and push.values.dim() == 1 and push.values.dtype == torch.uint8
    require(fits, f"a push to {push.key} in {push.code} of {push.values.dtype} with {push.values.dim()} dims")


@dataclass(frozen=True, slots=True, eq=False)
class Pull:
    """Read a key, once it has the version and the clocks allow it.

    Args:
        origin: who asks; what it asked to change before is seen.
        shard: where.
        key: of which key.
        ticket: what the answer repeats.
        least: the version that the key must have at least; under bsp the step.
        rows: their numbers, int64, ascending and each once; None for a range.
        is_exact: whether this very version is wanted, where the key has just passed it; see `tables.Earlier`.
        sums: of the rows, which are wanted instead of them; None for the rows themselves.
    """

    origin: Origin
    shard: int
    key: str
    ticket: int
    least: int = 0
    rows: Tensor | None = None
    is_exact: bool = False
    sums: Sums | None = None

    def __post_init__(self) -> None:
        require_name(self.key)
        require_numbers(self.shard, self.ticket, self.least)
        require_rows(self.rows, self.key)
        if self.sums is not None:
            require_sums(self.sums, self.key, self.rows)


@dataclass(frozen=True, slots=True)
class Enter:
    """Wait for this worker from now on (ssp); it begins at the slowest clock of those that are in."""

    origin: Origin
    shard: int

    def __post_init__(self) -> None:
        require_numbers(self.shard)


@dataclass(frozen=True, slots=True)
class Rest:
    """Wait for this worker no longer (ssp), until it enters again."""

    origin: Origin
    shard: int

    def __post_init__(self) -> None:
        require_numbers(self.shard)


@dataclass(frozen=True, slots=True)
class Member:
    """Somebody who belongs to the job: a name, one of its lives, and where it is reached."""

    name: str
    incarnation: int
    address: str = ""

    def __post_init__(self) -> None:
        require_name(self.name)
        require_numbers(self.incarnation)
        require(len(self.address) <= MAX_NAME, f"the address of {self.name} has {len(self.address)} letters")


@dataclass(frozen=True, slots=True)
class Members:
    """From here on these workers belong to the job, and requests of this generation are heard."""

    generation: int
    workers: tuple[Member, ...]

    def __post_init__(self) -> None:
        require_numbers(self.generation)


@dataclass(frozen=True, slots=True)
class Pushed:
    """The push is counted and is not lost with a server.

    Args:
        shard: where.
        sequence: of the push.
        version: of the key afterwards.
        is_new: whether it was counted now; not, if its portion had been counted before.
    """

    shard: int
    sequence: int
    version: int
    is_new: bool = True

    def __post_init__(self) -> None:
        require_numbers(self.shard, self.sequence, self.version)


@dataclass(frozen=True, slots=True, eq=False)
class Pulled:
    """What a key is; ``values`` as in `Push`."""

    shard: int
    ticket: int
    key: str
    version: int
    values: Tensor

    def __post_init__(self) -> None:
        require_name(self.key)
        require_numbers(self.shard, self.ticket, self.version)
        require(self.values.dtype in DTYPES.values(), f"{self.key} comes as {self.values.dtype}")


@dataclass(frozen=True, slots=True)
class Done:
    """The request with this sequence has been carried out; ``shard`` is -1 for the coordinator's answers."""

    shard: int
    sequence: int

    def __post_init__(self) -> None:
        require_numbers(self.shard + 1, self.sequence)


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing was changed.

    Args:
        shard: where; -1 for the coordinator.
        sequence: of the request, or the ticket of a pull.
        is_pull: which of the two.
        reason: what to do about it, as a program reads it.
        text: the same for people.
        generation: the newest that the answerer knows.
    """

    shard: int
    sequence: int
    is_pull: bool
    reason: Reason
    text: str
    generation: int

    def __post_init__(self) -> None:
        require_numbers(self.shard + 1, self.sequence, self.generation)


def require_name(name: str) -> None:
    """It names something: printable and not too long."""
    if not (0 < len(name) <= MAX_NAME and name.isprintable()):
        raise unmeant(f"a name of {len(name)} letters, {name[:40]!r}")


def require_numbers(*numbers: int) -> None:
    """They count something."""
    for number in numbers:
        if not 0 <= number <= MAX_NUMBER:
            raise unmeant(f"numbers {numbers} that count nothing")


def require_rows(rows: Tensor | None, key: str) -> None:
    """They are numbers of rows, ascending and each once, if there are any."""
    if rows is None:
        return
    if rows.dtype != torch.int64 or rows.dim() != 1:
        raise unmeant(f"rows of {key} as {rows.dtype} with {rows.dim()} dims")
    numbers = rows.numpy()
    if numbers.size and not (numbers[0] >= 0 and (numbers[1:] > numbers[:-1]).all()):
        raise unmeant(f"rows of {key} that do not ascend from 0")
