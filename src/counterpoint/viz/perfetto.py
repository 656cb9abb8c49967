"""Export traces as Chrome trace JSON, the format of ui.perfetto.dev, chrome://tracing and torch.profiler."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from counterpoint.program.trace import LANES, Trace, TraceEvent
from counterpoint.viz.event_style import EventLabels, event_kind, weight_version

Json: TypeAlias = dict[str, object]


def format_perfetto(*traces: Trace, base_time_ns: int = 0) -> str:
    """Return the JSON text of all traces: a process per rank, a thread per lane.

    Ranks of the second trace have process numbers after those of the first, and are sorted next to them. A transfer
    that overlaps computing is an asynchronous event; all others nest strictly in their thread. If a rank has several
    chunks, an event names its chunk; if it reads weights older than the newest, their relative version.

    Args:
        traces: simulated, measured, or both.
        base_time_ns: when the step began on the clock of other traces, to merge them.
    """
    events: list[Json] = []
    first_pid = 0
    for position, trace in enumerate(traces):
        prefix = f"{trace.source} " if len(traces) > 1 else ""
        for rank in range(trace.num_ranks):
            events += _metadata_events(first_pid + rank, f"{prefix}rank {rank}", rank * len(traces) + position)
        events += _rank_events(trace, first_pid)
        first_pid += trace.num_ranks
    document = {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base_time_ns,
        "distributedInfo": {"world_size": max((trace.num_ranks for trace in traces), default=0)},
        "traceEvents": events,
    }
    return json.dumps(document, allow_nan=False)


def _metadata_events(pid: int, name: str, position: int) -> Iterator[Json]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": position}}
    for tid, lane in enumerate(LANES):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": lane}}


def _rank_events(trace: Trace, first_pid: int) -> Iterator[Json]:
    labels = EventLabels.from_traces(trace)
    ranks: defaultdict[int, list[TraceEvent]] = defaultdict(list)
    for event in trace.events:
        ranks[event.rank].append(event)
    for rank, events in ranks.items():
        async_indices = _find_async_events(events)
        for number, event in enumerate(events):
            yield from _event_json(
                event, first_pid + rank, number if number in async_indices else None, labels.chunk(event)
            )


def _event_json(event: TraceEvent, pid: int, number: int | None, chunk: int | None) -> Iterator[Json]:
    start, stop = _interval_ns(event)
    fields: Json = {
        "name": event.text,
        "cat": "user_annotation",
        "pid": pid,
        "tid": LANES.index(event.lane),
    }
    details: Json = {"index": event.index, "kind": event_kind(event)}
    if chunk is not None:
        details["chunk"] = chunk
    if weight_version(event):
        details["version"] = weight_version(event)
    if number is None:
        yield {"ph": "X", **fields, "ts": start / 1000, "dur": (stop - start) / 1000, "args": details}
        return
    fields["id"] = f"{pid}.{number}"
    yield {"ph": "b", **fields, "ts": start / 1000, "args": details}
    yield {"ph": "e", **fields, "ts": stop / 1000}


def _find_async_events(events: Sequence[TraceEvent]) -> set[int]:
    """Return the indices of asynchronous events: transfers during computing, and partial intersections in a lane."""
    computes = [_interval_ns(event) for event in events if event.lane == "compute"]
    async_indices = set()
    open_until: dict[str, list[int]] = {lane: [] for lane in LANES}
    next_compute = 0
    by_start = sorted(
        range(len(events)), key=lambda index: (_interval_ns(events[index])[0], -_interval_ns(events[index])[1])
    )
    for index in by_start:
        start, stop = _interval_ns(events[index])
        while next_compute < len(computes) and computes[next_compute][1] <= start:
            next_compute += 1
        overlaps = next_compute < len(computes) and computes[next_compute][0] < stop
        ends = open_until[events[index].lane]
        while ends and ends[-1] <= start:
            ends.pop()
        if (events[index].lane == "link" and overlaps and stop > start) or (ends and ends[-1] < stop):
            async_indices.add(index)
        else:
            ends.append(stop)
    return async_indices


def _interval_ns(event: TraceEvent) -> tuple[int, int]:
    return round(event.start_s * 1e9), round(event.stop_s * 1e9)
