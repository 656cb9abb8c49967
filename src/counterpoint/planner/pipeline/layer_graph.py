"""Layers as they were measured, in the text that PipeDream's profiler writes and its users keep.

Source: the profiler of PipeDream (github.com/msr-fiddle/pipedream, ``graph.txt``).

The places where a graph of layers can be cut: every set of layers that holds all that its members read.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from counterpoint.errors import PlanError

MS_PER_S = 1e3
FIGURES = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
NODE = re.compile(
    rf"(\S+) -- (.*) -- {', '.join(f'{figure}=([^,]*)' for figure in FIGURES[:-1])}, {FIGURES[-1]}=([^, ]*)"
    r"(?: -- stage_id=\d+)?"
)
INPUT_PREFIX = "Input"
"""How the text of a layer begins that stands for loading data; what it takes is no work of a stage."""


@dataclass(frozen=True, slots=True)
class GraphNode:
    """What one layer takes for one minibatch.

    Args:
        name: unique in its profile, without spaces.
        text: what it is, as its users read it.
        forward_s: seconds forward.
        backward_s: seconds backward.
        activation_bytes: what it hands on.
        weight_bytes: its parameters.
    """

    name: str
    description: str
    forward_s: float
    backward_s: float
    activation_bytes: float
    weight_bytes: float

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True)
class LayerGraph:
    """Layers and who reads whom.

    Args:
        layers: in any order.
        edges: names of a layer and of one that reads it.
    """

    nodes: tuple[GraphNode, ...]
    edges: tuple[tuple[str, str], ...]

    def without_inputs(self) -> LayerGraph:
        """Return the profile without layers that only load data, which no plan can place."""
        gone = {layer.name for layer in self.nodes if layer.description.startswith(INPUT_PREFIX)}
        return LayerGraph(
            tuple(layer for layer in self.nodes if layer.name not in gone),
            tuple(edge for edge in self.edges if not gone.intersection(edge)),
        )


def chain_graph(layers: Iterable[GraphNode]) -> LayerGraph:
    """Return layers of which each reads the one before it."""
    row = tuple(layers)
    return LayerGraph(row, tuple((one.name, other.name) for one, other in pairwise(row)))


def parse_graph(text: str) -> LayerGraph:
    """Return the profile that a ``graph.txt`` holds.

    Raises:
        PlanError: a line that cannot be read, by its number, or an edge of a layer that is not there.

    Example:
        >>> times = "forward_compute_time=1.0, backward_compute_time=2.0"
        >>> profile = read_profile(f"node1 -- Linear -- {times}, activation_size=[4.0; 4.0], parameter_size=16.0")
        >>> profile.layers[0].seconds, profile.layers[0].activation_bytes
        (0.003, 8.0)
    """
    layers: dict[str, GraphNode] = {}
    edges: list[tuple[str, str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("\t"):
            edges.append(_parse_edge(line, number))
        elif line.strip():
            layer = _parse_node(line.strip(), number)
            if layer.name in layers:
                raise PlanError(f"line {number} names {layer.name!r} again; every layer has a name of its own")
            layers[layer.name] = layer
    for edge in edges:
        for name in edge:
            if name not in layers:
                raise PlanError(f"the edge {edge[0]} -- {edge[1]} names {name!r}, which no line describes")
    return LayerGraph(tuple(layers.values()), tuple(edges))


def format_graph(graph: LayerGraph) -> str:
    """Return the text of a profile, which reads back as the same one to a thousandth of a millisecond and of a byte."""
    lines = [
        f"{layer.name} -- {layer.description} -- forward_compute_time={layer.forward_s * MS_PER_S:.3f}, "
        f"backward_compute_time={layer.backward_s * MS_PER_S:.3f}, activation_size={layer.activation_bytes:.3f}, "
        f"parameter_size={layer.weight_bytes:.3f}"
        for layer in graph.nodes
    ]
    return "\n".join([*lines, *(f"\t{one} -- {other}" for one, other in graph.edges)]) + "\n"


def _parse_edge(line: str, number: int) -> tuple[str, str]:
    names = line.strip().split(" -- ")
    if len(names) != 2:
        raise PlanError(f"line {number} is no edge: {line.strip()!r}; it reads 'layer -- reader' behind a tab")
    return names[0], names[1]


def _parse_node(line: str, number: int) -> GraphNode:
    found = NODE.fullmatch(line)
    if found is None:
        raise PlanError(f"line {number} is no layer: {line!r}; it reads 'name -- text -- {'=, '.join(FIGURES)}='")
    name, text, *figures = found.groups()
    try:
        forward_ms, backward_ms, activation, weight = map(_parse_number, figures)
    except ValueError as error:
        raise PlanError(f"line {number}, {name}: {error}") from None
    return GraphNode(name, text, forward_ms / MS_PER_S, backward_ms / MS_PER_S, activation, weight)


def _parse_number(text: str) -> float:
    """Return a figure, or the sum of several in brackets."""
    value = sum(map(float, text.strip("[]").split("; "))) if text.startswith("[") else float(text)
    if not 0 <= value < float("inf"):
        raise ValueError(f"{text} is no size and no time; both are finite and at least 0")
    return value


MAX_CUTS = 4096
WORD_BITS = 64


@dataclass(frozen=True)
class GraphCuts:
    """All cuts of a profile, the empty one first; a stage is what one cut holds and another inside it does not.

    Args:
        profile: whose.
        held: for every state its layers, as a set of bits in the order of the profile.
    """

    graph: LayerGraph
    layer_sets: tuple[int, ...]

    @property
    def num_cuts(self) -> int:
        """How many there are, the empty one among them."""
        return len(self.layer_sets)

    @cached_property
    def contains(self) -> NDArray[np.bool_]:
        """Whether a state holds a layer."""
        num_layers = len(self.graph.nodes)
        bits = np.unpackbits(self._bit_words.view(np.uint8), axis=1, count=num_layers, bitorder="little")
        return bits.view(np.bool_)

    @cached_property
    def is_subset(self) -> NDArray[np.bool_]:
        """Whether the first state is a part of the second, and smaller."""
        found = ~np.eye(self.num_cuts, dtype=np.bool_)
        for word in self._bit_words.T:
            found &= (word[:, None] & ~word[None, :]) == 0
        return found

    @cached_property
    def seconds(self) -> NDArray[np.float64]:
        """Seconds of all layers that a state holds."""
        return self._sum_layers([layer.seconds for layer in self.graph.nodes])

    @cached_property
    def forward_s(self) -> NDArray[np.float64]:
        """Of these the seconds forward."""
        return self._sum_layers([layer.forward_s for layer in self.graph.nodes])

    @cached_property
    def weight_bytes(self) -> NDArray[np.float64]:
        """Bytes of their weights."""
        return self._sum_layers([layer.weight_bytes for layer in self.graph.nodes])

    @cached_property
    def activation_bytes(self) -> NDArray[np.float64]:
        """Bytes of all that they hand on."""
        return self._sum_layers([layer.activation_bytes for layer in self.graph.nodes])

    @cached_property
    def consumers(self) -> dict[int, int]:
        """For every layer that others read, by its place in the profile, these as a set of bits."""
        at = {layer.name: bit for bit, layer in enumerate(self.graph.nodes)}
        found: defaultdict[int, int] = defaultdict(int)
        for one, other in self.graph.edges:
            found[at[one]] |= 1 << at[other]
        return dict(found)

    @cached_property
    def crossing_bytes(self) -> NDArray[np.float64]:
        """Bytes of what layers inside hand on to layers outside; each once."""
        if not self.graph.edges:
            return np.zeros(self.num_cuts)
        at = {layer.name: bit for bit, layer in enumerate(self.graph.nodes)}
        edges = sorted({(at[one], at[other]) for one, other in self.graph.edges})
        firsts = [place for place, (one, _) in enumerate(edges) if not place or edges[place - 1][0] != one]
        makers, readers = np.array(edges).T
        is_cut = self.contains[:, makers] & ~self.contains[:, readers]
        sizes = np.array([layer.activation_bytes for layer in self.graph.nodes])
        return _masked_sum(np.logical_or.reduceat(is_cut, firsts, axis=1), sizes[makers[firsts]])

    def layer_names(self, state: int) -> tuple[str, ...]:
        """Return the layers that a state holds."""
        return tuple(layer.name for bit, layer in enumerate(self.graph.nodes) if self.layer_sets[state] >> bit & 1)

    @property
    def _bit_words(self) -> NDArray[np.uint64]:
        """The layers of every state as bits of words, the first layer in the lowest bit of the first word."""
        num_words = len(self.graph.nodes) // WORD_BITS + 1
        packed = b"".join(held.to_bytes(num_words * WORD_BITS // 8, "little") for held in self.layer_sets)
        return np.frombuffer(packed, dtype="<u8").reshape(self.num_cuts, num_words)

    def _sum_layers(self, figures: list[float]) -> NDArray[np.float64]:
        return _masked_sum(self.contains, np.array(figures))


def _masked_sum(is_counted: NDArray[np.bool_], figures: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return for every row the sum of those figures that count.

    Without BLAS, whose threads cost more than they save here, and which adds up in another order on another machine.
    """
    found: NDArray[np.float64] = np.einsum("sl,l->s", is_counted.astype(np.float64), figures)
    return found


def find_cuts(profile: LayerGraph) -> GraphCuts:
    """Return every cut of a profile, in an order in which a state comes behind all that are inside it.

    A chain of n layers has n + 1; a graph with branches has more, as many as ways to stop in the middle of them. A
    layer that takes no time and has no weights is held as soon as all that it reads is.

    Raises:
        PlanError: the layers read each other in a circle, or there are more than 4,096 cuts.
    """
    graph = _Dependencies.from_graph(profile)
    start = graph.initial_cut()
    found, front = {0, start[0]}, [start]
    while front:
        held, ready = front.pop()
        for bit in ready:
            grown, more = graph.extend(held, bit)
            if grown not in found:
                found.add(grown)
                front.append((grown, [*(other for other in ready if other != bit), *more]))
        if len(found) > MAX_CUTS:
            raise PlanError(
                f"a graph of {len(graph.needs)} layers can be cut at more than {MAX_CUTS} places; join the layers "
                "of its branches to fewer"
            )
    if (1 << len(graph.needs)) - 1 not in found:
        raise PlanError("the layers of the profile read each other in a circle, so that none of them can be first")
    return GraphCuts(profile, tuple(sorted(found, key=lambda held: (held.bit_count(), held))))


@dataclass(frozen=True, slots=True)
class _Dependencies:
    """Who reads whom, by places in a profile.

    Args:
        needs: for every layer those that it reads, as a set of bits.
        readers: for every layer those that read it.
        free: whether it takes no time and has no weights.
    """

    needs: list[int]
    consumers: list[list[int]]
    is_free: list[bool]

    @classmethod
    def from_graph(cls, graph: LayerGraph) -> _Dependencies:
        """Return the graph of a profile."""
        at = {layer.name: place for place, layer in enumerate(graph.nodes)}
        needs = [0] * len(at)
        readers: list[list[int]] = [[] for _ in at]
        for one, other in dict.fromkeys(graph.edges):
            needs[at[other]] |= 1 << at[one]
            readers[at[one]].append(at[other])
        return cls(needs, readers, [not layer.seconds and not layer.weight_bytes for layer in graph.nodes])

    def initial_cut(self) -> tuple[int, list[int]]:
        """Return the smallest state, and the layers that can be added to it."""
        held, ready = 0, list[int]()
        for bit, needed in enumerate(self.needs):
            if not needed and self.is_free[bit]:
                held, more = self.extend(held, bit)
                ready += more
            elif not needed:
                ready.append(bit)
        return held, ready

    def extend(self, held: int, bit: int) -> tuple[int, list[int]]:
        """Return a state with one more layer and all without work that follow, and what only now can be added."""
        front, ready = [bit], list[int]()
        while front:
            last = front.pop()
            held |= 1 << last
            for reader in self.consumers[last]:
                if not self.needs[reader] & ~held:
                    (front if self.is_free[reader] else ready).append(reader)
        return held, ready
