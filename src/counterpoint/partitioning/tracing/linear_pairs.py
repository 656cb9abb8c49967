"""Find column- and row-parallel pairs of linear layers in a graph, and prepare them to run sharded.

A linear layer is an operation with a weight, whatever module it is in: ``linear``, or ``addmm`` and ``mm``, whose
weight is transposed, as in the Conv1D modules of GPT-2. A pair is ``row(nodes(column(h)))``: one linear layer whose
input comes only from the outputs of other linear layers, all of which read the same ``h``. With their weights sharded
along the dim between them, each shard computes a part of the output, and the parts add up to the whole (Megatron-LM).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import fx
from torch._ops import OpOverload

from counterpoint.errors import PlanError
from counterpoint.partitioning.fx_ops import (
    fake_value,
    is_aten_op,
    is_random_op,
    mutated_inputs,
    op_name,
    returns_tensor,
)
from counterpoint.partitioning.input_shapes import size_argument
from counterpoint.partitioning.tracing.export_trace import TracedGraph, innermost_module
from counterpoint.partitioning.tracing.graph_dataflow import DataflowInfo

DimNames = Mapping[str, tuple[str, str]]
"""For each pattern of module paths, the names of the out dim and the in dim of the matching linear layers."""

_LINEAR, _ADDMM, _MM = torch.ops.aten.linear.default, torch.ops.aten.addmm.default, torch.ops.aten.mm.default
_RESHAPES = {"view", "reshape", "unflatten"}
_VIEWS = {*_RESHAPES, "_unsafe_view", "clone", "contiguous"}
_SPLITS = {"split", "split_with_sizes", "chunk"}
_ATTENTION = "scaled_dot_product_attention"
_SELECTS = {"select", "unbind"}
_MIXES_HEADS = {_ATTENTION, "softmax", "_softmax", "matmul", "bmm", "baddbmm"}


@dataclass(frozen=True, slots=True)
class LinearCall:
    """A linear layer in a graph.

    Args:
        source: its input.
        weight: its weight.
        bias: its bias, if it has one.
        out_dim: the dim of the weight that belongs to the output: 0, or 1 if the weight is transposed.
    """

    source: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    out_dim: Literal[0, 1]

    @property
    def params(self) -> list[fx.Node]:
        """The weight and the bias."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]


def parse_linear(node: fx.Node) -> LinearCall | None:
    """Return the linear layer that an operation is, if it is one."""
    args: tuple[Any, ...] = node.args
    if node.target is _LINEAR:
        return LinearCall(args[0], args[1], args[2] if len(args) > 2 else None, 0)
    if node.target is _ADDMM and not node.kwargs:  # which may scale its terms
        return LinearCall(args[1], args[2], args[0], 1)
    return LinearCall(args[0], args[1], None, 1) if node.target is _MM else None


def linear_with_bias(node: fx.Node, bias: fx.Node) -> tuple[OpOverload, tuple[fx.Node, ...]]:
    """Return the operation, and its arguments, that a linear layer without a bias is with one."""
    call = _require_linear(node)
    if call.out_dim:
        return _ADDMM, (bias, call.source, call.weight)
    return _LINEAR, (call.source, call.weight, bias)


def _require_linear(node: fx.Node) -> LinearCall:
    call = parse_linear(node)
    assert call is not None, "a layer of a pair"
    return call


@dataclass(frozen=True, slots=True)
class ColumnRowPair:
    """A part of the graph that may run as tensor-parallel shards.

    Args:
        name: path of the module that contains it, or of its first and last layer.
        row_weight: the name of the row layer's weight, which identifies the pair: a module may hold several.
        dim: the name of the sharded dim.
        size: its length, in heads where the graph shows them.
        columns: the layers sharded along their outputs.
        row: the layer sharded along its inputs.
        nodes: all its operations, layers included.
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
        """The value that all column layers read."""
        return _require_linear(self.columns[0]).source

    def sharded_dims(self, names: Mapping[fx.Node, str]) -> tuple[tuple[str, int], ...]:
        """Return the name and the sharded dim of every parameter of which a shard has a part only."""
        columns, row = map(_require_linear, self.columns), _require_linear(self.row)
        dims = [
            (names[param], column.out_dim if param is column.weight else 0)
            for column in columns
            for param in column.params
        ]
        return (*dims, (names[row.weight], 1 - row.out_dim))


def find_pairs(
    traced: TracedGraph, dataflow: DataflowInfo, dims: DimNames, *, only: Collection[str] | None = None
) -> list[ColumnRowPair]:
    """Return the pairs of a trace in order, or only those with some row weights; no operation is in two of them.

    A pair whose column layer is several layers in one, as for query, key and value, is left out if there are others: a
    contiguous part of its outputs is not part of each of these layers.
    """
    uses = Counter(
        traced.params[source]
        for node in traced.graph.nodes
        for source in node.all_input_nodes
        if source in traced.params
    )
    pairs: list[ColumnRowPair] = []
    taken: set[fx.Node] = set()
    for row in traced.graph.nodes:
        match = _upstream_of(row, traced, dataflow) if _is_layer(row, traced) else None
        if match is None:
            continue
        columns, nodes = match
        weights = [traced.params[_require_linear(layer).weight] for layer in (*columns, row)]
        if only is not None and weights[-1] not in only:
            continue
        is_exclusive = all(uses[name] == 1 for name in weights) and not taken & nodes
        if is_exclusive and _has_single_output(nodes, row) and _can_make_contiguous(traced, nodes):
            pairs.append(_make_pair(columns, row, nodes, dims, row_weight=weights[-1]))
            taken |= nodes
    return pairs if only is not None else [pair for pair in pairs if not _is_fused(traced, pair)] or pairs


def _is_fused(traced: TracedGraph, pair: ColumnRowPair) -> bool:
    """Tell whether the outputs of a column layer are split into those of several layers."""
    flat_features = _find_flat_features(traced, pair)
    return any(op_name(user) in _SPLITS for node in flat_features for user in node.users)


def _is_layer(node: fx.Node, traced: TracedGraph) -> bool:
    call = parse_linear(node)
    return call is not None and all(param in traced.params for param in call.params)


def _upstream_of(
    row: fx.Node, traced: TracedGraph, dataflow: DataflowInfo
) -> tuple[list[fx.Node], frozenset[fx.Node]] | None:
    """Return the column layers that the row's input comes from, and all operations from them to the row.

    None if anything else contributes, such as a random operation or a second input.
    """
    columns: list[fx.Node] = []
    nodes = {row}
    queue = [_require_linear(row).source]
    while queue:
        node = queue.pop()
        if node in nodes or node in dataflow.non_differentiable:
            continue
        if node.op != "call_function" or is_random_op(node):
            return None
        nodes.add(node)
        if _is_layer(node, traced):
            columns.append(node)
        else:
            queue += node.all_input_nodes
    sources = {_require_linear(column).source for column in columns}
    if len(sources) != 1 or sources & nodes:
        return None
    order = {node: index for index, node in enumerate(traced.graph.nodes)}
    return sorted(columns, key=order.__getitem__), frozenset(nodes)


def _has_single_output(nodes: frozenset[fx.Node], row: fx.Node) -> bool:
    """Tell whether only the row's output is used outside."""
    return all(user in nodes for node in nodes if node is not row for user in node.users)


def _can_make_contiguous(traced: TracedGraph, nodes: frozenset[fx.Node]) -> bool:
    """Tell whether foreign operations between those of the pair may run before them.

    They may not if they change something in place, or draw random numbers, which belong to the seed before them.
    """
    order = list(traced.graph.nodes)
    indices = [index for index, node in enumerate(order) if node in nodes]
    between = [node for node in order[indices[0] : indices[-1]] if node not in nodes]
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
    num_shared = 0
    while num_shared < min(len(heads), len(tails)) - 1 and heads[num_shared] == tails[num_shared]:
        num_shared += 1
    return f"{first}..{'.'.join(tails[num_shared:])}"


def _count_heads(columns: list[fx.Node], nodes: frozenset[fx.Node]) -> list[int | None]:
    """Return how many heads each layer computes, as far as the graph shows them.

    One fused layer for query, key and value is first split into these three, which are not its heads.
    """
    if len(columns) == 1 and any(op_name(node) in _SELECTS for node in nodes):
        queries = [fake_value(node.all_input_nodes[0]) for node in nodes if op_name(node) == _ATTENTION]
        return [int(query.shape[-3]) if query.dim() > 3 else None for query in queries]
    return [_heads_of_layer(column) for column in columns]


def _heads_of_layer(column: fx.Node) -> int | None:
    """Return the number of heads that the output of a layer is reshaped into."""
    for user in column.users:
        shape = tuple(fake_value(user).shape) if op_name(user) in _RESHAPES else ()
        if len(shape) >= 2 and shape[-2] * shape[-1] == fake_value(column).shape[-1]:
            return int(shape[-2])
    return None


def _user_dim_name(columns: Iterable[fx.Node], row: fx.Node, dims: DimNames) -> str | None:
    """Return the user's name of the dim between the layers, if there is one."""
    names_by_layer = {
        f"out of {innermost_module(layer)}" if side == 0 else f"in of {innermost_module(layer)}": names[side]
        for layer, side in [*((column, 0) for column in columns), (row, 1)]
        for pattern, names in dims.items()
        if fnmatchcase(innermost_module(layer), pattern)
    }
    if len(set(names_by_layer.values())) > 1:
        conflicts = ", ".join(f"{location} is '{name}'" for location, name in names_by_layer.items())
        raise PlanError(
            f"one dim has two names: {conflicts}; the output of one layer is the input of the other, so it is one dim; "
            "give both the same name in dims"
        )
    return next(iter(names_by_layer.values()), None)


def make_shardable(traced: TracedGraph, pair: ColumnRowPair) -> fx.Node:
    """Rewrite the graph so that the pair can run on shards; return the node through which its input enters.

    The row's bias moves after the sum, ``h`` gets an alias if other operations use it too, and sizes written into
    reshapes become -1 where they change with the shard.
    """
    row, graph, call = pair.row, traced.graph, _require_linear(pair.row)
    if call.bias is not None:
        with graph.inserting_after(row):
            add = graph.call_function(torch.ops.aten.add.Tensor, (row, call.bias))
        row.replace_all_uses_with(add, delete_user_cb=lambda user: user is not add)
        row.target, row.args = _MM if call.out_dim else _LINEAR, (call.source, call.weight)
        add.meta = {**row.meta, "bias_of": row}
    flat_features = _find_flat_features(traced, pair)
    for node in pair.nodes:
        _generalize_shape(traced, node, is_last=bool(flat_features.intersection(node.all_input_nodes[:1])))
    entry = pair.source
    if any(user not in pair.columns for user in entry.users):
        with graph.inserting_before(pair.columns[0]):
            alias = graph.call_function(torch.ops.aten.alias.default, (entry,))
        stack = pair.columns[0].meta.get("nn_module_stack")  # so that a block which begins with the pair has it too
        alias.meta = {"val": fake_value(entry), "alias_of": entry, "nn_module_stack": stack}
        for column in pair.columns:
            column.replace_input_with(entry, alias)
        return alias
    return entry


def is_entry_alias(node: fx.Node) -> bool:
    """Tell whether a node is the alias of a pair's input."""
    return "alias_of" in node.meta


def _find_flat_features(traced: TracedGraph, pair: ColumnRowPair) -> set[fx.Node]:
    """Return the nodes of a pair whose last dim is that of the columns' outputs, not yet reshaped into heads."""
    found = set(pair.columns)
    for node in traced.graph.nodes:
        source = next((source for source in node.all_input_nodes if source in found), None)
        if node not in pair.nodes or source is None or not is_aten_op(node) or not returns_tensor(node):
            continue
        keeps_dims = op_name(node) in _VIEWS or torch.Tag.pointwise in node.target.tags
        if keeps_dims and fake_value(node).shape[-1] == fake_value(source).shape[-1]:
            found.add(node)
    return found


def _generalize_shape(traced: TracedGraph, node: fx.Node, *, is_last: bool) -> None:
    """Replace the size that changes with the shard by -1.

    Args:
        traced: the operations.
        node: an operation of a pair.
        is_last: whether the last dim of its input is sharded.
    """
    op = op_name(node)
    if op not in {"view", "reshape", "_unsafe_view", "expand"} or not isinstance(node.args[0], fx.Node):
        return
    old, new = tuple(fake_value(node.args[0]).shape), list(fake_value(node).shape)
    if op == "expand":
        free_sizes = [-1 if size == old_size else size for size, old_size in zip(new[::-1], old[::-1], strict=False)][
            ::-1
        ]
        sizes = new[: len(new) - len(free_sizes)] + free_sizes
        node.args = (node.args[0], [size_argument(traced.graph, traced.sizes, size) for size in sizes], *node.args[2:])
        return
    is_kept = is_last and new[-1] == old[-1]
    dim = len(new) - 1 if is_kept else _sharded_dim(old, tuple(new), node.args[1])
    if dim is not None:
        new[dim] = -1
        node.args = (node.args[0], [size_argument(traced.graph, traced.sizes, size) for size in new], *node.args[2:])


def _sharded_dim(old: tuple[int, ...], new: tuple[int, ...], sizes: object) -> int | None:
    """Return which dim of a view changes with the shard; None if it is -1 already or cannot be known."""
    if len(new) == len(old) + 1 and old[:-1] == new[:-2]:  # features into heads
        return len(new) - 2
    if len(old) == len(new) + 1 and old[:-2] == new[:-1]:  # heads into features
        return len(new) - 1
    if isinstance(sizes, list | tuple) and -1 in sizes:
        return None
    return next((index for index, (old_size, size) in enumerate(zip(old, new, strict=False)) if old_size != size), None)
