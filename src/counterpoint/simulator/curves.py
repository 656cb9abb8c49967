"""How much each rank holds over the time of a step, from its trace and its words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from counterpoint.program.program import Program
from counterpoint.program.trace import Curve, Event, Trace
from counterpoint.program.traffic import Sizes
from counterpoint.simulator.memory import ADAM_STATES, held_bytes


def with_memory(trace: Trace, program: Program, size_of: Sizes, *, num_states: int = ADAM_STATES) -> Trace:
    """Return a trace that says what each rank holds when.

    What a word needs is held from its beginning; one that waits for others has what it waits for when they have come.

    Args:
        trace: of one step, or of one body of a stream.
        program: what was played or run; a stream with all of its parts.
        size_of: bytes of a whole value where it is kept.
        num_states: how many values per parameter the optimizer keeps.
    """
    times: defaultdict[int, defaultdict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for event in trace.events:
        if event.lane != "link":  # it goes on while its rank does the next word
            times[event.rank][event.index].append(event)
    curves = []
    for rank, held in enumerate(held_bytes(program, size_of, num_states=num_states)):
        row = program.rows[rank]
        first = len(row.prologue)
        curves.append(_curve(held[first : first + len(row.body) + 1], times[rank]))
    return replace(trace, memory=tuple(curves))


def _curve(held: Sequence[int], times: defaultdict[int, list[Event]]) -> Curve:
    """Return when a rank begins to hold how much; the first of ``held`` is what it holds before its first word."""
    found = [(0.0, held[0])]
    now = 0.0
    for index, num_bytes in enumerate(held[1:]):
        for event in times.get(index, ()):
            now = max(now, event.start_s if event.lane == "compute" else event.stop_s)
        if num_bytes != found[-1][1]:
            if found[-1] == (now, min(found[-1][1], num_bytes)):
                found.pop()  # it rises further in the same moment; what falls in no time has been a peak all the same
            found.append((now, num_bytes))
        now = max([now, *(event.stop_s for event in times.get(index, ()))])
    return tuple(found)
