"""Where values come from: what is constant, what shares memory, what is changed in place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from counterpoint.cutting.ops import changed_by, draws_random, is_kernel, sources_of, value_of
from counterpoint.cutting.trace import Traced


@dataclass(frozen=True, slots=True)
class Flow:
    """Facts about the operations of one trace.

    Args:
        constants: what depends on no input and no parameter and may be computed again wherever it is used.
        fixed: what no gradient can reach: it depends on no parameter and on no input of floating point.
        storage: for each node, one node that stands for the memory it may share.
        changes: for each memory but those of buffers, the operations that change it in place.
    """

    constants: frozenset[fx.Node]
    fixed: frozenset[fx.Node]
    storage: dict[fx.Node, fx.Node]
    changes: dict[fx.Node, tuple[fx.Node, ...]]


def flow_of(traced: Traced) -> Flow:
    """Return the facts about a trace."""
    storage = _storage(traced)
    changes: dict[fx.Node, list[fx.Node]] = {}
    for node in traced.graph.nodes:
        for changed in changed_by(node):
            changes.setdefault(storage[changed], []).append(node)
    constants: set[fx.Node] = set()
    fixed: set[fx.Node] = set()
    for node in traced.graph.nodes:
        if _is_fixed(node, traced, fixed):
            fixed.add(node)
        if _may_repeat(node, traced, constants) and storage[node] not in changes:
            constants.add(node)
    of_buffers = {storage[node] for node in traced.buffers}
    return Flow(
        frozenset(constants),
        frozenset(fixed),
        storage,
        {root: tuple(nodes) for root, nodes in changes.items() if root not in of_buffers},
    )


def _is_fixed(node: fx.Node, traced: Traced, fixed: set[fx.Node]) -> bool:
    if node.op == "placeholder":
        value = value_of(node)
        return not isinstance(value, torch.Tensor) or not value.is_floating_point()
    return node not in traced.params and all(source in fixed for source in node.all_input_nodes)


def _may_repeat(node: fx.Node, traced: Traced, constants: set[fx.Node]) -> bool:
    if node.op not in {"get_attr", "call_function"} or node in traced.params or draws_random(node):
        return False
    return all(source in constants for source in node.all_input_nodes)


def _storage(traced: Traced) -> dict[fx.Node, fx.Node]:
    """Return for each node the first node whose memory it may share."""
    parent: dict[fx.Node, fx.Node] = {}

    def root(node: fx.Node) -> fx.Node:
        while parent[node] is not node:
            node = parent[node]
        return node

    for node in traced.graph.nodes:
        parent[node] = node
        for source in _shared_by(node):
            parent[root(node)] = root(source)
    return {node: root(node) for node in parent}


def _shared_by(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose memory the operation's result may be."""
    if node.op != "call_function":
        return []
    if not is_kernel(node):
        return list(node.all_input_nodes[:1])  # what is taken out of a tuple
    return [source for argument, source in sources_of(node) if argument.alias_info is not None]
