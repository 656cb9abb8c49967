"""Traces: what each rank did in a step and when, simulated or measured."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from math import isfinite
from typing import Any, Literal, TypeAlias

from counterpoint.errors import DataError
from counterpoint.json_reader import parse_json_file
from counterpoint.optim.validation import shorten

Lane: TypeAlias = Literal["compute", "link", "wait"]
"""Where time is spent: computing, on the rank's outgoing link, or waiting for another rank."""
LANES: tuple[Lane, ...] = ("compute", "link", "wait")
MemoryTimeline: TypeAlias = tuple[tuple[float, int], ...]
"""Pairs of a time in seconds and the bytes held from then on."""


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One instruction, or several that ran as one call.

    Args:
        rank: the rank that ran it.
        index: index of its first instruction in the rank's body.
        text: its text form, ``F0.0 F1.0`` for a call of two blocks.
        start_s: start, in seconds from the beginning of the step; a copy of its batch may have run before.
        stop_s: end, likewise.
        lane: where the time was spent.
    """

    rank: int
    index: int
    text: str
    start_s: float
    stop_s: float
    lane: Lane

    @property
    def is_copy(self) -> bool:
        """Whether it is a copy of a batch to a device, which no instruction asks for."""
        return self.text.startswith("copy(")

    @property
    def seconds(self) -> float:
        """Its duration."""
        return self.stop_s - self.start_s


@dataclass(frozen=True)
class Trace:
    """All events of one step.

    Args:
        events: sorted by rank, then by time.
        num_ranks: number of ranks of the program.
        source: ``simulated`` or ``measured``.
        memory: what each rank holds over time; empty if unknown.
        steady_step_s: if several steps are in flight, seconds from the end of one to the end of the next; else None.
    """

    events: tuple[TraceEvent, ...]
    num_ranks: int
    source: Literal["simulated", "measured"]
    memory: tuple[MemoryTimeline, ...] = ()
    steady_step_s: float | None = None

    @staticmethod
    def from_events(events: Iterable[TraceEvent], num_ranks: int, source: Literal["simulated", "measured"]) -> Trace:
        """Return a trace with its events sorted."""
        ordered = sorted(events, key=lambda event: (event.rank, event.start_s, event.stop_s, event.index))
        return Trace(tuple(ordered), num_ranks, source)

    @cached_property
    def step_s(self) -> float:
        """Seconds per step: its length, or if several are in flight, what one step adds to a run."""
        return self.span_s if self.steady_step_s is None else self.steady_step_s

    @cached_property
    def span_s(self) -> float:
        """Seconds from the beginning of the step to the end of its last event."""
        return max((event.stop_s for event in self.events), default=0.0)

    def busy_s(self, rank: int) -> float:
        """Return the seconds during which a rank computes."""
        return sum(event.seconds for event in self.events if event.rank == rank and event.lane == "compute")

    @property
    def bubble(self) -> float:
        """Fraction of all ranks' time, from 0 to 1, in which they do not compute."""
        total = self.step_s * self.num_ranks
        if total == 0:
            return 0.0
        return 1.0 - sum(event.seconds for event in self.events if event.lane == "compute") / total

    def to_json(self) -> str:
        """Format the trace as JSON."""
        fields = {
            "source": self.source,
            "num_ranks": self.num_ranks,
            "events": [asdict(event) for event in self.events],
        }
        optional = {"memory": self.memory or None, "steady_step_s": self.steady_step_s}
        return json.dumps(fields | {name: value for name, value in optional.items() if value is not None})

    @staticmethod
    def from_json(text: str) -> Trace:
        """Parse what :meth:`to_json` wrote.

        Raises:
            DataError: the text is not a trace.
        """
        try:
            loaded: Any = parse_json_file(text.encode())
            events = tuple(TraceEvent(**event) for event in loaded["events"])
            memory = tuple(tuple((float(at), int(size)) for at, size in curve) for curve in loaded.get("memory", ()))
            beat_s = float(loaded["steady_step_s"]) if "steady_step_s" in loaded else None
            trace = Trace(events, int(loaded["num_ranks"]), loaded["source"], memory, beat_s)
            _check_events(trace)
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise DataError(
                f"this is not a trace: {shorten(str(error))}; give a file that Trace.to_json wrote"
            ) from error
        return trace


def _check_events(trace: Trace) -> None:
    if trace.source not in {"simulated", "measured"}:
        raise ValueError(f"its source is {trace.source!r}")
    for event in trace.events:
        is_typed = type(event.rank) is type(event.index) is int and type(event.text) is str and event.lane in LANES
        if not is_typed or not 0 <= event.rank < trace.num_ranks or not isfinite(event.start_s + event.stop_s):
            raise ValueError(f"it has the event {event}")
