"""A trace laid out as pieces: which operation belongs to which, what is alive between them, what draws where."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import fx, nn

from counterpoint.errors import PlanError
from counterpoint.partitioning.export_trace import TracedGraph, module_calls
from counterpoint.partitioning.fx_ops import fake_value, is_random_op
from counterpoint.partitioning.graph_dataflow import BoundaryValue, DataflowInfo, analyze_dataflow, find_boundary_values
from counterpoint.partitioning.linear_pairs import ColumnRowPair, DimNames, find_pairs, is_entry_alias, make_shardable
from counterpoint.partitioning.seed_hooks import CallPaths, seeded_modules
from counterpoint.partitioning.split_points import (
    block_boundaries,
    boundary_index,
    compute_module_spans,
    find_intra_block_splits,
    resolve_split_points,
)

SplitPreference: TypeAlias = Literal["blocks", "pairs"]
"""What stays whole where a block would end inside a region."""


@dataclass(frozen=True, slots=True)
class SplitPoints:
    """The places a model is cut at, by name, so that every trace of it is cut at the same.

    Args:
        blocks: the places between blocks.
        regions: the names of the regions that are pieces of their own.
        inner: the places inside blocks at which a stage may begin.
    """

    blocks: tuple[str, ...]
    pairs: tuple[str, ...]
    intra_block: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SplitTrace:
    """One trace in pieces.

    Args:
        traced: the operations.
        flow: facts about them.
        order: the operations of all pieces; constants are not among them.
        starts: the index in the order at which each piece begins.
        block_starts: those of them at which a block begins.
        inner_starts: those of them inside a block at which a stage may begin.
        regions: for the pieces that are a region, the region.
        seeds: the paths to seed before an operation.
        keys: the names of the places.
        handed: what pieces make for later ones.
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
        """For each piece whether a block begins with it, and the weight of the region it is: alike in every trace."""
        weights = {piece: region.row_weight for piece, region in self.pairs.items()}
        return tuple(
            (start in self.block_starts, weights.get(piece, "")) for piece, start in enumerate(self.layer_starts)
        )

    @property
    def num_layers(self) -> int:
        """How many pieces the model has."""
        return len(self.layer_starts)

    def span(self, first_layer: int, stop_layer: int) -> tuple[int, int]:
        """Return the part of the order that a run of pieces is."""
        ends = (*self.layer_starts, len(self.order))
        return ends[first_layer], ends[stop_layer]

    def inputs_of(self, first_layer: int, stop_layer: int) -> tuple[int, ...]:
        """Return what a run of pieces reads and does not make, by its place in ``handed``."""
        run = range(first_layer, stop_layer)
        return tuple(
            place
            for place, value in enumerate(self.boundary_values)
            if value.producer < first_layer and any(piece in run for piece in value.consumers)
        )

    def outputs_of(self, first_layer: int, stop_layer: int) -> tuple[int, ...]:
        """Return what a run of pieces makes for later ones, by its place in ``handed``."""
        return tuple(
            place
            for place, value in enumerate(self.boundary_values)
            if first_layer <= value.producer < stop_layer and value.consumers[-1] >= stop_layer
        )


def choose_split_points(
    traced: TracedGraph, model: nn.Module, dims: DimNames, prefer: SplitPreference, named_modules: Sequence[str] = ()
) -> SplitPoints:
    """Return the places at which every trace of the model is to be cut; the trace stays as it is.

    A region that a block would end in, or that may not be cut off, is no piece of its own. Leaving it out moves its
    operations back to where they were, so the others are looked at again until all of them can stay.

    Args:
        traced: the operations.
        model: what was traced.
        dims: names of dims, by pattern of module path.
        prefer: what stays whole where a block would end inside a region.
        cuts: the modules that a block begins with in any case.

    Raises:
        PlanError: a module among the cuts has no operations, or no cut can be where it begins.
    """
    flow = analyze_dataflow(traced)
    plain = _list_operations(traced, flow)
    seeds = _find_seed_points(plain, model)
    regions = find_pairs(traced, flow, dims)
    while True:
        order = _make_pairs_contiguous(plain, regions)
        spans, _ = compute_module_spans(order)
        places = {
            key: place for key in block_boundaries(model, order) if (place := boundary_index(key, spans)) is not None
        }
        ends = _pair_spans(order, regions)
        if prefer == "pairs":
            inside = {place for first, stop in ends.values() for place in range(first + 1, stop)}
            places = {key: place for key, place in places.items() if place not in inside}
        forbidden = _illegal_splits(flow, order, seeds)
        marked = resolve_split_points(named_modules, spans, forbidden)
        places |= marked
        kept = [
            region
            for region, (first, stop) in zip(regions, ends.values(), strict=True)
            if not forbidden & {first, stop} and not any(first < place < stop for place in places.values())
        ]
        if len(kept) == len(regions):
            break
        regions = kept
    allowed = {key: place for key, place in places.items() if place not in forbidden and 0 < place < len(order)}
    blocks = _drop_blocks_without_params(traced, order, allowed, marked)
    closed = forbidden | {
        place for first, stop in _pair_spans(order, regions).values() for place in range(first + 1, stop)
    }
    borders = {allowed[key] for key in blocks}
    inner = find_intra_block_splits(model, traced, flow, order, block_starts=borders, illegal=closed)
    return SplitPoints(blocks, tuple(region.row_weight for region in regions), tuple(inner))


def split_trace(traced: TracedGraph, model: nn.Module, dims: DimNames, split_points: SplitPoints) -> SplitTrace:
    """Return a trace of the model in pieces, with its regions made ready to run as slices.

    Raises:
        PlanError: the model runs other parts in this mode, or for these inputs.
    """
    regions = find_pairs(traced, analyze_dataflow(traced), dims, only=split_points.pairs)
    for region in regions:
        make_shardable(traced, region)
    flow = analyze_dataflow(traced)
    plain = _list_operations(traced, flow)
    order = _make_pairs_contiguous(plain, regions)
    spans, _ = compute_module_spans(order)
    missing = [weight for weight in split_points.pairs if weight not in {region.row_weight for region in regions}]
    missing += [
        key[1:] for key in (*split_points.blocks, *split_points.intra_block) if boundary_index(key, spans) is None
    ]
    if missing:
        raise PlanError(
            f"the model does not run {', '.join(missing)} in this mode or for these inputs as it does in training; "
            "a model is cut at the same places for all its batches, in training and in evaluation; "
            "have it run the same modules in both, or use a strategy that needs no cut (data, zero, server)"
        )
    labels = {node: label for node, label, _ in _find_seed_points(plain, model)}
    return _assemble_split_trace(traced, flow, order, regions, labels, split_points)


def _assemble_split_trace(
    traced: TracedGraph,
    dataflow: DataflowInfo,
    order: Sequence[fx.Node],
    pairs: Sequence[ColumnRowPair],
    seeds: Mapping[fx.Node, str],
    split_points: SplitPoints,
) -> SplitTrace:
    spans, _ = compute_module_spans(order)
    ends = _pair_spans(order, pairs)
    blocks = {place for key in split_points.blocks if (place := boundary_index(key, spans)) is not None}
    inner = {place for key in split_points.intra_block if (place := boundary_index(key, spans)) is not None}
    edges = {place for pair in ends.values() for place in pair}
    starts = tuple(sorted({0} | {place for place in blocks | inner | edges if 0 < place < len(order)}))
    pieces = {starts.index(ends[region.row_weight][0]): region for region in pairs}
    stops = (*starts[1:], len(order))
    handed = find_boundary_values(
        traced, dataflow, [order[start:stop] for start, stop in zip(starts, stops, strict=True)]
    )
    return SplitTrace(
        traced,
        dataflow,
        tuple(order),
        starts,
        tuple(sorted({0} | {place for place in blocks if 0 < place < len(order)})),
        frozenset(inner - blocks),
        pieces,
        seeds,
        split_points,
        handed,
    )


def _list_operations(traced: TracedGraph, dataflow: DataflowInfo) -> list[fx.Node]:
    """Return the operations to run; constants are not among them."""
    order = [node for node in traced.graph.nodes if node.op == "call_function" and node not in dataflow.constants]
    return _hoist_getitems(order)


def _make_pairs_contiguous(operations: Sequence[fx.Node], pairs: Iterable[ColumnRowPair]) -> list[fx.Node]:
    """Return the operations with those of each region side by side, behind what stands between them."""
    order = list(operations)
    for region in pairs:
        members = region.nodes | ({region.source} if is_entry_alias(region.source) else set())
        places = [index for index, node in enumerate(order) if node in members]
        first, stop = places[0], places[-1] + 1
        middle = order[first:stop]
        order[first:stop] = [n for n in middle if n not in members] + [n for n in middle if n in members]
    return order


def _hoist_getitems(order: list[fx.Node]) -> list[fx.Node]:
    """Put what is taken out of a tuple right behind the operation that gives it, so that no tuple is cut off."""
    placed: dict[fx.Node, None] = {}
    for node in order:
        placed[node] = None
        if isinstance(fake_value(node), tuple | list):
            placed |= dict.fromkeys(user for user in node.users if user.target is operator.getitem)
    return list(placed)


def _pair_spans(order: Sequence[fx.Node], pairs: Iterable[ColumnRowPair]) -> dict[str, tuple[int, int]]:
    ends = {}
    for region in pairs:
        places = [index for index, node in enumerate(order) if node in region.nodes]
        ends[region.row_weight] = (places[0], places[-1] + 1)
    return ends


def _find_seed_points(operations: Sequence[fx.Node], model: nn.Module) -> list[tuple[fx.Node, str, fx.Node]]:
    """Return before which operation which path is seeded, and the last operation that draws from it.

    They are read off the order of the model itself, before regions are gathered. Seeds that nothing is drawn from
    are left out.
    """
    first_path = {id(module): path for path, module in model.named_modules()}
    aliases = {path: first_path[id(module)] for path, module in model.named_modules(remove_duplicate=False)}
    seeded, paths = set(seeded_modules(model)), CallPaths()
    seen: set[tuple[str, int]] = set()
    latest: tuple[fx.Node, str] | None = None
    needed: dict[fx.Node, tuple[str, fx.Node]] = {}
    for node in operations:
        for call in module_calls(node):
            if call not in seen and aliases.get(call[0]) in seeded:
                latest = node, paths.next(aliases[call[0]])
            seen.add(call)
        if is_random_op(node) and latest is not None:
            needed[latest[0]] = latest[1], node
    return [(node, label, last) for node, (label, last) in needed.items()]


def _illegal_splits(
    dataflow: DataflowInfo, order: Sequence[fx.Node], seeds: Iterable[tuple[fx.Node, str, fx.Node]]
) -> set[int]:
    """Return where no cut may be: between a seed and what is drawn from it, and among values that share memory."""
    index_of = {node: index for index, node in enumerate(order)}
    forbidden = {place for node, _, last in seeds for place in range(index_of[node] + 1, index_of[last] + 1)}
    until = {node: max((index_of.get(user, len(order)) for user in node.users), default=0) for node in dataflow.storage}
    for root, changes in dataflow.mutations.items():
        last = max(index_of.get(node, 0) for node in changes)
        sharing = [
            (index_of.get(node, -1), until[node]) for node, storage in dataflow.storage.items() if storage is root
        ]
        first = min(born for born, _ in sharing) + 1
        for place in range(max(first, 1), last + 1):
            if sum(born < place <= used for born, used in sharing) > 1:
                forbidden.add(place)
    return forbidden


def _drop_blocks_without_params(
    traced: TracedGraph, order: Sequence[fx.Node], places: Mapping[str, int], named: Mapping[str, int]
) -> tuple[str, ...]:
    """Leave out the places that would make a block without parameters, but for those that a user has marked."""
    keys: dict[int, str] = {}
    for key, place in places.items():
        keys.setdefault(place, key)
    fixed = set(named.values())
    reads = [any(source in traced.params for source in node.all_input_nodes) for node in order]
    chosen: list[int] = []
    for place in sorted(keys):
        if place in fixed and chosen and chosen[-1] not in fixed and not any(reads[chosen[-1] : place]):
            chosen[-1] = place
        elif place in fixed or any(reads[chosen[-1] if chosen else 0 : place]):
            chosen.append(place)
        elif chosen and chosen[-1] not in fixed:
            chosen[-1] = place
    while chosen and chosen[-1] not in fixed and not any(reads[chosen[-1] :]):
        chosen.pop()
    return tuple(keys[place] for place in chosen)
