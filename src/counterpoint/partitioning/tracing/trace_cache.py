"""The traces of a model in one mode: which of them serves inputs of which shapes, and when another one is made.

The first two shapes are traced as they are. A third one is traced with symbols for all dims that have varied so far,
and that trace serves every shape for which its guards are true. Where they are not, or the forward fixes a size (a loop
over time steps in Python, a recurrent layer), shapes are traced one by one again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import fx

from counterpoint.errors import PlanError
from counterpoint.partitioning.input_shapes import (
    InputShapes,
    ShapeGuards,
    Size,
    evaluate,
    find_differing_dims,
    format_shapes,
)
from counterpoint.partitioning.tracing.segment_builder import BuiltSegment, build_segment
from counterpoint.partitioning.tracing.split_trace import SplitTrace
from counterpoint.terminal_text import warn

MakeTrace: TypeAlias = Callable[[InputShapes, frozenset[tuple[int, int]]], SplitTrace]
"""From shapes, and the dims of them that become symbols, to a trace."""

MAX_TRACES = 32
"""The largest number of traces that are kept; the oldest but the first is dropped."""

MAX_SYMBOLIC_TRACES = 8
"""The largest number of traces with symbols that are made."""

NUM_TRACES_TO_WARN = 10
"""From how many traces on one without symbols causes a warning, once."""

MAX_KNOWN_SHAPES = 4096
"""For how many shapes it is remembered which trace serves them."""


@dataclass(frozen=True, slots=True)
class GuardedTrace:
    """A trace, what must be true of shapes for it to be right, and the segments that were built from it.

    Args:
        split: the trace.
        guards: of the shapes.
        seeds: whether segments call the seed function.
        segments: by first layer and one past the last.
    """

    split: SplitTrace
    guards: ShapeGuards
    seeds: bool
    segments: dict[tuple[int, int], BuiltSegment] = field(default_factory=dict)

    def segment(self, first_layer: int, stop_layer: int) -> BuiltSegment:
        """Return a run of layers, built once."""
        key = (first_layer, stop_layer)
        if key not in self.segments:
            self.segments[key] = build_segment(self.split, first_layer, stop_layer, seeds=self.seeds)
        return self.segments[key]


@dataclass(frozen=True, slots=True)
class BoundTrace:
    """A trace with the values of its sizes for inputs of certain shapes."""

    trace: GuardedTrace
    sizes: Mapping[fx.Node, Size]


class TraceCache:
    """The traces of a model in one mode.

    Args:
        name: of the model, for the warning.
        shapes: of the inputs that the model is traced with first.
        make_trace: traces the model.
        seeds: whether segments call the seed function.
    """

    def __init__(self, name: str, shapes: InputShapes, make_trace: MakeTrace, *, seeds: bool = True) -> None:
        self.name = name
        self.seeds = seeds
        self.first_shapes = shapes
        self.make_trace = make_trace
        self.num_traces = 0
        self._traces: list[GuardedTrace] = []
        self._known: dict[InputShapes, BoundTrace] = {}
        self._varying: set[tuple[int, int]] = set()  # dims that have had several sizes
        self._fixed: set[tuple[int, int]] = set()  # those that the forward fixes
        self._num_symbolic = 0
        self._has_warned = False
        self.first = self.find(shapes).trace.split

    def find(self, shapes: InputShapes) -> BoundTrace:
        """Return the trace for inputs of these shapes; one is made if there is none.

        Raises:
            PlanError: the model cannot be split for these shapes as it was for the first ones.
        """
        bound = self._known.get(shapes)
        if bound is None:
            bound = self._find_bound(shapes)
            if len(self._known) >= MAX_KNOWN_SHAPES:
                self._known.clear()
            self._known[shapes] = bound
        return bound

    def _find_bound(self, shapes: InputShapes) -> BoundTrace:
        bound = next((bound for trace in reversed(self._traces) if (bound := _bind(trace, shapes))), None)
        if bound is not None:
            return bound
        differing = set(find_differing_dims(self.first_shapes, shapes))
        self._varying |= differing
        may_be_symbolic = self._num_symbolic < MAX_SYMBOLIC_TRACES and self._varying.isdisjoint(self._fixed)
        if differing and may_be_symbolic and self.num_traces > 1:
            bound = self._trace_symbolic(shapes)
        return self._trace_fixed(shapes) if bound is None else bound

    def _trace_fixed(self, shapes: InputShapes) -> BoundTrace:
        """Trace with numbers, for these shapes alone; warn if that was done for many."""
        split = self.make_trace(shapes, frozenset())
        bound = BoundTrace(GuardedTrace(split, ShapeGuards.read(split.traced.inputs), self.seeds), {})
        self._keep(bound.trace)
        if self.num_traces >= NUM_TRACES_TO_WARN and not self._has_warned:
            self._has_warned = True
            warn(
                f"{self.name} was traced {self.num_traces} times, the last time for inputs of the shapes "
                f"{format_shapes(shapes)}: what its forward does depends on them, as a loop over time steps does, so "
                "that every new shape takes a trace of its own; give batches of few shapes (pad lengths to multiples "
                "of 64), or use a strategy that keeps the model whole (data, zero of level 1 or 2, server)",
                stacklevel=2,
            )
        return bound

    def _trace_symbolic(self, shapes: InputShapes) -> BoundTrace | None:
        """Trace with symbols for the dims that vary; return None if that is not possible."""
        self._num_symbolic += 1
        try:
            split = self.make_trace(shapes, frozenset(self._varying))
        except PlanError:  # a trace without symbols shows whether it is the model's fault
            split = None
        trace = None if split is None else GuardedTrace(split, ShapeGuards.read(split.traced.inputs), self.seeds)
        bound = None if trace is None else _bind(trace, shapes)
        if split is None or bound is None or any(node in split.traced.sizes for node in split.traced.outputs):
            self._fixed |= self._varying
            return None
        self._fixed |= {
            (index, dim)
            for index, dim in self._varying
            if shapes[index][dim] > 1 and not bound.trace.guards.is_symbolic(index, dim)
        }
        self._keep(bound.trace)
        return bound

    def _keep(self, trace: GuardedTrace) -> None:
        """Keep a new trace; drop the oldest but the first if there are too many."""
        self.num_traces += 1
        self._traces.append(trace)
        if len(self._traces) > MAX_TRACES:
            del self._traces[1]
            self._known.clear()


def _bind(trace: GuardedTrace, shapes: InputShapes) -> BoundTrace | None:
    """Return the trace for inputs of these shapes; None if it is not right for them."""
    symbols = trace.guards.bind(shapes)
    if symbols is None:
        return None
    return BoundTrace(
        trace, {node: evaluate(expression, symbols) for node, expression in trace.split.traced.sizes.items()}
    )
