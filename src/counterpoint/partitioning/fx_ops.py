"""Facts about one operation of a traced graph: name, arguments, mutation, random numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload

_ON_BY_DEFAULT = {"p", "dropout", "train"}
_OFF_BY_DEFAULT = {"dropout_p", "training"}


def fake_value(node: fx.Node) -> Any:  # noqa: ANN401
    """Return the operation's result in the trace: a fake tensor, or a tuple of them."""
    return node.meta.get("val")


def returns_tensor(node: fx.Node) -> bool:
    """Tell whether the operation returns one tensor."""
    return isinstance(fake_value(node), Tensor)


def is_aten_op(node: fx.Node) -> bool:
    """Tell whether the node calls an operator with a schema."""
    return isinstance(node.target, OpOverload)


def op_name(node: fx.Node) -> str:
    """Return the name of the operator, such as ``linear``; empty for other nodes."""
    return str(node.target.overloadpacket.__name__) if isinstance(node.target, OpOverload) else ""


def iter_arguments(node: fx.Node) -> Iterator[tuple[Any, Any]]:
    """Yield the schema of each argument that was passed, and its value."""
    if isinstance(node.target, OpOverload):
        schema: Any = node.target._schema  # noqa: SLF001  (torch has no other name for it)
        for index, argument in enumerate(schema.arguments):
            if index < len(node.args):
                yield argument, node.args[index]
            elif argument.name in node.kwargs:
                yield argument, node.kwargs[argument.name]


def iter_tensor_arguments(node: fx.Node) -> Iterator[tuple[Any, fx.Node]]:
    """Yield the schema of each tensor argument, and its node."""
    for argument, passed in iter_arguments(node):
        for value in passed if isinstance(passed, list | tuple) else [passed]:
            if isinstance(value, fx.Node):
                yield argument, value


def mutated_inputs(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose values an operation changes in place, also in its body, such as that of a no_grad."""
    if op_name(node) in {"detach_", "lift_fresh"}:
        return []
    if (body := body_of(node)) is not None:
        storage = assign_storage(body)
        changed = {storage[source] for inner in body.nodes for source in mutated_inputs(inner)}
        return [source for own, source in _iter_operands(node, body) if storage[own] in changed]
    return [
        source
        for argument, source in iter_tensor_arguments(node)
        if argument.alias_info and argument.alias_info.is_write
    ]


def assign_storage(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Map each node to the first node whose memory it may share (union-find over aliases)."""
    parent: dict[fx.Node, fx.Node] = {}

    def root(node: fx.Node) -> fx.Node:
        while parent[node] is not node:
            node = parent[node]
        return node

    for node in graph.nodes:
        parent[node] = node
        for source in _may_alias(node):
            parent[root(node)] = root(source)
    return {node: root(node) for node in parent}


def _may_alias(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose memory the operation's result may share."""
    if node.op != "call_function":
        return []
    if (body := body_of(node)) is not None:
        storage = assign_storage(body)
        returned = {storage[one] for one in body.output_node().all_input_nodes}
        return [source for own, source in _iter_operands(node, body) if storage[own] in returned]
    if not is_aten_op(node):
        return list(node.all_input_nodes[:1])  # getitem of a tuple
    return [source for argument, source in iter_tensor_arguments(node) if argument.alias_info is not None]


def copy_changed_values(graph: fx.Graph, sources: Iterable[fx.Node]) -> list[fx.Node]:
    """Let operations that change a value in place change a copy, which is made in each run of the graph.

    Args:
        graph: is changed.
        sources: nodes that read values which are the same in every run.

    Returns:
        Those of the sources that are changed.
    """
    storage = assign_storage(graph)
    changed = {storage[source] for node in graph.nodes for source in mutated_inputs(node)}
    found = [node for node in sources if storage[node] in changed]
    for node in found:
        users = set(node.users)
        first = next(user for user in graph.nodes if user in users)
        with graph.inserting_before(first):
            copied = graph.call_function(torch.ops.aten.clone.default, (node,))
        copied.meta = {**first.meta, "val": node.meta["val"]}
        for user in users:
            user.replace_input_with(node, copied)
    return found


def note_bodies(module: nn.Module, graph: fx.Graph) -> None:
    """Note at the attributes of a graph which of them are graphs themselves: the bodies of a no_grad or an autocast.

    Args:
        module: has the attributes.
        graph: reads them.
    """
    for node in graph.find_nodes(op="get_attr"):
        body = getattr(module, str(node.target), None)
        if isinstance(body, fx.GraphModule):
            node.meta["body"] = body.graph
            note_bodies(body, body.graph)


def body_of(node: fx.Node) -> fx.Graph | None:
    """Return the body of an operation that runs one, as of a no_grad or an autocast."""
    bodies = [source.meta["body"] for source in node.all_input_nodes if "body" in source.meta]
    return bodies[0] if bodies and node.op == "call_function" else None


def _iter_operands(node: fx.Node, body: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield the inputs of an operation's body, each with the node that it is outside of it."""
    operands = [*node.args]
    while operands and not (isinstance(first := operands.pop(0), fx.Node) and "body" in first.meta):
        pass
    for own, source in zip(body.find_nodes(op="placeholder"), operands, strict=False):
        if isinstance(source, fx.Node):
            yield own, source


def operations_of(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the operations in the body of an operation, those of nested bodies included; without a body, itself."""
    bodies = [source.meta["body"] for source in node.all_input_nodes if "body" in source.meta]
    return tuple(inner for body in bodies for one in body.nodes for inner in operations_of(one)) or (node,)


def is_random_op(node: fx.Node) -> bool:
    """Tell whether the operation draws random numbers, in the mode it was traced in."""
    inner = operations_of(node)
    if inner != (node,):
        return any(map(is_random_op, inner))
    return isinstance(node.target, OpOverload) and call_draws(node.target, node.args, node.kwargs)


def call_draws(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether an operator draws random numbers when it is called with these arguments."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    schema: Any = op._schema  # noqa: SLF001  (torch has no other name for it)
    names = [argument.name for argument in schema.arguments]
    flags = {**dict(zip(names, args, strict=False)), **kwargs}
    return all(flags.get(name, True) for name in _ON_BY_DEFAULT.intersection(names)) and all(
        flags.get(name, False) for name in _OFF_BY_DEFAULT.intersection(names)
    )
