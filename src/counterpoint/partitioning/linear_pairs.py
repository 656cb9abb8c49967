"""Column- and row-split pairs of linear layers: found in the graph, and made ready to run as slices.

A region is ``row(inside(column(h)))``: one linear layer whose input comes from the outputs of others only, all of
which read the same ``h``. With their weights sliced along what is between them, each slice gives a part of the
output, and the parts add up to the whole.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import fx

from counterpoint.errors import PlanError
from counterpoint.partitioning.export_trace import TracedGraph, innermost_module
from counterpoint.partitioning.fx_ops import fake_value, is_random_op, mutated_inputs, op_name
from counterpoint.partitioning.graph_dataflow import DataflowInfo

DimNames = Mapping[str, tuple[str, str]]
"""For a pattern of module paths, the names of the out dim and the in dim of the linear layers that match."""

_LINEAR = torch.ops.aten.linear.default
_RESHAPES = {"view", "reshape", "unflatten"}
_ATTENTION = "scaled_dot_product_attention"
_SELECTS = {"select", "unbind"}
_MIXES_HEADS = {_ATTENTION, "softmax", "_softmax", "matmul", "bmm", "baddbmm"}


@dataclass(frozen=True, slots=True)
class ColumnRowPair:
    """A part of the graph that may run as slices.

    Args:
        name: path of the module that contains it, or of its first and last layer.
        weight: the name of the row's weight, which tells regions apart: a module may hold several.
        dim: the name of what is sliced.
        size: how long that is, in heads where the graph shows them.
        columns: the layers sliced along their outputs.
        row: the layer sliced along its inputs.
        inside: all its operations, layers included.
    """

    name: str
    row_weight: str
    dim: str
    size: int
    columns: tuple[fx.Node, ...]
    row: fx.Node
    nodes: frozenset[fx.Node]

    @property
    def source(self) -> fx.Node:
        """The value that all columns read."""
        return _layer_input(self.columns[0])


def find_pairs(
    traced: TracedGraph, dataflow: DataflowInfo, dims: DimNames, *, only: Collection[str] | None = None
) -> list[ColumnRowPair]:
    """Return the regions of a trace in order, or only those of some weights; no operation is in two of them."""
    uses = Counter(
        traced.params[source]
        for node in traced.graph.nodes
        for source in node.all_input_nodes
        if source in traced.params
    )
    regions: list[ColumnRowPair] = []
    taken: set[fx.Node] = set()
    for row in traced.graph.nodes:
        found = _upstream_of(row, traced, dataflow) if _is_linear(row, traced) else None
        if found is None:
            continue
        columns, inside = found
        read = [traced.params[layer.args[1]] for layer in (*columns, row)]
        if only is not None and read[-1] not in only:
            continue
        is_alone = all(uses[name] == 1 for name in read) and not taken & inside
        if is_alone and _has_single_output(inside, row) and _can_make_contiguous(traced, inside):
            regions.append(_make_pair(columns, row, inside, dims, row_weight=read[-1]))
            taken |= inside
    return regions


def _is_linear(node: fx.Node, traced: TracedGraph) -> bool:
    return node.op == "call_function" and node.target is _LINEAR and node.args[1] in traced.params


def _layer_input(layer: fx.Node) -> fx.Node:
    source = layer.args[0]
    assert isinstance(source, fx.Node)
    return source


def _upstream_of(
    row: fx.Node, traced: TracedGraph, dataflow: DataflowInfo
) -> tuple[list[fx.Node], frozenset[fx.Node]] | None:
    """Return the layers that the row's input comes from and all operations from them to it, if there is no more."""
    columns: list[fx.Node] = []
    inside = {row}
    queue = [_layer_input(row)]
    while queue:
        node = queue.pop()
        if node in inside or node in dataflow.non_differentiable:
            continue
        if node.op != "call_function" or is_random_op(node):
            return None
        inside.add(node)
        if _is_linear(node, traced):
            columns.append(node)
        else:
            queue += node.all_input_nodes
    if not columns or len({_layer_input(column) for column in columns}) > 1 or _layer_input(columns[0]) in inside:
        return None
    order = {node: index for index, node in enumerate(traced.graph.nodes)}
    return sorted(columns, key=order.__getitem__), frozenset(inside)


def _has_single_output(nodes: frozenset[fx.Node], row: fx.Node) -> bool:
    """Tell whether nothing but the row's output is used outside."""
    return all(user in nodes for node in nodes if node is not row for user in node.users)


def _can_make_contiguous(traced: TracedGraph, nodes: frozenset[fx.Node]) -> bool:
    """Tell whether what stands between the region's operations may run before them.

    It may not where it changes something in place, or draws random numbers: those belong to the seed before it.
    """
    order = list(traced.graph.nodes)
    places = [index for index, node in enumerate(order) if node in nodes]
    between = [node for node in order[places[0] : places[-1]] if node not in nodes]
    return not any(is_random_op(node) for node in between) and all(
        source in traced.buffers for node in between for source in mutated_inputs(node)
    )


def _make_pair(
    columns: list[fx.Node], row: fx.Node, nodes: frozenset[fx.Node], dims: DimNames, *, row_weight: str
) -> ColumnRowPair:
    features = [int(fake_value(column).shape[-1]) for column in columns]
    mixes = any(op_name(node) in _MIXES_HEADS for node in nodes)
    heads = _count_heads(columns, nodes) if mixes else []
    sizes = [count for count in heads if count] if heads and all(heads) else features
    dim = _user_dim_name(columns, row, dims) or ("heads" if mixes else "hidden")
    return ColumnRowPair(_pair_name(columns, row), row_weight, dim, math.gcd(*sizes), tuple(columns), row, nodes)


def _pair_name(columns: list[fx.Node], row: fx.Node) -> str:
    """Return the path of the first layer and, as far as it differs, of the last."""
    return format_path_range(innermost_module(columns[0]), innermost_module(row))


def format_path_range(first: str, last: str) -> str:
    """Return ``a.b..c`` for the paths ``a.b`` and ``a.c``."""
    if first == last:
        return first
    heads, tails = first.split("."), last.split(".")
    same = 0
    while same < min(len(heads), len(tails)) - 1 and heads[same] == tails[same]:
        same += 1
    return f"{first}..{'.'.join(tails[same:])}"


def _count_heads(columns: list[fx.Node], nodes: frozenset[fx.Node]) -> list[int | None]:
    """Return how many heads each layer gives, as far as the graph shows them.

    One layer for query, key and value is first folded into these three, which are not its heads.
    """
    if len(columns) == 1 and any(op_name(node) in _SELECTS for node in nodes):
        queries = [fake_value(node.all_input_nodes[0]) for node in nodes if op_name(node) == _ATTENTION]
        return [int(query.shape[-3]) if query.dim() > 3 else None for query in queries]
    return [_heads_of_layer(column) for column in columns]


def _heads_of_layer(column: fx.Node) -> int | None:
    """Return into how many heads the output of a layer is folded."""
    for user in column.users:
        shape = tuple(fake_value(user).shape) if op_name(user) in _RESHAPES else ()
        if len(shape) >= 2 and shape[-2] * shape[-1] == fake_value(column).shape[-1]:
            return int(shape[-2])
    return None


def _user_dim_name(columns: Iterable[fx.Node], row: fx.Node, dims: DimNames) -> str | None:
    """Return the user's name of what is between the layers, if there is one."""
    given = {
        f"out of {innermost_module(layer)}" if place == 0 else f"in of {innermost_module(layer)}": names[place]
        for layer, place in [*((column, 0) for column in columns), (row, 1)]
        for pattern, names in dims.items()
        if fnmatchcase(innermost_module(layer), pattern)
    }
    if len(set(given.values())) > 1:
        listed = ", ".join(f"{where} is '{name}'" for where, name in given.items())
        raise PlanError(
            f"one dim has two names: {listed}; what comes out of one layer goes into the other, so it is one dim; "
            "give both the same name in dims"
        )
    return next(iter(given.values()), None)


def make_shardable(traced: TracedGraph, pair: ColumnRowPair) -> fx.Node:
    """Have the graph run the region on slices; return the node that enters it.

    The bias of the row moves behind the sum, ``h`` gets a name of its own where others use it too, and shapes
    written out inside are left to follow the slice.
    """
    row, graph = pair.row, traced.graph
    if len(row.args) > 2 and row.args[2] is not None:
        with graph.inserting_after(row):
            add = graph.call_function(torch.ops.aten.add.Tensor, (row, row.args[2]))
        row.replace_all_uses_with(add, delete_user_cb=lambda user: user is not add)
        row.args = row.args[:2]
        add.meta = {**row.meta, "bias_of": row}
    for node in pair.nodes:
        _generalize_shape(node)
    entry = pair.source
    if any(user not in pair.columns for user in entry.users):
        with graph.inserting_before(pair.columns[0]):
            alias = graph.call_function(torch.ops.aten.alias.default, (entry,))
        stack = pair.columns[0].meta.get("nn_module_stack")  # so that a block which begins with the region has it too
        alias.meta = {"val": fake_value(entry), "alias_of": entry, "nn_module_stack": stack}
        for column in pair.columns:
            column.replace_input_with(entry, alias)
        return alias
    return entry


def is_entry_alias(node: fx.Node) -> bool:
    """Tell whether a node is the name of its own that ``h`` has in a region."""
    return "alias_of" in node.meta


def _generalize_shape(node: fx.Node) -> None:
    """Replace the size that a slice changes by -1, which is what is left over."""
    word = op_name(node)
    if word not in {"view", "reshape", "_unsafe_view", "expand"} or not isinstance(node.args[0], fx.Node):
        return
    old, new = tuple(fake_value(node.args[0]).shape), list(fake_value(node).shape)
    if word == "expand":
        fitted = [-1 if size == kept else size for size, kept in zip(new[::-1], old[::-1], strict=False)][::-1]
        node.args = (node.args[0], new[: len(new) - len(fitted)] + fitted, *node.args[2:])
        return
    place = _sharded_dim(old, tuple(new), node.args[1])
    if place is not None:
        new[place] = -1
        node.args = (node.args[0], new, *node.args[2:])


def _sharded_dim(old: tuple[int, ...], new: tuple[int, ...], given: object) -> int | None:
    """Return which dim of a view changes with the slice; None where it says so itself or cannot be known."""
    if len(new) == len(old) + 1 and old[:-1] == new[:-2]:  # features into heads
        return len(new) - 2
    if len(old) == len(new) + 1 and old[:-2] == new[:-1]:  # heads into features
        return len(new) - 1
    if isinstance(given, list | tuple) and -1 in given:
        return None
    return next((index for index, (was, size) in enumerate(zip(old, new, strict=False)) if was != size), None)
