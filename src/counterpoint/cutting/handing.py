"""What the pieces of a trace make for each other: who makes a value last, who reads it, whether it is learned."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from counterpoint.cutting.flow import Flow
from counterpoint.cutting.ops import changed_by, value_of, word_of
from counterpoint.cutting.trace import Traced
from counterpoint.model.values import INPUT


@dataclass(frozen=True, slots=True)
class Handed:
    """A value as one piece makes it, or changes it in place, for later ones.

    Args:
        node: what it is.
        maker: the piece; ``INPUT`` for an input of the model.
        readers: the pieces that read it as it is then; the last one also reads what it only gives out.
    """

    node: fx.Node
    maker: int
    readers: tuple[int, ...]


def handed_on(traced: Traced, flow: Flow, pieces: Sequence[Sequence[fx.Node]]) -> tuple[Handed, ...]:
    """Return what pieces make for later ones, by maker, those of one maker in the order of the trace.

    Args:
        traced: the operations.
        flow: facts about them.
        pieces: the operations of each piece, in order.
    """
    born = dict.fromkeys(traced.inputs, INPUT) | {node: at for at, nodes in enumerate(pieces) for node in nodes}
    maker = dict(born)
    readers: dict[tuple[fx.Node, int], set[int]] = {}
    shared = _by_storage(flow, born)
    for at, nodes in enumerate(pieces):
        read = {source for node in nodes for source in node.all_input_nodes}
        read.update(traced.outputs if at == len(pieces) - 1 else ())
        for node in read:
            if node not in flow.constants and born.get(node, at) < at:
                readers.setdefault((node, maker[node]), set()).add(at)
        for node in nodes:
            for root in {flow.storage[source] for source in changed_by(node)}:
                maker.update({other: at for other in shared.get(root, ()) if born[other] < at})
    place = {node: index for index, node in enumerate(born)}
    order = sorted(readers, key=lambda key: (key[1], place[key[0]]))
    return tuple(Handed(node, made, tuple(sorted(readers[node, made]))) for node, made in order)


def _by_storage(flow: Flow, nodes: Collection[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Return the values that may share each memory that is changed in place."""
    shared: dict[fx.Node, list[fx.Node]] = {root: [] for root in flow.changes}
    for node in nodes:
        if flow.storage[node] in shared:
            shared[flow.storage[node]].append(node)
    return shared


def learned_in(traced: Traced, flow: Flow) -> frozenset[fx.Node]:
    """Return the values that a gradient may come back for: those of floating point that depend on a parameter."""
    learned: set[fx.Node] = set(traced.params)
    memory: set[fx.Node] = set()
    for node in traced.graph.nodes:
        if node.op != "call_function" or word_of(node) in {"detach", "detach_"}:
            continue
        if any(source in learned or flow.storage[source] in memory for source in node.all_input_nodes):
            if _may_carry(node):
                learned.add(node)
            memory.update(flow.storage[source] for source in changed_by(node))
    return frozenset(learned) | frozenset(node for node in flow.storage if flow.storage[node] in memory)


def _may_carry(node: fx.Node) -> bool:
    value = value_of(node)
    if isinstance(value, Tensor):
        return value.is_floating_point() or value.is_complex()
    return True
