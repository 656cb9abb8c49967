"""What workers, servers and the coordinator say to each other: frozen values of numbers, names and tensors.

A worker asks a shard (`InitRequest`, `PushRequest`, `JoinClock`, `LeaveClock` change it, in the order of their sequence; `PullRequest` reads) and
the coordinator (`JoinRequest`, `Heartbeat`, `TaskRequest`, `Report`, `LeaveRequest`, `CheckpointRequest`). A primary tells its backup
(`InstallSnapshot`, `ReplicateEntry`) and the coordinator (`BackupReady`, `Saved`). What is well formed by itself is checked here, what
fits a table by the table.

What is said to the coordinator and by it: who belongs to the job, who keeps what, which data is to be worked on.

All that a shard knows, as a value: what a new backup is given, what a cut saves, what recovery starts from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from counterpoint.errors import ProgramError
from counterpoint.fabric.compression import POINT_TO_POINT_CODECS
from counterpoint.program.compression import find_codec
from counterpoint.ps.row_pooling import RowPooling, validate_pooling
from counterpoint.ps.update_rules import Assign, Initializer, UpdateRule, check_request, invalid_request

MAX_NAME = 512
MAX_NUMBER = (1 << 63) - 1
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NO_SLICE = -1

Role: TypeAlias = Literal["worker", "server"]
TaskOutcome: TypeAlias = Literal["done", "failed", "preempted"]
RejectReason: TypeAlias = Literal["generation", "later", "full", "request", "identity", "lost", "over"]
"""Why nothing was changed: another generation; ask again soon; no room; it cannot be meant; the name is taken, or its
owner is not (or no longer) of this job; what it asks for is gone; the whole job is."""


@dataclass(frozen=True, slots=True)
class RequestHeader:
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
    acked_before: int = 0

    def __post_init__(self) -> None:
        validate_name(self.member)
        validate_counts(self.incarnation, self.generation, self.sequence, self.acked_before)
        if self.acked_before > self.sequence:
            raise invalid_request(f"answers up to {self.acked_before} cannot settle request {self.sequence}")


@dataclass(frozen=True, slots=True)
class KeySpec:
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
    rule: UpdateRule
    initializer: Initializer | None = None

    def __post_init__(self) -> None:
        validate_name(self.key)
        validate_counts(self.low, self.high, self.width)
        check_request(
            self.dtype in DTYPES, f"{self.key} of dtype {self.dtype!r}; one of {', '.join(DTYPES)} can be kept"
        )
        check_request(self.low <= self.high, f"{self.key} from {self.low} to {self.high}")
        check_request(
            (self.width > 0) == (self.initializer is not None),
            f"{self.key} needs a start if it has rows, and only then",
        )
        check_request(not self.width or not isinstance(self.rule, Assign), f"rows of {self.key} without an optimizer")


@dataclass(frozen=True, slots=True, eq=False)
class InitRequest:
    """Make a key, unless it is there as described; a range begins as ``value``, rows by their start.

    Args:
        origin: who asks.
        shard: where.
        spec: what the key is.
        value: ``(high - low,)`` for a range, ``(len(rows), width)`` for rows that begin otherwise.
        rows: the numbers of these, int64, ascending and each once; None for a range, or where there are none.
    """

    header: RequestHeader
    shard: int
    spec: KeySpec
    value: Tensor | None = None
    rows: Tensor | None = None

    def __post_init__(self) -> None:
        validate_counts(self.shard)
        validate_rows(self.rows, self.spec.key)
        spec, value, rows = self.spec, self.value, self.rows
        has_value = rows is not None if spec.width else rows is None
        check_request(
            (value is not None) == has_value, f"{spec.key} begins as a tensor if it is a range, or for given rows"
        )
        if value is not None:
            check_request(value.dtype == DTYPES[spec.dtype], f"{spec.key} of {spec.dtype} begins as {value.dtype}")
            expected = (spec.high - spec.low,) if rows is None else (len(rows), spec.width)
            check_request(tuple(value.shape) == expected, f"{spec.key} of {expected} begins as {tuple(value.shape)}")


@dataclass(frozen=True, slots=True, eq=False)
class PushRequest:
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

    header: RequestHeader
    shard: int
    key: str
    slice_index: int
    read_version: int
    values: Tensor
    rows: Tensor | None = None
    codec: str = ""
    pooling: RowPooling | None = None

    def __post_init__(self) -> None:
        validate_name(self.key)
        validate_counts(self.shard, self.read_version, self.slice_index + 1)
        validate_rows(self.rows, self.key)
        if self.codec:
            check_request(self.pooling is None, f"sums pushed to {self.key} in a code")
            validate_encoded(self)
            return
        dims = 1 if self.rows is None else 2
        if self.values.dim() != dims or self.values.dtype not in DTYPES.values():
            raise invalid_request(f"a push to {self.key} of {self.values.dtype} {tuple(self.values.shape)}")
        if self.pooling is not None:
            validate_pooling(self.pooling, self.key, self.rows, self.values)
        elif self.rows is not None and self.rows.shape[0] != self.values.shape[0]:
            raise invalid_request(f"{len(self.rows)} rows and {len(self.values)} values pushed to {self.key}")


def validate_encoded(push: PushRequest) -> None:
    """The values are bytes of a range in a code that stands for itself."""
    try:
        is_known = find_codec(push.codec).name in POINT_TO_POINT_CODECS
    except ProgramError:
        is_known = False
    check_request(
        is_known,
        f"a push to {push.key} in the code {push.codec[:40]!r}; the codes are {', '.join(POINT_TO_POINT_CODECS)}",
    )
    fits = push.rows is None and push.values.dim() == 1 and push.values.dtype == torch.uint8
    check_request(fits, f"a push to {push.key} in {push.codec} of {push.values.dtype} with {push.values.dim()} dims")


@dataclass(frozen=True, slots=True, eq=False)
class PullRequest:
    """Read a key, once it has the version and the clocks allow it.

    Args:
        origin: who asks; what it asked to change before is seen.
        shard: where.
        key: of which key.
        ticket: what the answer repeats.
        least: the version that the key must have at least; under bsp the step.
        rows: their numbers, int64, ascending and each once; None for a range.
        is_exact: whether this very version is wanted, where the key has just passed it; see `tables.PreviousVersion`.
        sums: of the rows, which are wanted instead of them; None for the rows themselves.
    """

    header: RequestHeader
    shard: int
    key: str
    ticket: int
    min_version: int = 0
    rows: Tensor | None = None
    exact_version: bool = False
    pooling: RowPooling | None = None

    def __post_init__(self) -> None:
        validate_name(self.key)
        validate_counts(self.shard, self.ticket, self.min_version)
        validate_rows(self.rows, self.key)
        if self.pooling is not None:
            validate_pooling(self.pooling, self.key, self.rows)


@dataclass(frozen=True, slots=True)
class JoinClock:
    """Wait for this worker from now on (ssp); it begins at the slowest clock of those that are in."""

    header: RequestHeader
    shard: int

    def __post_init__(self) -> None:
        validate_counts(self.shard)


@dataclass(frozen=True, slots=True)
class LeaveClock:
    """Wait for this worker no longer (ssp), until it enters again."""

    header: RequestHeader
    shard: int

    def __post_init__(self) -> None:
        validate_counts(self.shard)


@dataclass(frozen=True, slots=True)
class JobMember:
    """Somebody who belongs to the job: a name, one of its lives, and where it is reached."""

    name: str
    incarnation: int
    address: str = ""

    def __post_init__(self) -> None:
        validate_name(self.name)
        validate_counts(self.incarnation)
        check_request(len(self.address) <= MAX_NAME, f"the address of {self.name} has {len(self.address)} letters")


@dataclass(frozen=True, slots=True)
class SetMembers:
    """From here on these workers belong to the job, and requests of this generation are heard."""

    generation: int
    workers: tuple[JobMember, ...]

    def __post_init__(self) -> None:
        validate_counts(self.generation)


@dataclass(frozen=True, slots=True)
class PushReply:
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
        validate_counts(self.shard, self.sequence, self.version)


@dataclass(frozen=True, slots=True, eq=False)
class PullReply:
    """What a key is; ``values`` as in `Push`."""

    shard: int
    ticket: int
    key: str
    version: int
    values: Tensor

    def __post_init__(self) -> None:
        validate_name(self.key)
        validate_counts(self.shard, self.ticket, self.version)
        check_request(self.values.dtype in DTYPES.values(), f"{self.key} comes as {self.values.dtype}")


@dataclass(frozen=True, slots=True)
class Ack:
    """The request with this sequence has been carried out; ``shard`` is -1 for the coordinator's answers."""

    shard: int
    sequence: int

    def __post_init__(self) -> None:
        validate_counts(self.shard + 1, self.sequence)


@dataclass(frozen=True, slots=True)
class Rejected:
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
    reason: RejectReason
    text: str
    generation: int

    def __post_init__(self) -> None:
        validate_counts(self.shard + 1, self.sequence, self.generation)


def validate_name(name: str) -> None:
    """It names something: printable and not too long."""
    if not (0 < len(name) <= MAX_NAME and name.isprintable()):
        raise invalid_request(f"a name of {len(name)} letters, {name[:40]!r}")


def validate_counts(*counts: int) -> None:
    """They count something."""
    for number in counts:
        if not 0 <= number <= MAX_NUMBER:
            raise invalid_request(f"numbers {counts} that count nothing")


def validate_rows(rows: Tensor | None, key: str) -> None:
    """They are numbers of rows, ascending and each once, if there are any."""
    if rows is None:
        return
    if rows.dtype != torch.int64 or rows.dim() != 1:
        raise invalid_request(f"rows of {key} as {rows.dtype} with {rows.dim()} dims")
    numbers = rows.numpy()
    if numbers.size and not (numbers[0] >= 0 and (numbers[1:] > numbers[:-1]).all()):
        raise invalid_request(f"rows of {key} that do not ascend from 0")


@dataclass(frozen=True, slots=True)
class JoinRequest:
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
    job_digest: str
    address: str = ""

    def __post_init__(self) -> None:
        validate_name(self.name)
        validate_name(self.job_digest)
        validate_counts(self.token)


@dataclass(frozen=True, slots=True)
class ShardReplicas:
    """Who keeps a shard.

    Args:
        primary: who answers.
        backup: who has everything too, once it is complete; empty where there is none.
        is_complete: whether it is. Until then nothing is answered.
        former: whose copy is as good as the primary's until then; empty where there is none.
    """

    primary: str
    backup: str = ""
    is_backup_ready: bool = False
    former_replica: str = ""

    def __post_init__(self) -> None:
        validate_name(self.primary)
        check_request(self.backup != self.primary, f"{self.primary} cannot be its own backup")


@dataclass(frozen=True, slots=True)
class MembershipView:
    """Who belongs to the job, and who keeps which shard, in this generation; the larger generation is the truth."""

    generation: int
    workers: tuple[JobMember, ...] = ()
    servers: tuple[JobMember, ...] = ()
    replicas: tuple[ShardReplicas, ...] = ()

    def __post_init__(self) -> None:
        validate_counts(self.generation)


@dataclass(frozen=True, slots=True)
class JoinReply:
    """The life that drew this token belongs to the job and has this incarnation."""

    token: int
    incarnation: int
    view: MembershipView

    def __post_init__(self) -> None:
        validate_counts(self.token, self.incarnation)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """I live; the answer is the view, where mine is older."""

    header: RequestHeader


@dataclass(frozen=True, slots=True)
class TaskRequest:
    """Give me a task."""

    header: RequestHeader


@dataclass(frozen=True, slots=True)
class DataTask:
    """Data to be worked on: portions ``start`` to ``stop`` (not included) of an epoch, and how often it was begun."""

    epoch: int
    start: int
    stop: int
    attempt: int = 0

    def __post_init__(self) -> None:
        validate_counts(self.epoch, self.start, self.stop, self.attempt)
        check_request(self.start < self.stop, f"a task of portions {self.start} to {self.stop}")


@dataclass(frozen=True, slots=True)
class TaskReply:
    """The answer to a lease: a task for a limited time; None where all data of all epochs has been counted."""

    sequence: int
    task: DataTask | None

    def __post_init__(self) -> None:
        validate_counts(self.sequence)


@dataclass(frozen=True, slots=True)
class TaskReport:
    """How a task ended.

    Args:
        origin: who had it.
        task: which.
        outcome: done, when every push of it has been answered; failed or preempted, when it is to be given again.
        version: the newest that its pushes produced.
        text: why, if it failed.
    """

    header: RequestHeader
    task: DataTask
    outcome: TaskOutcome
    version: int = 0
    text: str = ""

    def __post_init__(self) -> None:
        validate_counts(self.version)


@dataclass(frozen=True, slots=True)
class LeaveRequest:
    """I go, of my own will or because my machine is taken away; what I have leased is preempted."""

    header: RequestHeader


@dataclass(frozen=True, slots=True)
class BackupReady:
    """The backup of this shard has everything, in the generation of the origin."""

    header: RequestHeader
    shard: int

    def __post_init__(self) -> None:
        validate_counts(self.shard)


@dataclass(frozen=True, slots=True)
class CheckpointRequest:
    """Save everything at a moment in which nothing is counted by halves."""

    header: RequestHeader


@dataclass(frozen=True, slots=True)
class CheckpointReply:
    """The answer to a checkpoint: it will be this cut, once nothing is counted by halves."""

    sequence: int
    snapshot: int

    def __post_init__(self) -> None:
        validate_counts(self.sequence, self.snapshot)


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """Save your shards now, as this cut."""

    generation: int
    snapshot: int

    def __post_init__(self) -> None:
        validate_counts(self.generation, self.snapshot)


@dataclass(frozen=True, slots=True)
class SnapshotSaved:
    """The shard is durably saved for this cut, as of this position of its journal."""

    header: RequestHeader
    shard: int
    snapshot: int
    position: int

    def __post_init__(self) -> None:
        validate_counts(self.shard, self.snapshot, self.position)


WriteRequest: TypeAlias = InitRequest | PushRequest | JoinClock | LeaveClock
"""What a worker asks a shard to change."""

JournalEntry: TypeAlias = InitRequest | PushRequest | JoinClock | LeaveClock | SetMembers
"""A line of a shard's journal."""


@dataclass(frozen=True, slots=True)
class WorkerClock:
    """How often a worker has pushed a key."""

    worker: str
    count: int

    def __post_init__(self) -> None:
        validate_name(self.worker)
        validate_counts(self.count)


@dataclass(frozen=True, slots=True)
class KeyProgress:
    """What a key has counted.

    Args:
        version: updates so far.
        portions: which data, as ``low, high`` of runs without a gap, in order.
        clocks: of the workers that are in.
        floors: ``version, slowest clock`` from that version on, in order.
    """

    version: int
    applied_slices: tuple[int, ...] = ()
    clocks: tuple[WorkerClock, ...] = ()
    min_clocks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        validate_counts(self.version, *self.applied_slices, *self.min_clocks)
        check_request(len(self.applied_slices) % 2 == 0 and len(self.min_clocks) % 2 == 0, "counts of half a run")
        runs = zip(self.applied_slices, self.applied_slices[1:], strict=False)
        check_request(all(low < high for low, high in runs), f"runs {self.applied_slices} of portions overlap")


@dataclass(frozen=True, slots=True, eq=False)
class PendingGradient:
    """A gradient of a step that still lacks others."""

    slice_index: int
    values: Tensor
    rows: Tensor | None = None

    def __post_init__(self) -> None:
        validate_counts(self.slice_index)
        validate_rows(self.rows, "a held gradient")


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

    spec: KeySpec
    progress: KeyProgress
    tensors: tuple[Tensor, ...]
    rows: Tensor | None = None
    pending: tuple[PendingGradient, ...] = ()
    previous: Tensor | None = None
    previous_rows: Tensor | None = None

    def __post_init__(self) -> None:
        if self.rows is not None:
            found = f"rows of {self.spec.key} as {self.rows.dtype} with {self.rows.dim()} dims"
            check_request(self.rows.dtype == torch.int64 and self.rows.dim() == 1, found)
        validate_rows(self.previous_rows, self.spec.key)


@dataclass(frozen=True, slots=True)
class ClientState:
    """What has been answered to one life of a worker: the next sequence, and the answers that may be asked again."""

    worker: str
    incarnation: int
    next_sequence: int
    replies: tuple[PushReply | Ack | Rejected, ...] = ()

    def __post_init__(self) -> None:
        validate_name(self.worker)
        validate_counts(self.incarnation, self.next_sequence)


@dataclass(frozen=True, slots=True, eq=False)
class ShardState:
    """A shard after so many entries of its journal."""

    position: int
    generation: int
    workers: tuple[JobMember, ...] = ()
    clock_members: tuple[str, ...] = ()
    clients: tuple[ClientState, ...] = ()
    keys: tuple[KeyState, ...] = ()

    def __post_init__(self) -> None:
        validate_counts(self.position, self.generation)
        for name in self.clock_members:
            validate_name(name)


@dataclass(frozen=True, slots=True, eq=False)
class InstallSnapshot:
    """Be the backup of this shard from here on: its whole state, as of the generation of the origin."""

    header: RequestHeader
    shard: int
    state: ShardState

    def __post_init__(self) -> None:
        validate_counts(self.shard)


@dataclass(frozen=True, slots=True, eq=False)
class ReplicateEntry:
    """Keep the entry with this position of the shard's journal."""

    header: RequestHeader
    shard: int
    position: int
    entry: JournalEntry

    def __post_init__(self) -> None:
        validate_counts(self.shard, self.position)


@dataclass(frozen=True, slots=True)
class ReplicationAck:
    """The backup keeps everything before this position."""

    header: RequestHeader
    shard: int
    position: int

    def __post_init__(self) -> None:
        validate_counts(self.shard, self.position)
