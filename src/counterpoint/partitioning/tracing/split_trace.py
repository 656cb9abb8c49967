"""Split a traced graph into layers: what belongs to each, what is passed between them, what is seeded where."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import fx, nn

from counterpoint.errors import PlanError
from counterpoint.partitioning.fx_ops import fake_value, is_random_op, mutated_inputs, op_name, operations_of
from counterpoint.partitioning.seed_hooks import CallPaths, seeded_modules
from counterpoint.partitioning.tracing.export_trace import TracedGraph, module_calls
from counterpoint.partitioning.tracing.graph_dataflow import (
    BoundaryValue,
    DataflowInfo,
    analyze_dataflow,
    find_boundary_values,
)
from counterpoint.partitioning.tracing.linear_pairs import (
    ColumnRowPair,
    DimNames,
    find_pairs,
    is_entry_alias,
    make_shardable,
)
from counterpoint.partitioning.tracing.split_points import (
    block_boundaries,
    boundary_index,
    compute_module_spans,
    find_intra_block_splits,
    resolve_split_points,
)

SplitPreference: TypeAlias = Literal["blocks", "pairs"]
"""What stays whole if a block would end inside a pair: the block, or the pair."""


@dataclass(frozen=True, slots=True)
class SplitPoints:
    """Where a model is split, by name, so that every trace of it is split at the same points.

    Args:
        blocks: the boundaries between blocks.
        pairs: the row weights of the column-row pairs that are layers of their own.
        intra_block: the points inside blocks at which a pipeline stage may begin.
    """

    blocks: tuple[str, ...]
    pairs: tuple[str, ...]
    intra_block: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SplitTrace:
    """One trace, split into layers.

    Args:
        traced: the operations.
        dataflow: facts about them.
        order: the operations of all layers; constants are not among them.
        layer_starts: the index in ``order`` at which each layer begins.
        block_starts: those of them at which a block begins.
        intra_block_starts: those of them inside a block at which a stage may begin.
        pairs: for the layers that are a column-row pair, the pair.
        seeds: the paths to seed before an operation.
        split_points: the names of the boundaries.
        boundary_values: the values passed between layers.
    """

    traced: TracedGraph
    dataflow: DataflowInfo
    order: tuple[fx.Node, ...]
    layer_starts: tuple[int, ...]
    block_starts: tuple[int, ...]
    intra_block_starts: frozenset[int]
    pairs: Mapping[int, ColumnRowPair]
    seeds: Mapping[fx.Node, str]
    split_points: SplitPoints
    boundary_values: tuple[BoundaryValue, ...]

    @property
    def structure(self) -> tuple[tuple[bool, str], ...]:
        """For each layer whether it starts a block, and the row weight of its pair: equal for all traces of a model."""
        weights = {layer: pair.row_weight for layer, pair in self.pairs.items()}
        return tuple(
            (start in self.block_starts, weights.get(layer, "")) for layer, start in enumerate(self.layer_starts)
        )

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.layer_starts)

    def span(self, first_layer: int, stop_layer: int) -> tuple[int, int]:
        """Return the range of ``order`` of a run of layers."""
        ends = (*self.layer_starts, len(self.order))
        return ends[first_layer], ends[stop_layer]

    def inputs_of(self, first_layer: int, stop_layer: int) -> tuple[int, ...]:
        """Return the values that a run of layers reads and does not produce, as indices of ``boundary_values``."""
        layers = range(first_layer, stop_layer)
        return tuple(
            index
            for index, value in enumerate(self.boundary_values)
            if value.producer < first_layer and any(layer in layers for layer in value.consumers)
        )

    def outputs_of(self, first_layer: int, stop_layer: int) -> tuple[int, ...]:
        """Return the values that a run of layers produces for later ones, as indices of ``boundary_values``."""
        return tuple(
            index
            for index, value in enumerate(self.boundary_values)
            if first_layer <= value.producer < stop_layer and value.consumers[-1] >= stop_layer
        )


def choose_split_points(
    traced: TracedGraph, model: nn.Module, dims: DimNames, prefer: SplitPreference, named_modules: Sequence[str] = ()
) -> SplitPoints:
    """Choose where every trace of the model is split; the trace is not changed.

    A pair that a block would end in, or that may not be split off, is not a layer of its own. Dropping it moves its
    operations back to their original place, so the other pairs are checked again until all of them can stay.

    Args:
        traced: the operations.
        model: what was traced.
        dims: names of dims, by pattern of module path.
        prefer: what stays whole if a block would end inside a pair.
        named_modules: the modules that start a block in any case.

    Raises:
        PlanError: a named module has no operations, or the model cannot be split where it begins.
    """
    dataflow = analyze_dataflow(traced)
    operations = _list_operations(traced, dataflow)
    seeds = _find_seed_points(operations, model)
    pairs = find_pairs(traced, dataflow, dims)
    while True:
        order = _make_pairs_contiguous(operations, pairs)
        spans, _ = compute_module_spans(order)
        boundaries = {
            key: index for key in block_boundaries(model, order) if (index := boundary_index(key, spans)) is not None
        }
        pair_spans = _pair_spans(order, pairs)
        if prefer == "pairs":
            inside_pairs = {index for first, stop in pair_spans.values() for index in range(first + 1, stop)}
            boundaries = {key: index for key, index in boundaries.items() if index not in inside_pairs}
        illegal = _illegal_splits(traced, dataflow, order, seeds)
        named = resolve_split_points(named_modules, spans, illegal)
        boundaries |= named
        kept = [
            pair
            for pair, (first, stop) in zip(pairs, pair_spans.values(), strict=True)
            if not illegal & {first, stop} and not any(first < index < stop for index in boundaries.values())
        ]
        if len(kept) == len(pairs):
            break
        pairs = kept
    allowed = {key: index for key, index in boundaries.items() if index not in illegal and 0 < index < len(order)}
    blocks = _drop_blocks_without_params(traced, order, allowed, named)
    closed_to_stages = illegal | {
        index for first, stop in _pair_spans(order, pairs).values() for index in range(first + 1, stop)
    }
    block_starts = {allowed[key] for key in blocks}
    intra_block = find_intra_block_splits(
        model, traced, dataflow, order, block_starts=block_starts, illegal=closed_to_stages
    )
    return SplitPoints(blocks, tuple(pair.row_weight for pair in pairs), tuple(intra_block))


def split_trace(traced: TracedGraph, model: nn.Module, dims: DimNames, split_points: SplitPoints) -> SplitTrace:
    """Split a trace of the model into layers, with its pairs made shardable.

    Raises:
        PlanError: the model runs other modules in this mode, or for these inputs.
    """
    pairs = find_pairs(traced, analyze_dataflow(traced), dims, only=split_points.pairs)
    for pair in pairs:
        make_shardable(traced, pair)
    dataflow = analyze_dataflow(traced)
    operations = _list_operations(traced, dataflow)
    order = _make_pairs_contiguous(operations, pairs)
    spans, _ = compute_module_spans(order)
    missing = [weight for weight in split_points.pairs if weight not in {pair.row_weight for pair in pairs}]
    missing += [
        key[1:] for key in (*split_points.blocks, *split_points.intra_block) if boundary_index(key, spans) is None
    ]
    if missing:
        raise PlanError(
            f"the model does not run {', '.join(missing)} in this mode or for these inputs as it does in training; "
            "a model is split at the same points for all its batches, in training and in evaluation; "
            "have it run the same modules in both, or use a strategy that keeps the model whole (data, zero, server)"
        )
    labels = {node: label for node, label, _ in _find_seed_points(operations, model)}
    return _assemble_split_trace(traced, dataflow, order, pairs, labels, split_points)


def _assemble_split_trace(
    traced: TracedGraph,
    dataflow: DataflowInfo,
    order: Sequence[fx.Node],
    pairs: Sequence[ColumnRowPair],
    seeds: Mapping[fx.Node, str],
    split_points: SplitPoints,
) -> SplitTrace:
    spans, _ = compute_module_spans(order)
    pair_spans = _pair_spans(order, pairs)
    blocks = {index for key in split_points.blocks if (index := boundary_index(key, spans)) is not None}
    intra_block = {index for key in split_points.intra_block if (index := boundary_index(key, spans)) is not None}
    pair_ends = {index for pair in pair_spans.values() for index in pair}
    starts = tuple(sorted({0} | {index for index in blocks | intra_block | pair_ends if 0 < index < len(order)}))
    pair_layers = {starts.index(pair_spans[pair.row_weight][0]): pair for pair in pairs}
    stops = (*starts[1:], len(order))
    boundary_values = find_boundary_values(
        traced, dataflow, [order[start:stop] for start, stop in zip(starts, stops, strict=True)]
    )
    return SplitTrace(
        traced,
        dataflow,
        tuple(order),
        starts,
        tuple(sorted({0} | {index for index in blocks if 0 < index < len(order)})),
        frozenset(intra_block - blocks),
        pair_layers,
        seeds,
        split_points,
        boundary_values,
    )


def _list_operations(traced: TracedGraph, dataflow: DataflowInfo) -> list[fx.Node]:
    """Return the operations to run, without constants."""
    order = [node for node in traced.graph.nodes if node.op == "call_function" and node not in dataflow.constants]
    return _hoist_buffer_updates(_hoist_getitems(order), traced, dataflow)


def _make_pairs_contiguous(operations: Sequence[fx.Node], pairs: Iterable[ColumnRowPair]) -> list[fx.Node]:
    """Return the operations with those of each pair next to each other, after foreign ones between them."""
    order = list(operations)
    for pair in pairs:
        members = pair.nodes | ({pair.source} if is_entry_alias(pair.source) else set())
        indices = [index for index, node in enumerate(order) if node in members]
        first, stop = indices[0], indices[-1] + 1
        middle = order[first:stop]
        order[first:stop] = [node for node in middle if node not in members] + [
            node for node in middle if node in members
        ]
    return order


def _hoist_getitems(order: list[fx.Node]) -> list[fx.Node]:
    """Move each getitem right after the operation that returns the tuple, so that no tuple is passed between layers."""
    placed: dict[fx.Node, None] = {}
    for node in order:
        placed[node] = None
        if isinstance(fake_value(node), tuple | list):
            placed |= dict.fromkeys(user for user in node.users if user.target is operator.getitem)
    return list(placed)


def _hoist_buffer_updates(order: list[fx.Node], traced: TracedGraph, dataflow: DataflowInfo) -> list[fx.Node]:
    """Move each update of a buffer right after the last use of its old value, into the layer that uses it.

    The tracer puts the new values of buffers that a forward replaces at its end, which may be on another rank.
    """
    for update in find_buffer_updates(order, traced, dataflow):
        uses = [index for index, node in enumerate(order) if _is_before_update(node, update, dataflow)]
        order.remove(update)
        order.insert(max(uses) + 1, update)
    return order


def find_buffer_updates(order: Sequence[fx.Node], traced: TracedGraph, dataflow: DataflowInfo) -> list[fx.Node]:
    """Return the operations that give a buffer its new value, if it is changed by nothing else and not an output."""
    storage = dataflow.storage
    changes: dict[fx.Node, list[fx.Node]] = {storage[node]: [] for node in traced.buffers}
    for node in order:
        for memory in {storage[source] for source in mutated_inputs(node)} & changes.keys():
            changes[memory].append(node)
    returned = {storage[node] for node in traced.outputs}
    return [
        updates[0]
        for memory, updates in changes.items()
        if len(updates) == 1 and op_name(updates[0]) == "copy_" and not updates[0].users and memory not in returned
    ]


def _is_before_update(node: fx.Node, update: fx.Node, dataflow: DataflowInfo) -> bool:
    target, values = update.all_input_nodes
    memory = dataflow.storage[target]
    return node is not update and (
        node is values or any(dataflow.storage[source] is memory for source in node.all_input_nodes)
    )


def _pair_spans(order: Sequence[fx.Node], pairs: Iterable[ColumnRowPair]) -> dict[str, tuple[int, int]]:
    spans = {}
    for pair in pairs:
        indices = [index for index, node in enumerate(order) if node in pair.nodes]
        spans[pair.row_weight] = (indices[0], indices[-1] + 1)
    return spans


def _find_seed_points(operations: Sequence[fx.Node], model: nn.Module) -> list[tuple[fx.Node, str, fx.Node]]:
    """Return ``(operation, path, last)``: the path to seed before an operation, and the last one that draws from it.

    They follow the original order of the model, before pairs are made contiguous. Seeds that nothing draws from are
    skipped.

    Raises:
        PlanError: several modules draw in one operation, the body of an autocast or a no_grad.
    """
    first_path = {id(module): path for path, module in model.named_modules()}
    aliases = {path: first_path[id(module)] for path, module in model.named_modules(remove_duplicate=False)}
    seeded, paths = set(seeded_modules(model)), CallPaths()
    seen: set[tuple[str, int]] = set()
    latest: tuple[fx.Node, str] | None = None
    used: dict[fx.Node, tuple[str, fx.Node]] = {}
    for node in operations:
        for operation in operations_of(node):
            for call in module_calls(operation):
                if call not in seen and aliases.get(call[0]) in seeded:
                    latest = node, paths.next(aliases[call[0]])
                seen.add(call)
            if is_random_op(operation) and latest is not None:
                first, path = latest
                if used.get(first, (path,))[0] != path:
                    raise PlanError(_several_draws(model, used[first][0], path))
                used[first] = path, node
    return [(node, path, last) for node, (path, last) in used.items()]


def _several_draws(model: nn.Module, first: str, second: str) -> str:
    """Return the error of two modules that draw random numbers in one operation of a trace."""
    return (
        f"{first or 'the model'} and {second or 'the model'} of {type(model).__name__} draw random numbers in one "
        "torch.autocast or torch.no_grad of its forward, which a trace shows as one operation, so that they would draw "
        "others than on one device; enter it in the forward of each of them, pass precision='bf16(autocast=true)' "
        "instead of an autocast, or use a strategy that keeps the model whole (data, zero of level 1 or 2, server)"
    )


def _uses_of_changed_buffers(
    traced: TracedGraph, dataflow: DataflowInfo, order: Sequence[fx.Node]
) -> Iterator[list[int]]:
    """Yield, for each buffer that the forward changes, where it is used: one rank has its current value."""
    buffers = {dataflow.storage[node] for node in traced.buffers}
    changed = {dataflow.storage[source] for node in order for source in mutated_inputs(node)} & buffers
    for memory in changed:
        yield [
            index
            for index, node in enumerate(order)
            if any(dataflow.storage[source] is memory for source in node.all_input_nodes)
        ]


def _illegal_splits(
    traced: TracedGraph,
    dataflow: DataflowInfo,
    order: Sequence[fx.Node],
    seeds: Iterable[tuple[fx.Node, str, fx.Node]],
) -> set[int]:
    """Return where no split is possible.

    Between a seed and its last draw, between a tuple and its elements, among values that share memory, and among uses
    of a buffer that is changed.
    """
    index_of = {node: index for index, node in enumerate(order)}
    illegal = {index for node, _, last in seeds for index in range(index_of[node] + 1, index_of[last] + 1)}
    illegal |= {index for index, node in enumerate(order) if node.target is operator.getitem}  # they follow it
    illegal |= {
        index
        for indices in _uses_of_changed_buffers(traced, dataflow, order)
        for index in range(min(indices) + 1, max(indices) + 1)
    }
    last_use = {
        node: max((index_of.get(user, len(order)) for user in node.users), default=0) for node in dataflow.storage
    }
    for memory, mutations in dataflow.mutations.items():
        last = max(index_of.get(node, 0) for node in mutations)
        sharing = [
            (index_of.get(node, -1), last_use[node]) for node, storage in dataflow.storage.items() if storage is memory
        ]
        first = min(made for made, _ in sharing) + 1
        for index in range(max(first, 1), last + 1):
            if sum(made < index <= last for made, last in sharing) > 1:
                illegal.add(index)
    return illegal


def _drop_blocks_without_params(
    traced: TracedGraph, order: Sequence[fx.Node], boundaries: Mapping[str, int], named: Mapping[str, int]
) -> tuple[str, ...]:
    """Drop the boundaries that would make a block without parameters, except those that a user has named."""
    keys: dict[int, str] = {}
    for key, index in boundaries.items():
        keys.setdefault(index, key)
    named_indices = set(named.values())
    reads = [any(source in traced.params for source in node.all_input_nodes) for node in order]
    chosen: list[int] = []
    for index in sorted(keys):
        if index in named_indices and chosen and chosen[-1] not in named_indices and not any(reads[chosen[-1] : index]):
            chosen[-1] = index
        elif index in named_indices or any(reads[chosen[-1] if chosen else 0 : index]):
            chosen.append(index)
        elif chosen and chosen[-1] not in named_indices:
            chosen[-1] = index
    while chosen and chosen[-1] not in named_indices and not any(reads[chosen[-1] :]):
        chosen.pop()
    return tuple(keys[index] for index in chosen)
