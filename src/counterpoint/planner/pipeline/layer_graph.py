"""Layer graphs with measured times, in the text format of PipeDream's profiler, and all places where they can be cut.

A cut is a set of layers that contains all inputs of its members; a stage is the difference of two cuts, one of which
contains the other.

Source:
    The profiler of PipeDream (github.com/msr-fiddle/pipedream, ``graph.txt``).
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
"""Prefix of the description of nodes that load data; their time is not work of a stage."""


@dataclass(frozen=True, slots=True)
class GraphNode:
    """One layer, with its times and sizes for one minibatch.

    Args:
        name: unique in its graph, without spaces.
        description: of the layer.
        forward_s: seconds of the forward.
        backward_s: seconds of the backward.
        activation_bytes: of its output.
        weight_bytes: of its parameters.
    """

    name: str
    description: str
    forward_s: float
    backward_s: float
    activation_bytes: float
    weight_bytes: float

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True)
class LayerGraph:
    """Layers and the edges between them.

    Args:
        nodes: in any order.
        edges: names of a layer and of one that reads its output.
    """

    nodes: tuple[GraphNode, ...]
    edges: tuple[tuple[str, str], ...]

    def without_inputs(self) -> LayerGraph:
        """Return the graph without nodes that only load data, which no plan can place."""
        input_names = {node.name for node in self.nodes if node.description.startswith(INPUT_PREFIX)}
        return LayerGraph(
            tuple(node for node in self.nodes if node.name not in input_names),
            tuple(edge for edge in self.edges if not input_names.intersection(edge)),
        )


def chain_graph(layers: Iterable[GraphNode]) -> LayerGraph:
    """Return a graph in which each layer reads the one before it."""
    nodes = tuple(layers)
    return LayerGraph(nodes, tuple((node.name, reader.name) for node, reader in pairwise(nodes)))


def parse_graph(text: str) -> LayerGraph:
    """Return the graph in the text of a ``graph.txt``.

    Raises:
        PlanError: a line that cannot be parsed, by its number, or an edge of a layer that does not exist.

    Example:
        >>> times = "forward_compute_time=1.0, backward_compute_time=2.0"
        >>> graph = parse_graph(f"node1 -- Linear -- {times}, activation_size=[4.0; 4.0], parameter_size=16.0")
        >>> graph.nodes[0].seconds, graph.nodes[0].activation_bytes
        (0.003, 8.0)
    """
    nodes: dict[str, GraphNode] = {}
    edges: list[tuple[str, str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("\t"):
            edges.append(_parse_edge(line, number))
        elif line.strip():
            node = _parse_node(line.strip(), number)
            if node.name in nodes:
                raise PlanError(f"line {number} defines {node.name!r} again; layer names are unique")
            nodes[node.name] = node
    for edge in edges:
        for name in edge:
            if name not in nodes:
                raise PlanError(f"the edge {edge[0]} -- {edge[1]} names {name!r}, which no line defines")
    return LayerGraph(tuple(nodes.values()), tuple(edges))


def format_graph(graph: LayerGraph) -> str:
    """Return the text of a graph, which parses as an equal one to a thousandth of a millisecond and of a byte."""
    lines = [
        f"{layer.name} -- {layer.description} -- forward_compute_time={layer.forward_s * MS_PER_S:.3f}, "
        f"backward_compute_time={layer.backward_s * MS_PER_S:.3f}, activation_size={layer.activation_bytes:.3f}, "
        f"parameter_size={layer.weight_bytes:.3f}"
        for layer in graph.nodes
    ]
    return "\n".join([*lines, *(f"\t{producer} -- {reader}" for producer, reader in graph.edges)]) + "\n"


def _parse_edge(line: str, number: int) -> tuple[str, str]:
    names = line.strip().split(" -- ")
    if len(names) != 2:
        raise PlanError(f"line {number} is not an edge: {line.strip()!r}; expected a tab and 'layer -- reader'")
    return names[0], names[1]


def _parse_node(line: str, number: int) -> GraphNode:
    match = NODE.fullmatch(line)
    if match is None:
        raise PlanError(f"line {number} is not a layer: {line!r}; expected 'name -- text -- {'=, '.join(FIGURES)}='")
    name, text, *numbers = match.groups()
    try:
        forward_ms, backward_ms, activation_bytes, weight_bytes = map(_parse_number, numbers)
    except ValueError as error:
        raise PlanError(f"line {number}, {name}: {error}") from None
    return GraphNode(name, text, forward_ms / MS_PER_S, backward_ms / MS_PER_S, activation_bytes, weight_bytes)


def _parse_number(text: str) -> float:
    """Return a number, or the sum of several in brackets."""
    value = sum(map(float, text.strip("[]").split("; "))) if text.startswith("[") else float(text)
    if not 0 <= value < float("inf"):
        raise ValueError(f"{text} is not a size or a time; both are finite and at least 0")
    return value


MAX_CUTS = 4096
WORD_BITS = 64


@dataclass(frozen=True)
class GraphCuts:
    """All cuts of a graph, the empty one first.

    Args:
        graph: the layer graph.
        layer_sets: for every cut its layers, as a bit set in the order of the graph.
    """

    graph: LayerGraph
    layer_sets: tuple[int, ...]

    @property
    def num_cuts(self) -> int:
        """Number of cuts, including the empty one."""
        return len(self.layer_sets)

    @cached_property
    def contains(self) -> NDArray[np.bool_]:
        """Whether a cut contains a layer; shape (num_cuts, num_layers)."""
        num_layers = len(self.graph.nodes)
        bits = np.unpackbits(self._bit_words.view(np.uint8), axis=1, count=num_layers, bitorder="little")
        return bits.view(np.bool_)

    @cached_property
    def is_subset(self) -> NDArray[np.bool_]:
        """Whether the first cut is a proper subset of the second; shape (num_cuts, num_cuts)."""
        is_subset = ~np.eye(self.num_cuts, dtype=np.bool_)
        for word in self._bit_words.T:
            is_subset &= (word[:, None] & ~word[None, :]) == 0
        return is_subset

    @cached_property
    def seconds(self) -> NDArray[np.float64]:
        """Seconds of all layers of each cut."""
        return self._sum_layers([layer.seconds for layer in self.graph.nodes])

    @cached_property
    def forward_s(self) -> NDArray[np.float64]:
        """Of these, the seconds of the forward."""
        return self._sum_layers([layer.forward_s for layer in self.graph.nodes])

    @cached_property
    def weight_bytes(self) -> NDArray[np.float64]:
        """Bytes of the weights of each cut."""
        return self._sum_layers([layer.weight_bytes for layer in self.graph.nodes])

    @cached_property
    def activation_bytes(self) -> NDArray[np.float64]:
        """Bytes of all outputs of each cut."""
        return self._sum_layers([layer.activation_bytes for layer in self.graph.nodes])

    @cached_property
    def consumers(self) -> dict[int, int]:
        """For every layer whose output is read, by its index, the readers as a bit set."""
        index = {layer.name: bit for bit, layer in enumerate(self.graph.nodes)}
        consumers: defaultdict[int, int] = defaultdict(int)
        for maker, reader in self.graph.edges:
            consumers[index[maker]] |= 1 << index[reader]
        return dict(consumers)

    @cached_property
    def crossing_bytes(self) -> NDArray[np.float64]:
        """Bytes that cross each cut: outputs of its layers that are read outside; each counted once."""
        if not self.graph.edges:
            return np.zeros(self.num_cuts)
        index = {layer.name: bit for bit, layer in enumerate(self.graph.nodes)}
        edges = sorted({(index[maker], index[reader]) for maker, reader in self.graph.edges})
        first_edges = [
            edge_index
            for edge_index, (maker, _) in enumerate(edges)
            if not edge_index or edges[edge_index - 1][0] != maker
        ]
        maker_bits, reader_bits = np.array(edges).T
        is_cut = self.contains[:, maker_bits] & ~self.contains[:, reader_bits]
        sizes = np.array([layer.activation_bytes for layer in self.graph.nodes])
        return _masked_sum(np.logical_or.reduceat(is_cut, first_edges, axis=1), sizes[maker_bits[first_edges]])

    def layer_names(self, cut: int) -> tuple[str, ...]:
        """Return the names of the layers of a cut."""
        return tuple(layer.name for bit, layer in enumerate(self.graph.nodes) if self.layer_sets[cut] >> bit & 1)

    @property
    def _bit_words(self) -> NDArray[np.uint64]:
        """The layers of every cut as 64-bit words, the first layer in the lowest bit of the first word."""
        num_words = len(self.graph.nodes) // WORD_BITS + 1
        packed = b"".join(members.to_bytes(num_words * WORD_BITS // 8, "little") for members in self.layer_sets)
        return np.frombuffer(packed, dtype="<u8").reshape(self.num_cuts, num_words)

    def _sum_layers(self, figures: list[float]) -> NDArray[np.float64]:
        return _masked_sum(self.contains, np.array(figures))


def _masked_sum(is_counted: NDArray[np.bool_], figures: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return for every row the sum of the selected values.

    Without BLAS, whose threads cost more than they save here, and whose order of summation depends on the machine.
    """
    sums: NDArray[np.float64] = np.einsum("sl,l->s", is_counted.astype(np.float64), figures)
    return sums


def find_cuts(graph: LayerGraph) -> GraphCuts:
    """Return every cut of a graph, in an order in which a cut follows all its subsets.

    A chain of n layers has n + 1; a graph with branches has more, one for each combination of positions in the
    branches. A layer that takes no time and has no weights belongs to every cut that contains its inputs.

    Raises:
        PlanError: the graph has a cycle, or more than 4,096 cuts.
    """
    dependencies = _Dependencies.from_graph(graph)
    first = dependencies.initial_cut()
    cuts, pending = {0, first[0]}, [first]
    while pending:
        members, ready = pending.pop()
        for layer in ready:
            extended, newly_ready = dependencies.extend(members, layer)
            if extended not in cuts:
                cuts.add(extended)
                pending.append(
                    (extended, [*(ready_layer for ready_layer in ready if ready_layer != layer), *newly_ready])
                )
        if len(cuts) > MAX_CUTS:
            raise PlanError(
                f"a graph of {len(dependencies.needs)} layers can be cut at more than {MAX_CUTS} places; merge "
                "layers of its branches"
            )
    if (1 << len(dependencies.needs)) - 1 not in cuts:
        raise PlanError("the layer graph has a cycle; remove an edge")
    return GraphCuts(graph, tuple(sorted(cuts, key=lambda members: (members.bit_count(), members))))


@dataclass(frozen=True, slots=True)
class _Dependencies:
    """Edges of a graph by the indices of layers.

    Args:
        needs: for every layer its inputs, as a bit set.
        consumers: for every layer those that read it.
        is_free: whether it takes no time and has no weights.
    """

    needs: list[int]
    consumers: list[list[int]]
    is_free: list[bool]

    @classmethod
    def from_graph(cls, graph: LayerGraph) -> _Dependencies:
        index = {layer.name: position for position, layer in enumerate(graph.nodes)}
        needs = [0] * len(index)
        readers: list[list[int]] = [[] for _ in index]
        for maker, reader in dict.fromkeys(graph.edges):
            needs[index[reader]] |= 1 << index[maker]
            readers[index[maker]].append(index[reader])
        return cls(needs, readers, [not layer.seconds and not layer.weight_bytes for layer in graph.nodes])

    def initial_cut(self) -> tuple[int, list[int]]:
        """Return the smallest cut, and the layers that can be added to it."""
        members, ready = 0, list[int]()
        for bit, needed in enumerate(self.needs):
            if not needed and self.is_free[bit]:
                members, newly_ready = self.extend(members, bit)
                ready += newly_ready
            elif not needed:
                ready.append(bit)
        return members, ready

    def extend(self, members: int, bit: int) -> tuple[int, list[int]]:
        """Return a cut with one more layer and all free ones that follow, and the layers that can be added only now."""
        pending, ready = [bit], list[int]()
        while pending:
            last = pending.pop()
            members |= 1 << last
            for reader in self.consumers[last]:
                if not self.needs[reader] & ~members:
                    (pending if self.is_free[reader] else ready).append(reader)
        return members, ready
