"""Messages of the parameter-server protocol, and the state values that they and snapshots carry.

All are frozen dataclasses of numbers, names and tensors. Each checks here what can be checked without other state; the
shard that receives a message checks it against its keys::

    worker  -> shard        InitRequest, PushRequest, JoinClock, LeaveClock (writes, in sequence), PullRequest (read)
    worker  -> coordinator  JoinRequest, Heartbeat, TaskRequest, TaskReport, CheckpointRequest, LeaveRequest
    primary -> backup       InstallSnapshot, ReplicateEntry; the backup answers with ReplicationAck
    server  -> coordinator  JoinRequest, Heartbeat, BackupReady, SnapshotSaved
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from msgspec import Struct
from torch import Tensor

from counterpoint.errors import ProgramError
from counterpoint.fabric.compression import POINT_TO_POINT_CODECS
from counterpoint.program.compression import find_codec
from counterpoint.ps.row_pooling import RowPooling, validate_pooling
from counterpoint.ps.update_rules import Assign, Initializer, UpdateRule, check_request, invalid_request

MAX_NAME = 512
MAX_NUMBER = (1 << 63) - 1
MAX_WIDTH = 1 << 24  # elements of a row
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Role: TypeAlias = Literal["worker", "server"]
TaskOutcome: TypeAlias = Literal["done", "failed", "preempted"]
RejectReason: TypeAlias = Literal["generation", "later", "full", "request", "identity", "lost", "over"]
"""Why a request was rejected, with no state changed:

``generation``: sent for another membership generation; ``later``: retry soon; ``full``: out of memory; ``request``:
invalid; ``identity``: the name is taken, or the sender does not belong to the job; ``lost``: what it needs is lost;
``over``: the whole job has stopped.
"""


class RequestHeader(Struct, frozen=True, forbid_unknown_fields=True):
    """Sender of a request, and its position in the sender's sequence.

    Args:
        member: name of the worker or server.
        incarnation: which start of that member, unique over all members.
        generation: newest membership generation that the sender knows.
        sequence: number of this write among the sender's writes to the shard (or calls to the coordinator). A read
            carries the number of the next write, and sees all earlier ones.
        acked_before: replies to sequences below this have arrived and need not be kept.
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
            raise invalid_request(f"acked_before={self.acked_before} is beyond sequence {self.sequence}")


class KeySpec(Struct, frozen=True, forbid_unknown_fields=True):
    """Definition of a key on one shard.

    Args:
        key: its name.
        dtype: of its values and of pushed gradients.
        low: first element that the shard holds, of the flattened key; 0 for rows.
        high: end of that range; for rows, the number of rows over all shards.
        width: elements per row; 0 for a dense key.
        rule: how a push updates it.
        initializer: how rows are initialized; None for a dense key, which is created with its value.
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
            self.width <= MAX_WIDTH, f"rows of {self.key} with {self.width} elements; at most {MAX_WIDTH} fit"
        )
        check_request(self.dtype in DTYPES, f"{self.key} of dtype {self.dtype!r}; supported are {', '.join(DTYPES)}")
        check_request(self.low <= self.high, f"{self.key} has the range [{self.low}, {self.high})")
        check_request(
            (self.width > 0) == (self.initializer is not None),
            f"{self.key} needs an initializer if it has rows, and only then",
        )
        check_request(not self.width or not isinstance(self.rule, Assign), f"rows of {self.key} without an optimizer")


class InitRequest(Struct, frozen=True, forbid_unknown_fields=True, eq=False, tag=str.lower):
    """Create a key, unless it exists with the same definition.

    Args:
        header: of the sender.
        shard: index of the shard.
        spec: definition of the key.
        value: ``(high - low,)`` for a dense key; ``(len(rows), width)`` for rows with given initial values.
        rows: ids of these rows, int64, strictly ascending; None for a dense key, or if no row is given.
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
            (value is not None) == has_value,
            f"{spec.key} needs a value if it is dense or rows are given, and only then",
        )
        if value is not None:
            check_request(
                value.dtype == DTYPES[spec.dtype], f"{spec.key} of {spec.dtype} is initialized with {value.dtype}"
            )
            expected = (spec.high - spec.low,) if rows is None else (len(rows), spec.width)
            check_request(
                tuple(value.shape) == expected,
                f"{spec.key} of shape {expected} is initialized with {tuple(value.shape)}",
            )


class PushRequest(Struct, frozen=True, forbid_unknown_fields=True, eq=False, tag=str.lower):
    """Apply a gradient.

    Args:
        header: of the sender.
        shard: index of the shard.
        key: name of the key.
        slice_index: data slice it was computed from, counted over the whole run; -1 if it has none.
        read_version: version of the key it was computed from.
        values: ``(high - low,)`` for a dense key, ``(len(rows), width)`` for rows, or the bytes of a codec.
        rows: row ids, int64, strictly ascending; None for a dense key.
        codec: compression codec of a dense key, such as ``int8``; empty for uncompressed.
        pooling: which values each row's gradient sums; None if each row has a value of its own.
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
            check_request(self.pooling is None, f"pooled push to {self.key} with a codec")
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
    """Check that a compressed push names a known point-to-point codec and carries 1-d bytes."""
    try:
        is_known = find_codec(push.codec).name in POINT_TO_POINT_CODECS
    except ProgramError:
        is_known = False
    check_request(
        is_known,
        f"a push to {push.key} with codec {push.codec[:40]!r}; supported are {', '.join(POINT_TO_POINT_CODECS)}",
    )
    fits = push.rows is None and push.values.dim() == 1 and push.values.dtype == torch.uint8
    check_request(fits, f"a push to {push.key} in {push.codec} of {push.values.dtype} with {push.values.dim()} dims")


class PullRequest(Struct, frozen=True, forbid_unknown_fields=True, eq=False):
    """Read a key, once it has the requested version and the consistency model allows it.

    Args:
        header: of the sender, whose earlier writes are visible.
        shard: index of the shard.
        key: name of the key.
        ticket: number that the reply repeats.
        min_version: lowest acceptable version of the key; under bsp, the step.
        rows: row ids, int64, strictly ascending; None for a dense key.
        exact_version: return exactly ``min_version`` if the key is one version ahead; see ``PreviousVersion``.
        pooling: sums of rows to return instead of the rows.
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


class JoinClock(Struct, frozen=True, forbid_unknown_fields=True, tag=str.lower):
    """Include this worker in the ssp clock from now on; it starts at the minimum clock."""

    header: RequestHeader
    shard: int

    def __post_init__(self) -> None:
        validate_counts(self.shard)


class LeaveClock(Struct, frozen=True, forbid_unknown_fields=True, tag=str.lower):
    """Exclude this worker from the ssp clock until it joins again."""

    header: RequestHeader
    shard: int

    def __post_init__(self) -> None:
        validate_counts(self.shard)


class JobMember(Struct, frozen=True, forbid_unknown_fields=True):
    """A member of the job: name, incarnation and address."""

    name: str
    incarnation: int
    address: str = ""

    def __post_init__(self) -> None:
        validate_name(self.name)
        validate_counts(self.incarnation)
        check_request(len(self.address) <= MAX_NAME, f"the address of {self.name} has {len(self.address)} characters")


class SetMembers(Struct, frozen=True, forbid_unknown_fields=True, tag=str.lower):
    """Journal entry: the workers of a new membership generation."""

    generation: int
    workers: tuple[JobMember, ...]

    def __post_init__(self) -> None:
        validate_counts(self.generation)


class PushReply(Struct, frozen=True, forbid_unknown_fields=True, tag=str.lower):
    """The push is applied (or pending within its step) and survives the failure of one server.

    Args:
        shard: index of the shard.
        sequence: of the push.
        version: of the key afterwards.
        is_new: False if the data slice had already been counted.
    """

    shard: int
    sequence: int
    version: int
    is_new: bool = True

    def __post_init__(self) -> None:
        validate_counts(self.shard, self.sequence, self.version)


class PullReply(Struct, frozen=True, forbid_unknown_fields=True, eq=False):
    """Value of a key; ``values`` as in `PushRequest`."""

    shard: int
    ticket: int
    key: str
    version: int
    values: Tensor

    def __post_init__(self) -> None:
        validate_name(self.key)
        validate_counts(self.shard, self.ticket, self.version)
        check_request(self.values.dtype in DTYPES.values(), f"{self.key} comes as {self.values.dtype}")


class Ack(Struct, frozen=True, forbid_unknown_fields=True, tag=str.lower):
    """The request with this sequence was executed; ``shard`` is -1 in replies of the coordinator."""

    shard: int
    sequence: int

    def __post_init__(self) -> None:
        validate_counts(self.shard + 1, self.sequence)


class Rejected(Struct, frozen=True, forbid_unknown_fields=True, tag=str.lower):
    """The request was rejected; no state changed.

    Args:
        shard: index of the shard; -1 for the coordinator.
        sequence: of the request, or the ticket of a pull.
        is_pull: whether it is a ticket.
        reason: for programs.
        text: for people.
        generation: newest membership generation that the sender of the reply knows.
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
    """Check that a name is printable and has 1 to 512 characters."""
    if not (0 < len(name) <= MAX_NAME and name.isprintable()):
        raise invalid_request(f"a name of {len(name)} characters, {name[:40]!r}")


def validate_counts(*counts: int) -> None:
    """Check that numbers are non-negative and fit in 63 bits."""
    for number in counts:
        if not 0 <= number <= MAX_NUMBER:
            raise invalid_request(f"numbers {counts} that are negative or exceed 63 bits")


def validate_rows(rows: Tensor | None, key: str) -> None:
    """Check that row ids, if given, are 1-d int64 and strictly ascending from 0."""
    if rows is None:
        return
    if rows.dtype != torch.int64 or rows.dim() != 1:
        raise invalid_request(f"rows of {key} as {rows.dtype} with {rows.dim()} dims")
    row_ids = rows.numpy()
    if row_ids.size and not (row_ids[0] >= 0 and (row_ids[1:] > row_ids[:-1]).all()):
        raise invalid_request(f"rows of {key} that do not ascend from 0")


class JoinRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Request to join the job.

    Args:
        name: of the worker or server; unique among live members.
        role: worker or server.
        token: random number of this incarnation, by which a repeated request is recognized.
        job_digest: see :meth:`JobConfig.digest`; must be equal on all members.
        address: where other members reach it.
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


class ShardReplicas(Struct, frozen=True, forbid_unknown_fields=True):
    """Servers that hold a shard.

    Args:
        primary: serves all requests.
        backup: holds a full copy once it is ready; empty if there is none.
        is_backup_ready: while False, the primary does not reply to requests.
        former_replica: server whose copy is as recent as the primary's until the backup is ready, or empty.
    """

    primary: str
    backup: str = ""
    is_backup_ready: bool = False
    former_replica: str = ""

    def __post_init__(self) -> None:
        validate_name(self.primary)
        check_request(self.backup != self.primary, f"{self.primary} is primary and backup of one shard")


class MembershipView(Struct, frozen=True, forbid_unknown_fields=True):
    """Members of the job and replicas of each shard in one generation; a larger generation supersedes a smaller one."""

    generation: int
    workers: tuple[JobMember, ...] = ()
    servers: tuple[JobMember, ...] = ()
    replicas: tuple[ShardReplicas, ...] = ()

    def __post_init__(self) -> None:
        validate_counts(self.generation)


class JoinReply(Struct, frozen=True, forbid_unknown_fields=True):
    """The sender of the join request with this token is a member, with this incarnation."""

    token: int
    incarnation: int
    view: MembershipView

    def __post_init__(self) -> None:
        validate_counts(self.token, self.incarnation)


class Heartbeat(Struct, frozen=True, forbid_unknown_fields=True):
    """Liveness signal; the coordinator replies with its view if the sender's is older."""

    header: RequestHeader


class TaskRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Request for a task."""

    header: RequestHeader


class DataTask(Struct, frozen=True, forbid_unknown_fields=True):
    """A range of data slices of one epoch, ``[start, stop)``, and how often it has been assigned before."""

    epoch: int
    start: int
    stop: int
    attempt: int = 0

    def __post_init__(self) -> None:
        validate_counts(self.epoch, self.start, self.stop, self.attempt)
        check_request(self.start < self.stop, f"a task of slices {self.start} to {self.stop}")


class TaskReply(Struct, frozen=True, forbid_unknown_fields=True):
    """A task, leased for a limited time; None if all data of all epochs has been processed."""

    sequence: int
    task: DataTask | None

    def __post_init__(self) -> None:
        validate_counts(self.sequence)


class TaskReport(Struct, frozen=True, forbid_unknown_fields=True):
    """Outcome of a task.

    Args:
        header: of the worker.
        task: which.
        outcome: done (all of its pushes were acknowledged), or failed or preempted (to be assigned again).
        version: newest version that its pushes produced.
        text: error message, if it failed.
    """

    header: RequestHeader
    task: DataTask
    outcome: TaskOutcome
    version: int = 0
    text: str = ""

    def __post_init__(self) -> None:
        validate_counts(self.version)


class LeaveRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Leave the job; leased tasks are preempted."""

    header: RequestHeader


class BackupReady(Struct, frozen=True, forbid_unknown_fields=True):
    """The backup of this shard has a full copy, in the generation of the header."""

    header: RequestHeader
    shard: int

    def __post_init__(self) -> None:
        validate_counts(self.shard)


class CheckpointRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Request a consistent snapshot of all shards."""

    header: RequestHeader


class CheckpointReply(Struct, frozen=True, forbid_unknown_fields=True):
    """The number of the snapshot that will be taken once no task is partially applied."""

    sequence: int
    snapshot: int

    def __post_init__(self) -> None:
        validate_counts(self.sequence, self.snapshot)


class SnapshotRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Request to save the receiver's primary shards now, as this snapshot."""

    generation: int
    snapshot: int

    def __post_init__(self) -> None:
        validate_counts(self.generation, self.snapshot)


class SnapshotSaved(Struct, frozen=True, forbid_unknown_fields=True):
    """The shard is durably saved for this snapshot, as of this journal position."""

    header: RequestHeader
    shard: int
    snapshot: int
    position: int

    def __post_init__(self) -> None:
        validate_counts(self.shard, self.snapshot, self.position)


WriteRequest: TypeAlias = InitRequest | PushRequest | JoinClock | LeaveClock
"""Requests of a worker that change a shard."""

JournalEntry: TypeAlias = InitRequest | PushRequest | JoinClock | LeaveClock | SetMembers
"""Entries of a shard's journal."""


class WorkerClock(Struct, frozen=True, forbid_unknown_fields=True):
    """Number of pushes of a worker to a key (ssp)."""

    worker: str
    count: int

    def __post_init__(self) -> None:
        validate_name(self.worker)
        validate_counts(self.count)


class KeyProgress(Struct, frozen=True, forbid_unknown_fields=True):
    """Consistency state of a key.

    Args:
        version: number of updates so far.
        applied_slices: data slices counted, as ``low, high`` of maximal ranges, ascending.
        clocks: of the workers in the clock.
        min_clocks: ``version, minimum clock`` from that version on, ascending.
    """

    version: int
    applied_slices: tuple[int, ...] = ()
    clocks: tuple[WorkerClock, ...] = ()
    min_clocks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        validate_counts(self.version, *self.applied_slices, *self.min_clocks)
        check_request(len(self.applied_slices) % 2 == 0 and len(self.min_clocks) % 2 == 0, "progress with half a range")
        runs = zip(self.applied_slices, self.applied_slices[1:], strict=False)
        check_request(all(low < high for low, high in runs), f"slice ranges {self.applied_slices} intersect")


class PendingGradient(Struct, frozen=True, forbid_unknown_fields=True, eq=False):
    """A gradient of a bsp step whose other slices have not arrived."""

    slice_index: int
    values: Tensor
    rows: Tensor | None = None

    def __post_init__(self) -> None:
        validate_counts(self.slice_index)
        validate_rows(self.rows, "a held gradient")


class KeyState(Struct, frozen=True, forbid_unknown_fields=True, eq=False):
    """Full state of a key.

    Args:
        spec: definition.
        progress: consistency state.
        tensors: values, followed by the optimizer state.
        rows: ids of the rows that were ever pushed, unique, in the order of the tensors; None for a dense key.
        pending: gradients of an incomplete step.
        previous: values before the last update, if kept; for rows, only those that it changed.
        previous_rows: ids of these rows.
    """

    spec: KeySpec
    progress: KeyProgress
    tensors: tuple[Tensor, ...]
    rows: Tensor | None = None
    pending: tuple[PendingGradient, ...] = ()
    previous: Tensor | None = None
    previous_rows: Tensor | None = None

    def __post_init__(self) -> None:
        check_request(bool(self.tensors), f"the state of {self.spec.key} has no values")
        if self.rows is not None:
            message = f"rows of {self.spec.key} as {self.rows.dtype} with {self.rows.dim()} dims"
            check_request(self.rows.dtype == torch.int64 and self.rows.dim() == 1, message)
        validate_rows(self.previous_rows, self.spec.key)


class ClientState(Struct, frozen=True, forbid_unknown_fields=True):
    """Duplicate-detection state of one worker incarnation: next sequence, and replies that may be requested again."""

    worker: str
    incarnation: int
    next_sequence: int
    replies: tuple[PushReply | Ack | Rejected, ...] = ()

    def __post_init__(self) -> None:
        validate_name(self.worker)
        validate_counts(self.incarnation, self.next_sequence)


class ShardState(Struct, frozen=True, forbid_unknown_fields=True, eq=False):
    """State of a shard after ``position`` journal entries."""

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


class InstallSnapshot(Struct, frozen=True, forbid_unknown_fields=True, eq=False):
    """Make the receiver the backup of a shard, from this state on."""

    header: RequestHeader
    shard: int
    state: ShardState

    def __post_init__(self) -> None:
        validate_counts(self.shard)


class ReplicateEntry(Struct, frozen=True, forbid_unknown_fields=True, eq=False):
    """Journal entry at this position, to be applied by the backup."""

    header: RequestHeader
    shard: int
    position: int
    entry: JournalEntry

    def __post_init__(self) -> None:
        validate_counts(self.shard, self.position)


class ReplicationAck(Struct, frozen=True, forbid_unknown_fields=True):
    """The backup has applied all entries before this position."""

    header: RequestHeader
    shard: int
    position: int

    def __post_init__(self) -> None:
        validate_counts(self.shard, self.position)
