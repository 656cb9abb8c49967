"""What must hold of a finished run, said a second time and in other words than in the code that is checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from counterpoint.server.coordinator import Coordinator
from counterpoint.server.holding import Primary
from counterpoint.server.job import Job, Ssp
from counterpoint.server.messages import Enter, Members, Push, Pushed, Rest
from counterpoint.server.node import Node
from counterpoint.server.shard import Shard, replay
from counterpoint.server.simulator.history import History, name_of
from counterpoint.server.simulator.reference import check_numbers
from counterpoint.server.simulator.trainer import RANGE, TABLE
from counterpoint.server.states import Change, Entry


def verdict(job: Job, coordinator: Coordinator, nodes: Sequence[Node], history: History) -> list[str]:
    """Return what is wrong with a run that is over."""
    found: list[str] = []
    for index, keepers in enumerate(coordinator.book.keepers):  # whoever kept it before may not have heard of it yet
        keeping = [node for node in nodes if node.name in {keepers.primary, keepers.backup}]
        found += _check_shard(job, index, keeping, history)
    return [*found, *_check_tasks(job, coordinator), *_check_cuts(job, history)]


def _check_shard(job: Job, index: int, nodes: Sequence[Node], history: History) -> Iterator[str]:
    journal = history.journals.get(index, {})
    entries = [journal[position] for position in sorted(journal)]
    if sorted(journal) != list(range(len(journal))):
        yield f"the journal of shard {index} has gaps: {sorted(journal)}"
        return
    copies = copies_of(index, nodes)
    if not copies:
        yield f"nobody keeps shard {index} in the end"
        return
    yield from check_acknowledged(index, entries, history)
    yield from check_reach(job, index, entries, nodes, history)
    yield from check_replay(job, index, entries, copies)
    if isinstance(job.consistency, Ssp):
        yield from check_staleness(job.consistency.staleness, index, entries)
    yield from check_numbers(job, index, [entry for entry in entries if isinstance(entry, Push)], copies[0][1])


def copies_of(index: int, nodes: Sequence[Node]) -> list[tuple[str, Shard]]:
    """Return the copies of a shard with their servers' names, that of the first keeper first."""
    found = [(node.name, held) for node in nodes if (held := node.holdings.get(index)) is not None]
    found.sort(key=lambda one: not isinstance(one[1], Primary))
    return [(name, held.shard) for name, held in found if held.shard is not None]


def check_acknowledged(index: int, entries: Sequence[Entry], history: History) -> Iterator[str]:
    """Yield pushes that a worker was told are counted, and that are not in the journal."""
    names = {name_of(entry) for entry in entries}
    for shard, name in history.acknowledged:
        if shard == index and name not in names:
            yield f"an acknowledged update is lost: push {name} on shard {index}"


def check_reach(
    job: Job, index: int, entries: Sequence[Entry], nodes: Sequence[Node], history: History
) -> Iterator[str]:
    """Yield keepers that lack a part of the journal, or have more than it and than what they have noted as uncertain.

    A server that keeps the shard alone may be ahead of its journal by what its disk does not have yet.
    """
    for node in nodes:
        held = node.holdings.get(index)
        shard = None if held is None else held.shard
        if held is None or shard is None or shard.position < len(entries):
            has = "nothing" if shard is None else f"{shard.position} entries"
            yield f"{node.name} keeps {has} of shard {index}, whose journal has {len(entries)}"
        elif shard.position > len(entries) and not (isinstance(held, Primary) and held.is_alone):
            noted = history.uncertain((node.name, node.presence.incarnation), index)
            more = [noted[at] for at in range(len(entries), shard.position) if at in noted]
            if replay(job, index, [*entries, *more]).digest() != shard.digest():
                yield f"shard {index} on {node.name} is not what it has noted of {shard.position} entries"


def check_replay(job: Job, index: int, entries: Sequence[Entry], copies: Sequence[tuple[str, Shard]]) -> Iterator[str]:
    """Yield data that is not counted exactly once, and copies that are not what the journal makes, bit for bit."""
    counted: dict[str, list[int]] = {RANGE: [], TABLE: []}
    shard = Shard(job, index)
    for position, entry in enumerate(entries, 1):
        answer = shard.apply(entry)
        if isinstance(entry, Push) and isinstance(answer, Pushed) and answer.is_new:
            counted[entry.key].append(entry.portion)
        due = [(name, copy) for name, copy in copies if copy.position == position]
        digest = shard.digest() if due else ""
        for name, copy in due:
            if copy.digest() != digest:
                yield f"shard {index} on {name} is not what its journal says after {position} entries"
    for key, portions in counted.items():
        if sorted(portions) != list(range(job.work.num_portions * job.work.num_epochs)):
            yield f"{key} of shard {index} has counted portions {sorted(portions)}"


def check_staleness(staleness: int, index: int, entries: Sequence[Entry]) -> Iterator[str]:
    """Yield pushes whose gradient had not seen what the slowest had pushed ``staleness`` clocks before."""
    for key in (RANGE, TABLE):
        clocks: dict[tuple[str, int], int] = {}
        slowest_at, seen, slowest = [0], set[int](), 0
        for entry in entries:
            match entry:
                case Enter():
                    clocks[life_of(entry)] = slowest
                case Rest():
                    clocks.pop(life_of(entry), None)
                case Members():
                    lives = {(worker.name, worker.incarnation) for worker in entry.workers}
                    clocks = {life: clock for life, clock in clocks.items() if life in lives}
                case Push() if entry.key == key:
                    clock = clocks.get(life_of(entry), 1 << 40)
                    if slowest_at[entry.read] < clock - staleness:
                        yield f"push {name_of(entry)} of {key} on shard {index} is staler than {staleness}"
                    clocks[life_of(entry)] = clock + 1
                    if entry.portion not in seen:
                        seen.add(entry.portion)
                        slowest_at.append(slowest)
                case _:
                    pass
            slowest = min(clocks.values(), default=slowest)
            slowest_at[-1] = slowest


def life_of(entry: Change) -> tuple[str, int]:
    """Return who asked."""
    return entry.origin.member, entry.origin.incarnation


def _check_tasks(job: Job, coordinator: Coordinator) -> Iterator[str]:
    done = sorted(coordinator.book.queue.done)
    starts = range(0, job.work.num_portions, job.work.task_portions)
    if done != [(epoch, start) for epoch in range(job.work.num_epochs) for start in starts]:
        yield f"tasks done are {done}"


def _check_cuts(job: Job, history: History) -> Iterator[str]:
    """Yield cuts whose parts have not counted the same data."""
    for cut in sorted({cut for cut, _ in history.cuts}):
        states = [history.cuts.get((cut, index)) for index in range(job.num_shards)]
        counted = {key.counts.portions for state in states if state is not None for key in state.keys}
        if len(counted) > 1 or None in states:
            yield f"the parts of cut {cut} have counted different data: {sorted(counted)}"
