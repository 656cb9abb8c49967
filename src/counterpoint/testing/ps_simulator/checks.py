"""Invariants of a finished run, computed independently of the code under test.

Values are compared with a sequential reference: torch's own optimizers applied in the order of the journal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from counterpoint.ps.consistency import Bsp, Ssp
from counterpoint.ps.coordinator import Coordinator
from counterpoint.ps.job_config import JobConfig
from counterpoint.ps.messages import (
    JoinClock,
    JournalEntry,
    KeySpec,
    LeaveClock,
    PushReply,
    PushRequest,
    SetMembers,
    WriteRequest,
)
from counterpoint.ps.placement import shard_of_row
from counterpoint.ps.replication import PrimaryReplica
from counterpoint.ps.server import ServerNode
from counterpoint.ps.shard import PsShard, replay_journal
from counterpoint.ps.storage.key_storage import initial_rows
from counterpoint.ps.update_rules import Adagrad, Adam, Assign, Sgd
from counterpoint.testing.ps_simulator.cluster import ObservedHistory, entry_id
from counterpoint.testing.ps_simulator.simulated_worker import (
    RANGE_KEY,
    TABLE_KEY,
    initial_range,
    key_specs,
    slice_gradient,
)


def check_values(job: JobConfig, index: int, pushes: Sequence[PushRequest], shard: PsShard) -> Iterator[str]:
    """Yield gradients in a journal, or final values, that differ from those of one machine with torch's optimizer.

    Args:
        job: configuration.
        index: of the shard.
        pushes: of its journal, in order.
        shard: its final state.
    """
    is_bsp = isinstance(job.consistency, Bsp)
    for spec in key_specs(job, index):
        rows = torch.arange(spec.high)
        param = nn.Parameter(initial_rows(spec, rows) if spec.width else initial_range(spec))
        optimizer = make_torch_optimizer(spec, param)
        versions = [param.detach().clone()]
        for update in _group_updates(job, [push for push in pushes if push.key == spec.key]):
            yield from _check_gradients(index, update, versions)
            param.grad = _sum_gradients(update, param)
            with torch.sparse.check_sparse_tensor_invariants(enable=False):  # type: ignore[no-untyped-call]
                optimizer.step()
            versions.append(param.detach().clone())
        shard_rows = rows[shard_of_row(rows, job.num_shards) == index] if spec.width else None
        actual, expected = (
            shard.keys[spec.key].storage.read(shard_rows),
            param.detach() if shard_rows is None else param.detach()[shard_rows],
        )
        is_same = torch.allclose(actual, expected, rtol=1e-12, atol=1e-14) if is_bsp else torch.equal(actual, expected)
        if not is_same:
            yield f"{spec.key} of shard {index} is {actual.tolist()}, but its update rule gives {expected.tolist()}"


def _group_updates(job: JobConfig, pushes: Sequence[PushRequest]) -> Iterator[list[PushRequest]]:
    """Yield the pushes of each update, each slice once."""
    first: dict[int, PushRequest] = {}
    for push in pushes:
        first.setdefault(push.slice_index, push)
    if not isinstance(job.consistency, Bsp):
        yield from ([push] for push in first.values())
        return
    size = job.consistency.slices_per_step
    for start in range(0, len(first), size):
        yield [first[slice_index] for slice_index in range(start, start + size) if slice_index in first]


def _check_gradients(index: int, update: Sequence[PushRequest], versions: Sequence[Tensor]) -> Iterator[str]:
    for push in update:
        read = versions[push.read_version] if push.rows is None else versions[push.read_version][push.rows]
        if not torch.equal(slice_gradient(read, push.slice_index), push.values):
            where = f"{push.key} on shard {index}"
            yield f"push {entry_id(push)} of {where} is not the gradient at version {push.read_version}"


def _sum_gradients(update: Sequence[PushRequest], param: Tensor) -> Tensor:
    """Return the gradient of one update."""
    total = torch.zeros_like(param)
    for push in update:
        if push.rows is None:
            total = total + push.values if len(update) > 1 else push.values
        else:
            total[push.rows] += push.values
    named = [push.rows for push in update if push.rows is not None]
    if not named:
        return total
    rows = torch.cat(named).unique()  # type: ignore[no-untyped-call]
    return torch.sparse_coo_tensor(rows[None], total[rows], total.shape, check_invariants=False, is_coalesced=True)


def make_torch_optimizer(spec: KeySpec, param: nn.Parameter) -> torch.optim.Optimizer:
    """Return torch's optimizer for the update rule of a key."""
    match spec.rule:
        case Assign():
            return torch.optim.SGD([param], 1.0)
        case Sgd():
            return torch.optim.SGD([param], spec.rule.lr, spec.rule.momentum, foreach=False)
        case Adagrad():
            return torch.optim.Adagrad([param], spec.rule.lr, foreach=False)
        case Adam():
            return torch.optim.Adam([param], spec.rule.lr, (spec.rule.beta1, spec.rule.beta2), foreach=False)


def check_run(
    job: JobConfig, coordinator: Coordinator, nodes: Sequence[ServerNode], history: ObservedHistory
) -> list[str]:
    """Return all violations of a finished run."""
    violations: list[str] = []
    for index, replicas in enumerate(coordinator.state.replicas):  # former replicas may not have the newest view
        holders = [node for node in nodes if node.name in {replicas.primary, replicas.backup}]
        violations += _check_shard(job, index, holders, history)
    return [*violations, *_check_tasks(job, coordinator), *_check_snapshots(job, history)]


def _check_shard(job: JobConfig, index: int, nodes: Sequence[ServerNode], history: ObservedHistory) -> Iterator[str]:
    journal = history.journals.get(index, {})
    entries = [journal[position] for position in sorted(journal)]
    if sorted(journal) != list(range(len(journal))):
        yield f"the journal of shard {index} has gaps: {sorted(journal)}"
        return
    copies = shard_copies(index, nodes)
    if not copies:
        yield f"no server has shard {index} in the end"
        return
    yield from check_acknowledged(index, entries, history)
    yield from check_replicas(job, index, entries, nodes, history)
    yield from check_replay(job, index, entries, copies)
    if isinstance(job.consistency, Ssp):
        yield from check_staleness(job.consistency.staleness, index, entries)
    yield from check_values(job, index, [entry for entry in entries if isinstance(entry, PushRequest)], copies[0][1])


def shard_copies(index: int, nodes: Sequence[ServerNode]) -> list[tuple[str, PsShard]]:
    """Return the copies of a shard with their servers' names, the primary's first."""
    replicas = [(node.name, replica) for node in nodes if (replica := node.shard_replicas.get(index)) is not None]
    replicas.sort(key=lambda one: not isinstance(one[1], PrimaryReplica))
    return [(name, replica.shard) for name, replica in replicas if replica.shard is not None]


def check_acknowledged(index: int, entries: Sequence[JournalEntry], history: ObservedHistory) -> Iterator[str]:
    """Yield acknowledged pushes that are missing from the journal."""
    names = {entry_id(entry) for entry in entries}
    for shard, name in history.acknowledged:
        if shard == index and name not in names:
            yield f"an acknowledged update is lost: push {name} on shard {index}"


def check_replicas(
    job: JobConfig, index: int, entries: Sequence[JournalEntry], nodes: Sequence[ServerNode], history: ObservedHistory
) -> Iterator[str]:
    """Yield replicas that lack journal entries, or have later ones that they did not record as uncommitted.

    A server without a backup may be ahead of its journal by what its disk does not have yet.
    """
    for node in nodes:
        replica = node.shard_replicas.get(index)
        shard = None if replica is None else replica.shard
        if replica is None or shard is None or shard.position < len(entries):
            has = "nothing" if shard is None else f"{shard.position} entries"
            yield f"{node.name} keeps {has} of shard {index}, whose journal has {len(entries)}"
        elif shard.position > len(entries) and not (isinstance(replica, PrimaryReplica) and replica.has_no_backup):
            noted = history.uncommitted((node.name, node.membership.incarnation), index)
            more = [noted[position] for position in range(len(entries), shard.position) if position in noted]
            if replay_journal(job, index, [*entries, *more]).digest() != shard.digest():
                yield f"shard {index} on {node.name} is not what it has noted of {shard.position} entries"


def check_replay(
    job: JobConfig, index: int, entries: Sequence[JournalEntry], copies: Sequence[tuple[str, PsShard]]
) -> Iterator[str]:
    """Yield slices not counted exactly once, and copies that differ bitwise from a replay of the journal."""
    counted: dict[str, list[int]] = {RANGE_KEY: [], TABLE_KEY: []}
    shard = PsShard(job, index)
    for position, entry in enumerate(entries, 1):
        reply = shard.apply(entry)
        if isinstance(entry, PushRequest) and isinstance(reply, PushReply) and reply.is_new:
            counted[entry.key].append(entry.slice_index)
        due = [(name, replica) for name, replica in copies if replica.position == position]
        digest = shard.digest() if due else ""
        for name, replica in due:
            if replica.digest() != digest:
                yield f"shard {index} on {name} differs from a replay of {position} journal entries"
    for key, slices in counted.items():
        if sorted(slices) != list(range(job.data.num_slices * job.data.num_epochs)):
            yield f"{key} of shard {index} has counted slices {sorted(slices)}"


def check_staleness(staleness: int, index: int, entries: Sequence[JournalEntry]) -> Iterator[str]:
    """Yield pushes whose gradient missed pushes of the slowest worker from more than ``staleness`` clocks ago."""
    for key in (RANGE_KEY, TABLE_KEY):
        clocks: dict[tuple[str, int], int] = {}
        slowest_at, seen, slowest = [0], set[int](), 0
        for entry in entries:
            match entry:
                case JoinClock():
                    clocks[requester(entry)] = slowest
                case LeaveClock():
                    clocks.pop(requester(entry), None)
                case SetMembers():
                    incarnations = {(worker.name, worker.incarnation) for worker in entry.workers}
                    clocks = {
                        incarnation: clock for incarnation, clock in clocks.items() if incarnation in incarnations
                    }
                case PushRequest() if entry.key == key:
                    clock = clocks.get(requester(entry), 1 << 40)
                    if slowest_at[entry.read_version] < clock - staleness:
                        yield f"push {entry_id(entry)} of {key} on shard {index} is staler than {staleness}"
                    clocks[requester(entry)] = clock + 1
                    if entry.slice_index not in seen:
                        seen.add(entry.slice_index)
                        slowest_at.append(slowest)
                case _:
                    pass
            slowest = min(clocks.values(), default=slowest)
            slowest_at[-1] = slowest


def requester(entry: WriteRequest) -> tuple[str, int]:
    """Return the incarnation that sent a request."""
    return entry.header.member, entry.header.incarnation


def _check_tasks(job: JobConfig, coordinator: Coordinator) -> Iterator[str]:
    done = sorted(coordinator.state.tasks.done)
    starts = range(0, job.data.num_slices, job.data.slices_per_task)
    if done != [(epoch, start) for epoch in range(job.data.num_epochs) for start in starts]:
        yield f"tasks done are {done}"


def _check_snapshots(job: JobConfig, history: ObservedHistory) -> Iterator[str]:
    """Yield snapshots whose shards have counted different data."""
    for snapshot in sorted({snapshot for snapshot, _ in history.snapshots}):
        states = [history.snapshots.get((snapshot, index)) for index in range(job.num_shards)]
        counted = {key.progress.applied_slices for state in states if state is not None for key in state.keys}
        if len(counted) > 1 or None in states:
            yield f"the shards of snapshot {snapshot} have counted different data: {sorted(counted)}"
