"""Where values come from: what is constant, what shares memory, what is changed in place.

What the pieces of a trace make for each other: who makes a value last, who reads it, whether it is learned.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from counterpoint.model.dataflow import INPUT
from counterpoint.partitioning.export_trace import TracedGraph
from counterpoint.partitioning.fx_ops import (
    fake_value,
    is_aten_op,
    is_random_op,
    iter_tensor_arguments,
    mutated_inputs,
    op_name,
)


@dataclass(frozen=True, slots=True)
class DataflowInfo:
    """Facts about the operations of one trace.

    Args:
        constants: what depends on no input and no parameter and may be computed again wherever it is used.
        fixed: what no gradient can reach: it depends on no parameter and on no input of floating point.
        storage: for each node, one node that stands for the memory it may share.
        changes: for each memory but those of buffers, the operations that change it in place.
    """

    constants: frozenset[fx.Node]
    non_differentiable: frozenset[fx.Node]
    storage: dict[fx.Node, fx.Node]
    mutations: dict[fx.Node, tuple[fx.Node, ...]]


def analyze_dataflow(traced: TracedGraph) -> DataflowInfo:
    """Return the facts about a trace."""
    storage = _assign_storage(traced)
    changes: dict[fx.Node, list[fx.Node]] = {}
    for node in traced.graph.nodes:
        for changed in mutated_inputs(node):
            changes.setdefault(storage[changed], []).append(node)
    constants: set[fx.Node] = set()
    fixed: set[fx.Node] = set()
    for node in traced.graph.nodes:
        if _is_non_differentiable(node, traced, fixed):
            fixed.add(node)
        if _is_constant(node, traced, constants) and storage[node] not in changes:
            constants.add(node)
    of_buffers = {storage[node] for node in traced.buffers}
    return DataflowInfo(
        frozenset(constants),
        frozenset(fixed),
        storage,
        {root: tuple(nodes) for root, nodes in changes.items() if root not in of_buffers},
    )


def _is_non_differentiable(node: fx.Node, traced: TracedGraph, non_differentiable: set[fx.Node]) -> bool:
    if node.op == "placeholder":
        value = fake_value(node)
        return not isinstance(value, torch.Tensor) or not value.is_floating_point()
    return node not in traced.params and all(source in non_differentiable for source in node.all_input_nodes)


def _is_constant(node: fx.Node, traced: TracedGraph, constants: set[fx.Node]) -> bool:
    if node.op not in {"get_attr", "call_function"} or node in traced.params or is_random_op(node):
        return False
    return all(source in constants for source in node.all_input_nodes)


def _assign_storage(traced: TracedGraph) -> dict[fx.Node, fx.Node]:
    """Return for each node the first node whose memory it may share."""
    parent: dict[fx.Node, fx.Node] = {}

    def root(node: fx.Node) -> fx.Node:
        while parent[node] is not node:
            node = parent[node]
        return node

    for node in traced.graph.nodes:
        parent[node] = node
        for source in _may_alias(node):
            parent[root(node)] = root(source)
    return {node: root(node) for node in parent}


def _may_alias(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose memory the operation's result may be."""
    if node.op != "call_function":
        return []
    if not is_aten_op(node):
        return list(node.all_input_nodes[:1])  # what is taken out of a tuple
    return [source for argument, source in iter_tensor_arguments(node) if argument.alias_info is not None]


@dataclass(frozen=True, slots=True)
class BoundaryValue:
    """A value as one piece makes it, or changes it in place, for later ones.

    Args:
        node: what it is.
        maker: the piece; ``INPUT`` for an input of the model.
        readers: the pieces that read it as it is then; the last one also reads what it only gives out.
    """

    node: fx.Node
    producer: int
    consumers: tuple[int, ...]


def find_boundary_values(
    traced: TracedGraph, dataflow: DataflowInfo, layers: Sequence[Sequence[fx.Node]]
) -> tuple[BoundaryValue, ...]:
    """Return what pieces make for later ones, by maker, those of one maker in the order of the trace.

    Args:
        traced: the operations.
        flow: facts about them.
        pieces: the operations of each piece, in order.
    """
    born = dict.fromkeys(traced.inputs, INPUT) | {node: at for at, nodes in enumerate(layers) for node in nodes}
    maker = dict(born)
    readers: dict[tuple[fx.Node, int], set[int]] = {}
    shared = _group_by_storage(dataflow, born)
    for at, nodes in enumerate(layers):
        read = {source for node in nodes for source in node.all_input_nodes}
        read.update(traced.outputs if at == len(layers) - 1 else ())
        for node in read:
            if node not in dataflow.constants and born.get(node, at) < at:
                readers.setdefault((node, maker[node]), set()).add(at)
        for node in nodes:
            for root in {dataflow.storage[source] for source in mutated_inputs(node)}:
                maker.update({other: at for other in shared.get(root, ()) if born[other] < at})
    place = {node: index for index, node in enumerate(born)}
    order = sorted(readers, key=lambda key: (key[1], place[key[0]]))
    return tuple(BoundaryValue(node, made, tuple(sorted(readers[node, made]))) for node, made in order)


def _group_by_storage(dataflow: DataflowInfo, nodes: Collection[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Return the values that may share each memory that is changed in place."""
    shared: dict[fx.Node, list[fx.Node]] = {root: [] for root in dataflow.mutations}
    for node in nodes:
        if dataflow.storage[node] in shared:
            shared[dataflow.storage[node]].append(node)
    return shared


def find_differentiable_values(traced: TracedGraph, dataflow: DataflowInfo) -> frozenset[fx.Node]:
    """Return the values that a gradient may come back for: those of floating point that depend on a parameter."""
    learned: set[fx.Node] = set(traced.params)
    memory: set[fx.Node] = set()
    for node in traced.graph.nodes:
        if node.op != "call_function" or op_name(node) in {"detach", "detach_"}:
            continue
        if any(source in learned or dataflow.storage[source] in memory for source in node.all_input_nodes):
            if _can_require_grad(node):
                learned.add(node)
            memory.update(dataflow.storage[source] for source in mutated_inputs(node))
    return frozenset(learned) | frozenset(node for node in dataflow.storage if dataflow.storage[node] in memory)


def _can_require_grad(node: fx.Node) -> bool:
    value = fake_value(node)
    if isinstance(value, Tensor):
        return value.is_floating_point() or value.is_complex()
    return True
