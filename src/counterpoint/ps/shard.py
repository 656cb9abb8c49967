"""A shard: the state after a journal of entries, identical on primary, backup and in a replay.

This is where a worker's push is counted once, by two mechanisms. A repeated *message* (retransmission) has an old
sequence number and gets the recorded reply (``replication.py``, and :class:`ClientRecord` here). Repeated *data*
(a slice that another worker has already pushed) is found by :class:`ConsistencyTracker
<counterpoint.ps.consistency.ConsistencyTracker>` and answered as any push, but not applied
(:meth:`PsShard._apply_push`). The server of the strategy ``server(n)`` uses the tracker for staleness alone, since
its messages are neither lost nor repeated: see :mod:`counterpoint.runtime.comm.server_loop`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, assert_never

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from counterpoint.errors import ProtocolError
from counterpoint.fabric.compression import decompress
from counterpoint.program.compression import find_codec
from counterpoint.ps.consistency import Bsp, ConsistencyTracker
from counterpoint.ps.job_config import JobConfig
from counterpoint.ps.message_codec import decode_as, encode_message
from counterpoint.ps.messages import (
    DTYPES,
    Ack,
    ClientState,
    InitRequest,
    JobMember,
    JoinClock,
    JournalEntry,
    KeyProgress,
    KeySpec,
    KeyState,
    LeaveClock,
    PendingGradient,
    PullReply,
    PullRequest,
    PushReply,
    PushRequest,
    Rejected,
    RejectReason,
    SetMembers,
    ShardState,
    WorkerClock,
    WriteRequest,
)
from counterpoint.ps.storage.key_storage import DenseStorage, PreviousVersion, SparseRowStorage
from counterpoint.ps.storage.optimizer_kernels import initial_state
from counterpoint.ps.update_rules import Assign, Sgd, check_request, invalid_request
from counterpoint.tensor_bytes import as_bytes

ShardReply: TypeAlias = PushReply | Ack | Rejected


@dataclass(slots=True)
class ShardKey:
    """A key on this shard: its definition, storage, consistency state, and gradients of an incomplete step."""

    spec: KeySpec
    storage: DenseStorage | SparseRowStorage
    tracker: ConsistencyTracker
    pending: dict[int, PendingGradient] = field(default_factory=dict)


@dataclass(slots=True)
class ClientRecord:
    """Duplicate detection for one worker incarnation: next expected sequence, and recent replies."""

    incarnation: int
    next_sequence: int = 0
    replies: dict[int, ShardReply] = field(default_factory=dict)


class PsShard:
    """State machine of one shard, driven by journal entries.

    Args:
        job: configuration.
        index: of the shard.
        state: initial state; empty if not given.
    """

    def __init__(self, job: JobConfig, index: int, state: ShardState | None = None) -> None:
        state = state or ShardState(0, 0)
        self.job, self.index = job, index
        self.position, self.generation, self.workers = state.position, state.generation, state.workers
        self.clock_members = set(state.clock_members)
        self.clients = {
            session.worker: ClientRecord(
                session.incarnation, session.next_sequence, {a.sequence: a for a in session.replies}
            )
            for session in state.clients
        }
        self.keys = {key.spec.key: self._restore_key(key) for key in state.keys}

    def _restore_key(self, state: KeyState) -> ShardKey:
        previous = None if state.previous is None else PreviousVersion(state.previous, state.previous_rows)
        storage = self._make_storage(state.spec, state.tensors, state.rows, previous)
        return ShardKey(
            state.spec,
            storage,
            self._restore_tracker(state),
            {gradient.slice_index: gradient for gradient in state.pending},
        )

    def _restore_tracker(self, state: KeyState) -> ConsistencyTracker:
        progress = state.progress
        return ConsistencyTracker(
            self.job.consistency,
            state.spec.key,
            version=progress.version,
            applied_slices=progress.applied_slices,
            clocks={clock.worker: clock.count for clock in progress.clocks},
            min_clocks=list(zip(progress.min_clocks[::2], progress.min_clocks[1::2], strict=True)),
        )

    def _make_storage(
        self, spec: KeySpec, tensors: tuple[Tensor, ...], rows: Tensor | None, previous: PreviousVersion | None = None
    ) -> DenseStorage | SparseRowStorage:
        keeps_previous = self.job.allows_recompute and not isinstance(spec.rule, Assign)
        if spec.width:
            return SparseRowStorage(
                spec, self.index, self.job.num_shards, rows, tensors, keeps_previous=keeps_previous, previous=previous
            )
        return DenseStorage(spec, tensors, keeps_previous=keeps_previous, previous=previous)

    @property
    def state(self) -> ShardState:
        """The whole state as a value that later entries do not change (copy on write)."""
        sessions = (
            ClientState(worker, client.incarnation, client.next_sequence, tuple(client.replies.values()))
            for worker, client in self.clients.items()
        )
        keys = (_key_state(key) for key in self.keys.values())
        return ShardState(
            self.position,
            self.generation,
            self.workers,
            tuple(sorted(self.clock_members)),
            tuple(sessions),
            tuple(keys),
        )

    @property
    def num_bytes(self) -> int:
        """Memory of all keys."""
        return sum(key.storage.num_bytes for key in self.keys.values())

    def apply(self, entry: JournalEntry) -> ShardReply | None:
        """Apply one journal entry; return the reply to its sender.

        An invalid request is an entry, too: it changes nothing except the recorded reply.
        """
        self.position += 1
        if isinstance(entry, SetMembers):
            self._set_members(entry.generation, entry.workers)
            return None
        header = entry.header
        client = self.clients.get(header.member)
        if client is None or (client.incarnation, client.next_sequence) != (header.incarnation, header.sequence):
            return self.rejection(entry, "identity", f"{header} is not the next request of a current worker")
        try:
            reply = self._apply_change(entry)
        except ProtocolError as error:
            reply = self.rejection(entry, "request", str(error))
        except MemoryError as error:
            reply = self.rejection(entry, "full", str(error))
        client.next_sequence += 1
        client.replies = {key: recorded for key, recorded in client.replies.items() if key >= header.acked_before}
        client.replies[header.sequence] = reply
        return reply

    def rejection(self, entry: WriteRequest | PullRequest, reason: RejectReason, text: str) -> Rejected:
        """Return the reply to a request that changed nothing."""
        number = entry.ticket if isinstance(entry, PullRequest) else entry.header.sequence
        return Rejected(self.index, number, isinstance(entry, PullRequest), reason, text, self.generation)

    def _apply_change(self, entry: WriteRequest) -> ShardReply:
        worker, sequence = entry.header.member, entry.header.sequence
        match entry:
            case InitRequest():
                self._init_key(entry)
            case PushRequest():
                return self._apply_push(worker, entry)
            case JoinClock():
                self.clock_members.add(worker)
                for key in self.keys.values():
                    key.tracker.join_clock(worker)
            case LeaveClock():
                self._leave_clocks([worker])
            case _:
                assert_never(entry)
        return Ack(self.index, sequence)

    def _set_members(self, generation: int, workers: tuple[JobMember, ...]) -> None:
        """Restrict clients to the workers of a new generation."""
        self.generation, self.workers = generation, workers
        incarnations = {worker.name: worker.incarnation for worker in workers}
        known_incarnations = {name: client.incarnation for name, client in self.clients.items()}
        self._leave_clocks(
            [
                name
                for name in self.clock_members
                if name not in known_incarnations or incarnations.get(name) != known_incarnations[name]
            ]
        )
        self.clients = {
            name: client
            if (client := self.clients.get(name)) and client.incarnation == incarnation
            else ClientRecord(incarnation)
            for name, incarnation in incarnations.items()
        }

    def _leave_clocks(self, workers: Sequence[str]) -> None:
        self.clock_members.difference_update(workers)
        for key in self.keys.values():
            key.tracker.leave_clock(workers)

    def _init_key(self, entry: InitRequest) -> None:
        spec = entry.spec
        existing = self.keys.get(spec.key)
        if existing is not None:
            check_request(
                existing.spec == spec,
                f"{spec.key} exists as {existing.spec}, but {entry.header.member} defines it as {spec}",
            )
            return
        if isinstance(spec.rule, Assign):
            is_bsp = isinstance(self.job.consistency, Bsp)
            mode = type(self.job.consistency).__name__.lower()
            check_request(is_bsp, f"{spec.key} without an optimizer, which {mode} needs; give it an update rule")
        storage = self._initial_storage(entry)
        self._check_capacity(storage.num_bytes, spec.key)
        tracker = ConsistencyTracker(self.job.consistency, spec.key)
        for worker in sorted(self.clock_members):
            tracker.join_clock(worker)
        self.keys[spec.key] = ShardKey(spec, storage, tracker)

    def _initial_storage(self, entry: InitRequest) -> DenseStorage | SparseRowStorage:
        spec, value, rows = entry.spec, entry.value, entry.rows
        if value is None or rows is None:
            return self._make_storage(spec, () if value is None else (value,), None)
        self._make_storage(spec, (), None).validate_push(value, rows)
        check_request(
            not (isinstance(spec.rule, Sgd) and spec.rule.dampening),
            f"initial rows of {spec.key} with dampening are not supported",
        )
        return self._make_storage(spec, (value, *initial_state(spec.rule, value)), rows)

    def _apply_push(self, worker: str, push: PushRequest) -> PushReply:
        key = self._find_key(push.key)
        push = decode_push(push, key.spec) if push.codec else push
        try:
            key.tracker.check_push(worker, push.read_version, push.slice_index)
        except ProtocolError as error:
            raise invalid_request(str(error)) from None
        is_duplicate = key.tracker.is_duplicate(push.slice_index)
        key.storage.validate_push(push.values, push.rows, push.pooling)
        if self.num_bytes + key.storage.max_growth_bytes(push.rows) > self.job.capacity_bytes:
            self._check_capacity(key.storage.growth_bytes(push.rows), push.key)
        if not is_duplicate and isinstance(self.job.consistency, Bsp):
            values = push.values if push.pooling is None else push.pooling.pool(push.values)
            key.pending[push.slice_index] = PendingGradient(push.slice_index, values, push.rows)
        is_due = key.tracker.record(worker, push.slice_index, is_counted=not is_duplicate)
        if is_due and key.pending:  # of all slices of a step of bsp, in their order
            values, rows = sum_gradients([key.pending[slice_index] for slice_index in sorted(key.pending)])
            key.pending.clear()
            key.storage.update(key.tracker.version, values, rows, None)
        elif is_due:
            key.storage.update(key.tracker.version, push.values, push.rows, push.pooling)
        return PushReply(self.index, push.header.sequence, key.tracker.version, not is_duplicate)

    def _check_capacity(self, more_bytes: int, key: str) -> None:
        if more_bytes and self.num_bytes + more_bytes > self.job.capacity_bytes:
            raise MemoryError(
                f"shard {self.index} holds {self.num_bytes} of at most {self.job.capacity_bytes} bytes, and {key} "
                f"needs {more_bytes} more; use more servers or a larger capacity_bytes"
            )

    def _find_key(self, name: str) -> ShardKey:
        key = self.keys.get(name)
        if key is None:
            raise invalid_request(f"unknown key {name!r} on shard {self.index}; call init before push and pull")
        return key

    def can_read(self, pull: PullRequest) -> bool:
        """Tell whether a pull can be served now.

        Raises:
            ProtocolError: it never can.
        """
        key = self._find_key(pull.key)
        key.storage.validate_pull(pull.rows)
        client = self.clients.get(pull.header.member)
        sees_own_writes = client is not None and client.next_sequence >= pull.header.sequence
        return sees_own_writes and key.tracker.can_read(pull.header.member, pull.min_version)

    def read(self, pull: PullRequest) -> PullReply:
        """Return the reply to a pull that can be served."""
        key = self._find_key(pull.key)
        version = key.tracker.version
        if pull.exact_version and version == pull.min_version + 1 and key.storage.keeps_previous:
            version, values = pull.min_version, key.storage.read_previous(pull.rows)
            values = values if pull.pooling is None else pull.pooling.pool(values)
        elif pull.pooling is not None and isinstance(key.storage, SparseRowStorage):
            values = key.storage.read_pooled(pull.rows, pull.pooling)
        else:
            values = key.storage.read(pull.rows)
        return PullReply(self.index, pull.ticket, pull.key, version, values)

    def digest(self) -> str:
        """Return a hash that is equal for bitwise equal shards."""
        state = decode_as({"shardstate": ShardState}, *encode_message(self.state))  # as a backup has it: 1 becomes 1.0
        _, fields, tensors = encode_message(state)
        digest = hashlib.blake2b(json.dumps(fields).encode(), digest_size=16)
        for tensor in tensors:
            digest.update(as_bytes(tensor).numpy().tobytes())
        return digest.hexdigest()


def _key_state(key: ShardKey) -> KeyState:
    snapshot = key.storage.snapshot()
    previous, previous_rows = (
        (None, None) if snapshot.previous is None else (snapshot.previous.values, snapshot.previous.rows)
    )
    return KeyState(
        key.spec,
        _key_progress(key.tracker),
        snapshot.tensors,
        snapshot.rows,
        tuple(key.pending.values()),
        previous,
        previous_rows,
    )


def _key_progress(tracker: ConsistencyTracker) -> KeyProgress:
    clocks = tuple(WorkerClock(worker, count) for worker, count in tracker.clocks.items())
    min_clocks = tuple(number for pair in tracker.min_clocks for number in pair)
    return KeyProgress(tracker.version, tuple(tracker.applied_slices.bounds), clocks, min_clocks)


def decode_push(push: PushRequest, spec: KeySpec) -> PushRequest:
    """Return the push with its values decompressed.

    Raises:
        ProtocolError: the bytes are not an encoding of this key's range.
    """
    count, dtype = spec.high - spec.low, DTYPES[spec.dtype]
    codec = find_codec(push.codec)
    num_bytes = codec.encoded_bytes((count,), dtype.itemsize)
    check_request(
        not spec.width and len(push.values) == num_bytes,
        f"{len(push.values)} bytes of {push.codec} pushed to {spec.key}, expected {num_bytes}",
    )
    try:
        values = decompress(codec, push.values, torch.empty(count, dtype=dtype))
    except (IndexError, RuntimeError) as error:
        raise invalid_request(f"bytes pushed to {spec.key} that are not a valid {push.codec} encoding") from error
    return replace(push, values=values, codec="")


def sum_gradients(pending: Sequence[PendingGradient]) -> tuple[Tensor, Tensor | None]:
    """Return the sum of gradients, in order, and its row ids."""
    first, *rest = pending
    if first.rows is None:
        total = first.values.clone()
        for gradient in rest:
            total += gradient.values
        return total, None
    rows_of_gradients = [gradient.rows.numpy() for gradient in pending if gradient.rows is not None]
    rows = np.unique(np.concatenate(rows_of_gradients))
    total = first.values.new_zeros((len(rows), *first.values.shape[1:]))
    for gradient, row_ids in zip(pending, rows_of_gradients, strict=True):
        total[torch.from_numpy(rows.searchsorted(row_ids))] += gradient.values
    return total, torch.from_numpy(rows)


def replay_journal(
    job: JobConfig, index: int, entries: Iterable[JournalEntry], state: ShardState | None = None
) -> PsShard:
    """Return the shard that a journal produces, from scratch or from a saved state."""
    shard = PsShard(job, index, state)
    for entry in entries:
        shard.apply(entry)
    return shard
