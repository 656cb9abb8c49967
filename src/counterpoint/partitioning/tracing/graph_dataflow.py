"""Dataflow of a traced graph: constants, shared memory, in-place changes, and the values passed between layers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from counterpoint.model.dataflow import INPUT
from counterpoint.partitioning.fx_ops import (
    assign_storage,
    fake_value,
    is_random_op,
    mutated_inputs,
    op_name,
)
from counterpoint.partitioning.tracing.export_trace import TracedGraph


@dataclass(frozen=True, slots=True)
class DataflowInfo:
    """Facts about the operations of one trace.

    Args:
        constants: nodes that depend on no input and no parameter, and may be computed again wherever they are used.
        non_differentiable: nodes that no gradient reaches: they depend on no parameter and no floating-point input.
        storage: for each node, one node that represents the memory it may share.
        mutations: for each memory except buffers, the operations that change it in place.
    """

    constants: frozenset[fx.Node]
    non_differentiable: frozenset[fx.Node]
    storage: dict[fx.Node, fx.Node]
    mutations: dict[fx.Node, tuple[fx.Node, ...]]


def analyze_dataflow(traced: TracedGraph) -> DataflowInfo:
    """Compute the dataflow facts of a trace."""
    storage = assign_storage(traced.graph)
    mutations: dict[fx.Node, list[fx.Node]] = {}
    for node in traced.graph.nodes:
        for mutated in mutated_inputs(node):
            mutations.setdefault(storage[mutated], []).append(node)
    constants: set[fx.Node] = set()
    non_differentiable: set[fx.Node] = set()
    for node in traced.graph.nodes:
        if _is_non_differentiable(node, traced, non_differentiable):
            non_differentiable.add(node)
        if _is_constant(node, traced, constants) and storage[node] not in mutations:
            constants.add(node)
    buffer_storage = {storage[node] for node in traced.buffers}
    return DataflowInfo(
        frozenset(constants),
        frozenset(non_differentiable),
        storage,
        {root: tuple(nodes) for root, nodes in mutations.items() if root not in buffer_storage},
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


@dataclass(frozen=True, slots=True)
class BoundaryValue:
    """A value that one layer produces, or changes in place, for later ones.

    Args:
        node: the operation.
        producer: the layer; ``INPUT`` for an input of the model.
        consumers: the layers that read it in this state; the last layer also reads what it only returns.
    """

    node: fx.Node
    producer: int
    consumers: tuple[int, ...]


def find_boundary_values(
    traced: TracedGraph, dataflow: DataflowInfo, layers: Sequence[Sequence[fx.Node]]
) -> tuple[BoundaryValue, ...]:
    """Return the values passed between layers, by producer, those of one producer in the order of the trace.

    A value that a later layer changes in place is a new value with that layer as its producer.

    Args:
        traced: the operations.
        dataflow: facts about them.
        layers: the operations of each layer, in order.
    """
    defined_in = dict.fromkeys(traced.inputs, INPUT) | {
        node: index for index, nodes in enumerate(layers) for node in nodes
    }
    producer = dict(defined_in)
    consumers: dict[tuple[fx.Node, int], set[int]] = {}
    nodes_sharing = _group_by_storage(dataflow, defined_in)
    for index, nodes in enumerate(layers):
        read = {source for node in nodes for source in node.all_input_nodes}
        read.update(traced.outputs if index == len(layers) - 1 else ())
        for node in read:
            if node not in dataflow.constants and defined_in.get(node, index) < index:
                consumers.setdefault((node, producer[node]), set()).add(index)
        for node in nodes:
            for root in {dataflow.storage[source] for source in mutated_inputs(node)}:
                producer.update({other: index for other in nodes_sharing.get(root, ()) if defined_in[other] < index})
    position = {node: index for index, node in enumerate(defined_in)}
    order = sorted(consumers, key=lambda key: (key[1], position[key[0]]))
    return tuple(BoundaryValue(node, layer, tuple(sorted(consumers[node, layer]))) for node, layer in order)


def _group_by_storage(dataflow: DataflowInfo, nodes: Collection[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Return the nodes that may share each memory that is changed in place."""
    groups: dict[fx.Node, list[fx.Node]] = {root: [] for root in dataflow.mutations}
    for node in nodes:
        if dataflow.storage[node] in groups:
            groups[dataflow.storage[node]].append(node)
    return groups


def find_differentiable_values(traced: TracedGraph, dataflow: DataflowInfo) -> frozenset[fx.Node]:
    """Return the values that may receive a gradient: floating-point ones that depend on a parameter."""
    differentiable: set[fx.Node] = set(traced.params)
    storages: set[fx.Node] = set()
    for node in traced.graph.nodes:
        if node.op != "call_function" or op_name(node) in {"detach", "detach_"}:
            continue
        if any(source in differentiable or dataflow.storage[source] in storages for source in node.all_input_nodes):
            if _can_require_grad(node):
                differentiable.add(node)
            storages.update(dataflow.storage[source] for source in mutated_inputs(node))
    return frozenset(differentiable) | frozenset(
        node for node in dataflow.storage if dataflow.storage[node] in storages
    )


def _can_require_grad(node: fx.Node) -> bool:
    value = fake_value(node)
    if isinstance(value, Tensor):
        return value.is_floating_point() or value.is_complex()
    return True
