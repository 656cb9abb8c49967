"""A shard is what its journal says: one entry after the other, the same on primary, backup and in a replay."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias, assert_never

import numpy as np
import torch
from torch import Tensor

from counterpoint.errors import ProtocolError
from counterpoint.fabric.coding import decoded
from counterpoint.program.codes import find_code
from counterpoint.server.choices import Aggregate, Sgd, require, unmeant
from counterpoint.server.form import to_plain
from counterpoint.server.job import Bsp, Job
from counterpoint.server.messages import (
    DTYPES,
    Done,
    Enter,
    Init,
    Member,
    Members,
    Pull,
    Pulled,
    Push,
    Pushed,
    Reason,
    Refused,
    Rest,
    Spec,
)
from counterpoint.server.rules import first_parts
from counterpoint.server.snapshots import Earlier
from counterpoint.server.states import Change, Entry, Held, KeyState, Session, ShardState
from counterpoint.server.tables import Range, Rows
from counterpoint.server.tally import Tally

Answer: TypeAlias = Pushed | Done | Refused


@dataclass(slots=True)
class Key:
    """A key on this shard."""

    spec: Spec
    table: Range | Rows
    tally: Tally
    held: dict[int, Held] = field(default_factory=dict)


@dataclass(slots=True)
class Desk:
    """Where one life of a worker is answered."""

    incarnation: int
    upcoming: int = 0
    answers: dict[int, Answer] = field(default_factory=dict)


class Shard:
    """The fold of a journal.

    Args:
        job: what all agree on.
        index: which shard.
        state: where to begin; with nothing, if not given.
    """

    def __init__(self, job: Job, index: int, state: ShardState | None = None) -> None:
        state = state or ShardState(0, 0)
        self.job, self.index = job, index
        self.position, self.generation, self.workers = state.position, state.generation, state.workers
        self.entered = set(state.entered)
        self.desks = {
            session.worker: Desk(session.incarnation, session.upcoming, {a.sequence: a for a in session.answers})
            for session in state.sessions
        }
        self.keys = {key.spec.key: self._key(key) for key in state.keys}

    def _key(self, state: KeyState) -> Key:
        tally = Tally(self.job.consistency, state.counts)
        earlier = None if state.earlier is None else Earlier(state.earlier, state.earlier_rows)
        table = self._table(state.spec, state.parts, state.rows, earlier)
        return Key(state.spec, table, tally, {held.portion: held for held in state.held})

    def _table(
        self, spec: Spec, parts: tuple[Tensor, ...], rows: Tensor | None, earlier: Earlier | None = None
    ) -> Range | Rows:
        keeps = self.job.repeats_steps and not isinstance(spec.rule, Aggregate)
        if spec.width:
            return Rows(spec, self.index, self.job.num_shards, rows, parts, keeps_earlier=keeps, earlier=earlier)
        return Range(spec, parts, keeps_earlier=keeps, earlier=earlier)

    @property
    def state(self) -> ShardState:
        """All of it, as a value that later entries do not change: they copy numbers that somebody still has."""
        sessions = (
            Session(worker, desk.incarnation, desk.upcoming, tuple(desk.answers.values()))
            for worker, desk in self.desks.items()
        )
        keys = (_state_of(key) for key in self.keys.values())
        return ShardState(
            self.position, self.generation, self.workers, tuple(sorted(self.entered)), tuple(sessions), tuple(keys)
        )

    @property
    def num_bytes(self) -> int:
        """Memory of its tables."""
        return sum(key.table.num_bytes for key in self.keys.values())

    def apply(self, entry: Entry) -> Answer | None:
        """The shard is as after this entry of its journal; returns what its sender is to be told.

        A request that must not be carried out is an entry too: it changes nothing but what its sender is told.
        """
        self.position += 1
        if isinstance(entry, Members):
            self._admit(entry.generation, entry.workers)
            return None
        origin = entry.origin
        desk = self.desks.get(origin.member)
        if desk is None or (desk.incarnation, desk.upcoming) != (origin.incarnation, origin.sequence):
            return self.refusal(entry, "identity", f"{origin} is not the next request of a worker of this generation")
        try:
            answer = self._carry_out(entry)
        except ProtocolError as error:
            answer = self.refusal(entry, "request", str(error))
        except MemoryError as error:
            answer = self.refusal(entry, "full", str(error))
        desk.upcoming += 1
        desk.answers = {key: kept for key, kept in desk.answers.items() if key >= origin.settled}
        desk.answers[origin.sequence] = answer
        return answer

    def refusal(self, entry: Change | Pull, reason: Reason, text: str) -> Refused:
        """Return what its sender is told about a request that changed nothing."""
        number = entry.ticket if isinstance(entry, Pull) else entry.origin.sequence
        return Refused(self.index, number, isinstance(entry, Pull), reason, text, self.generation)

    def _carry_out(self, entry: Change) -> Answer:
        worker, sequence = entry.origin.member, entry.origin.sequence
        match entry:
            case Init():
                self._init(entry)
            case Push():
                return self._push(worker, entry)
            case Enter():
                self.entered.add(worker)
                for key in self.keys.values():
                    key.tally.enter(worker)
            case Rest():
                self._rest([worker])
            case _:
                assert_never(entry)
        return Done(self.index, sequence)

    def _admit(self, generation: int, workers: tuple[Member, ...]) -> None:
        """Only these workers belong to the job now."""
        self.generation, self.workers = generation, workers
        lives = {worker.name: worker.incarnation for worker in workers}
        known = {name: desk.incarnation for name, desk in self.desks.items()}
        self._rest([name for name in self.entered if name not in known or lives.get(name) != known[name]])
        self.desks = {
            name: desk if (desk := self.desks.get(name)) and desk.incarnation == life else Desk(life)
            for name, life in lives.items()
        }

    def _rest(self, workers: Sequence[str]) -> None:
        self.entered.difference_update(workers)
        for key in self.keys.values():
            key.tally.rest(workers)

    def _init(self, entry: Init) -> None:
        spec = entry.spec
        known = self.keys.get(spec.key)
        if known is not None:
            require(known.spec == spec, f"{spec.key} is {known.spec} already, and {entry.origin.member} says {spec}")
            return
        if isinstance(spec.rule, Aggregate):
            is_bsp = isinstance(self.job.consistency, Bsp)
            mode = type(self.job.consistency).__name__.lower()
            require(is_bsp, f"{spec.key} without an optimizer on the server, which {mode} needs; give it a rule")
        table = self._first_table(entry)
        self._require_room(table.num_bytes, spec.key)
        tally = Tally(self.job.consistency)
        for worker in sorted(self.entered):
            tally.enter(worker)
        self.keys[spec.key] = Key(spec, table, tally)

    def _first_table(self, entry: Init) -> Range | Rows:
        spec, value, rows = entry.spec, entry.value, entry.rows
        if value is None or rows is None:
            return self._table(spec, () if value is None else (value,), None)
        self._table(spec, (), None).check(value, rows)
        require(not (isinstance(spec.rule, Sgd) and spec.rule.dampening), f"given rows of {spec.key} under dampening")
        return self._table(spec, (value, *first_parts(spec.rule, value)), rows)

    def _push(self, worker: str, push: Push) -> Pushed:
        key = self._known(push.key)
        push = plain(push, key.spec) if push.code else push
        values, sums, is_known = push.values, push.sums, key.tally.is_known(worker, push)
        key.table.check(values, push.rows, sums)
        if self.num_bytes + key.table.most_bytes(push.rows) > self.job.capacity_bytes:
            self._require_room(key.table.more_bytes(push.rows), push.key)
        if not is_known and isinstance(self.job.consistency, Bsp):
            key.held[push.portion] = Held(push.portion, values if sums is None else sums.of(values), push.rows)
        if key.tally.count(worker, push, is_known=is_known):
            rows = push.rows
            if key.held:
                (values, rows), sums = added([key.held[portion] for portion in sorted(key.held)]), None
                key.held.clear()
            key.table.update(key.tally.version, values, rows, sums)
        return Pushed(self.index, push.origin.sequence, key.tally.version, not is_known)

    def _require_room(self, more_bytes: int, key: str) -> None:
        if more_bytes and self.num_bytes + more_bytes > self.job.capacity_bytes:
            raise MemoryError(
                f"shard {self.index} keeps {self.num_bytes} of at most {self.job.capacity_bytes} bytes and has no room "
                f"for {more_bytes} more of {key}; give the job more servers or a larger capacity_bytes"
            )

    def _known(self, name: str) -> Key:
        key = self.keys.get(name)
        if key is None:
            raise unmeant(f"there is no key {name!r} on shard {self.index}; init comes before push and pull")
        return key

    def may_read(self, pull: Pull) -> bool:
        """Tell whether the answer to a pull can be given now; a ProtocolError where it never can."""
        key = self._known(pull.key)
        key.table.check_rows(pull.rows)
        desk = self.desks.get(pull.origin.member)
        sees_own = desk is not None and desk.upcoming >= pull.origin.sequence
        return sees_own and key.tally.may_read(pull.origin.member, pull.least)

    def read(self, pull: Pull) -> Pulled:
        """Return the answer to a pull that may read."""
        key = self._known(pull.key)
        version = key.tally.version
        if pull.is_exact and version == pull.least + 1 and key.table.keeps_earlier:
            version, values = pull.least, key.table.read_earlier(pull.rows)
            values = values if pull.sums is None else pull.sums.of(values)
        elif pull.sums is not None and isinstance(key.table, Rows):
            values = key.table.read_sums(pull.rows, pull.sums)
        else:
            values = key.table.read(pull.rows)
        return Pulled(self.index, pull.ticket, pull.key, version, values)

    def digest(self) -> str:
        """Return a word that is the same for shards that are the same, bit for bit."""
        _, plain, tensors = to_plain(self.state)
        facts = hashlib.blake2b(json.dumps(plain).encode(), digest_size=16)
        for tensor in tensors:
            facts.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        return facts.hexdigest()


def _state_of(key: Key) -> KeyState:
    found = key.table.snapshot()
    earlier, earlier_rows = (None, None) if found.earlier is None else (found.earlier.values, found.earlier.rows)
    return KeyState(
        key.spec, key.tally.counts, found.parts, found.rows, tuple(key.held.values()), earlier, earlier_rows
    )


def plain(push: Push, spec: Spec) -> Push:
    """Return a push whose values are what its code says.

    Raises:
        ProtocolError: no such range has these bytes.
    """
    count, dtype = spec.high - spec.low, DTYPES[spec.dtype]
    code = find_code(push.code)
    num_bytes = code.num_bytes((count,), dtype.itemsize)
    require(
        not spec.width and len(push.values) == num_bytes,
        f"{len(push.values)} bytes of {push.code} pushed to {spec.key}, which takes {num_bytes}",
    )
    try:
        values = decoded(code, push.values, torch.empty(count, dtype=dtype))
    except (IndexError, RuntimeError) as error:
        raise unmeant(f"bytes pushed to {spec.key} that {push.code} cannot have written") from error
    return replace(push, values=values, code="")


def added(held: Sequence[Held]) -> tuple[Tensor, Tensor | None]:
    """Return the sum of gradients in their order, and its rows."""
    first, *others = held
    if first.rows is None:
        total = first.values.clone()
        for one in others:
            total += one.values
        return total, None
    numbers = [one.rows.numpy() for one in held if one.rows is not None]
    rows = np.unique(np.concatenate(numbers))
    total = first.values.new_zeros((len(rows), *first.values.shape[1:]))
    for one, own in zip(held, numbers, strict=True):
        total[torch.from_numpy(rows.searchsorted(own))] += one.values
    return total, torch.from_numpy(rows)


def replay(job: Job, index: int, entries: Iterable[Entry], state: ShardState | None = None) -> Shard:
    """Return the shard that a journal makes, from the beginning or from a saved state."""
    shard = Shard(job, index, state)
    for entry in entries:
        shard.apply(entry)
    return shard
