"""Traces as Chrome Trace JSON, which ui.perfetto.dev, chrome://tracing and torch's own traces share."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from counterpoint.drawing.kinds import kind_of
from counterpoint.drawing.naming import Naming, version_of
from counterpoint.program.trace import LANES, Event, Trace

Json: TypeAlias = dict[str, object]


def write_perfetto(*traces: Trace, base_time_ns: int = 0) -> str:
    """Return one JSON text with all traces: a process per rank, a thread per lane.

    Ranks of the second trace get the process numbers after those of the first, and stand beside them on the screen.
    A transfer that overlaps computing is an asynchronous event; all others nest strictly in their thread. Where a rank
    has several chunks an event says which one is run, and where it reads older weights than the newest, how much older.

    Args:
        traces: simulated, measured, or both.
        base_time_ns: when the step began on the clock of other traces, to be merged with them.
    """
    events: list[Json] = []
    first_pid = 0
    for place, trace in enumerate(traces):
        prefix = f"{trace.source} " if len(traces) > 1 else ""
        for rank in range(trace.num_ranks):
            events += _names(first_pid + rank, f"{prefix}rank {rank}", rank * len(traces) + place)
        events += _rank_events(trace, first_pid)
        first_pid += trace.num_ranks
    written = {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base_time_ns,
        "distributedInfo": {"world_size": max((trace.num_ranks for trace in traces), default=0)},
        "traceEvents": events,
    }
    return json.dumps(written, allow_nan=False)


def _names(pid: int, name: str, place: int) -> Iterator[Json]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": place}}
    for tid, lane in enumerate(LANES):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": lane}}


def _rank_events(trace: Trace, first_pid: int) -> Iterator[Json]:
    names = Naming.of(trace)
    ranks: defaultdict[int, list[Event]] = defaultdict(list)
    for event in trace.events:
        ranks[event.rank].append(event)
    for rank, events in ranks.items():
        beside = _beside(events)
        for number, event in enumerate(events):
            yield from _written(event, first_pid + rank, number if number in beside else None, names.chunk(event))


def _written(event: Event, pid: int, number: int | None, chunk: int | None) -> Iterator[Json]:
    start, stop = _nanoseconds(event)
    shown: Json = {
        "name": event.words,
        "cat": "user_annotation",
        "pid": pid,
        "tid": LANES.index(event.lane),
    }
    details: Json = {"index": event.index, "kind": kind_of(event)}
    if chunk is not None:
        details["chunk"] = chunk
    if version_of(event):
        details["version"] = version_of(event)
    if number is None:
        yield {"ph": "X", **shown, "ts": start / 1000, "dur": (stop - start) / 1000, "args": details}
        return
    shown["id"] = f"{pid}.{number}"
    yield {"ph": "b", **shown, "ts": start / 1000, "args": details}
    yield {"ph": "e", **shown, "ts": stop / 1000}


def _beside(events: Sequence[Event]) -> set[int]:
    """Return where asynchronous events stand: transfers during computing, and half overlaps within a lane."""
    computes = [_nanoseconds(event) for event in events if event.lane == "compute"]
    found = set()
    open_until: dict[str, list[int]] = {lane: [] for lane in LANES}
    next_compute = 0
    order = sorted(range(len(events)), key=lambda at: (_nanoseconds(events[at])[0], -_nanoseconds(events[at])[1]))
    for at in order:
        start, stop = _nanoseconds(events[at])
        while next_compute < len(computes) and computes[next_compute][1] <= start:
            next_compute += 1
        overlaps = next_compute < len(computes) and computes[next_compute][0] < stop
        ends = open_until[events[at].lane]
        while ends and ends[-1] <= start:
            ends.pop()
        if (events[at].lane == "link" and overlaps and stop > start) or (ends and ends[-1] < stop):
            found.add(at)
        else:
            ends.append(stop)
    return found


def _nanoseconds(event: Event) -> tuple[int, int]:
    return round(event.start_s * 1e9), round(event.stop_s * 1e9)
