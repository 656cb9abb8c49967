"""A trace laid out as pieces: which operation belongs to which, what is alive between them, what draws where."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import fx, nn

from counterpoint.cutting.flow import Flow, flow_of
from counterpoint.cutting.handing import Handed, handed_on
from counterpoint.cutting.inside import inner_places
from counterpoint.cutting.marked import marked_places
from counterpoint.cutting.ops import draws_random, value_of
from counterpoint.cutting.places import block_keys, position, spans_of
from counterpoint.cutting.regions import Dims, Region, find_regions, is_entry, open_region
from counterpoint.cutting.seeds import CallPaths, seeded_modules
from counterpoint.cutting.trace import Traced, calls_of
from counterpoint.errors import PlanError

Prefer: TypeAlias = Literal["blocks", "regions"]
"""What stays whole where a block would end inside a region."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The places a model is cut at, by name, so that every trace of it is cut at the same.

    Args:
        blocks: the places between blocks.
        regions: the names of the regions that are pieces of their own.
        inner: the places inside blocks at which a stage may begin.
    """

    blocks: tuple[str, ...]
    regions: tuple[str, ...]
    inner: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Layout:
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

    traced: Traced
    flow: Flow
    order: tuple[fx.Node, ...]
    starts: tuple[int, ...]
    block_starts: tuple[int, ...]
    inner_starts: frozenset[int]
    regions: Mapping[int, Region]
    seeds: Mapping[fx.Node, str]
    keys: Keys
    handed: tuple[Handed, ...]

    @property
    def outline(self) -> tuple[tuple[bool, str], ...]:
        """For each piece whether a block begins with it, and the weight of the region it is: alike in every trace."""
        weights = {piece: region.weight for piece, region in self.regions.items()}
        return tuple((start in self.block_starts, weights.get(piece, "")) for piece, start in enumerate(self.starts))

    @property
    def num_pieces(self) -> int:
        """How many pieces the model has."""
        return len(self.starts)

    def span(self, first_piece: int, stop_piece: int) -> tuple[int, int]:
        """Return the part of the order that a run of pieces is."""
        ends = (*self.starts, len(self.order))
        return ends[first_piece], ends[stop_piece]

    def taken(self, first_piece: int, stop_piece: int) -> tuple[int, ...]:
        """Return what a run of pieces reads and does not make, by its place in ``handed``."""
        run = range(first_piece, stop_piece)
        return tuple(
            place
            for place, value in enumerate(self.handed)
            if value.maker < first_piece and any(piece in run for piece in value.readers)
        )

    def given(self, first_piece: int, stop_piece: int) -> tuple[int, ...]:
        """Return what a run of pieces makes for later ones, by its place in ``handed``."""
        return tuple(
            place
            for place, value in enumerate(self.handed)
            if first_piece <= value.maker < stop_piece and value.readers[-1] >= stop_piece
        )


def choose_keys(traced: Traced, model: nn.Module, dims: Dims, prefer: Prefer, cuts: Sequence[str] = ()) -> Keys:
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
    flow = flow_of(traced)
    plain = _operations(traced, flow)
    seeds = _seeds(plain, model)
    regions = find_regions(traced, flow, dims)
    while True:
        order = _gathered(plain, regions)
        spans, _ = spans_of(order)
        places = {key: place for key in block_keys(model, order) if (place := position(key, spans)) is not None}
        ends = _ends(order, regions)
        if prefer == "regions":
            inside = {place for first, stop in ends.values() for place in range(first + 1, stop)}
            places = {key: place for key, place in places.items() if place not in inside}
        forbidden = _forbidden(flow, order, seeds)
        marked = marked_places(cuts, spans, forbidden)
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
    blocks = _with_params(traced, order, allowed, marked)
    closed = forbidden | {place for first, stop in _ends(order, regions).values() for place in range(first + 1, stop)}
    borders = {allowed[key] for key in blocks}
    inner = inner_places(model, traced, flow, order, blocks=borders, closed=closed)
    return Keys(blocks, tuple(region.weight for region in regions), tuple(inner))


def lay_out(traced: Traced, model: nn.Module, dims: Dims, keys: Keys) -> Layout:
    """Return a trace of the model in pieces, with its regions made ready to run as slices.

    Raises:
        PlanError: the model runs other parts in this mode, or for these inputs.
    """
    regions = find_regions(traced, flow_of(traced), dims, only=keys.regions)
    for region in regions:
        open_region(traced, region)
    flow = flow_of(traced)
    plain = _operations(traced, flow)
    order = _gathered(plain, regions)
    spans, _ = spans_of(order)
    missing = [weight for weight in keys.regions if weight not in {region.weight for region in regions}]
    missing += [key[1:] for key in (*keys.blocks, *keys.inner) if position(key, spans) is None]
    if missing:
        raise PlanError(
            f"the model does not run {', '.join(missing)} in this mode or for these inputs as it does in training; "
            "a model is cut at the same places for all its batches, in training and in evaluation; "
            "have it run the same modules in both, or use a strategy that needs no cut (data, zero, server)"
        )
    labels = {node: label for node, label, _ in _seeds(plain, model)}
    return _assemble(traced, flow, order, regions, labels, keys)


def _assemble(
    traced: Traced,
    flow: Flow,
    order: Sequence[fx.Node],
    regions: Sequence[Region],
    seeds: Mapping[fx.Node, str],
    keys: Keys,
) -> Layout:
    spans, _ = spans_of(order)
    ends = _ends(order, regions)
    blocks = {place for key in keys.blocks if (place := position(key, spans)) is not None}
    inner = {place for key in keys.inner if (place := position(key, spans)) is not None}
    edges = {place for pair in ends.values() for place in pair}
    starts = tuple(sorted({0} | {place for place in blocks | inner | edges if 0 < place < len(order)}))
    pieces = {starts.index(ends[region.weight][0]): region for region in regions}
    stops = (*starts[1:], len(order))
    handed = handed_on(traced, flow, [order[start:stop] for start, stop in zip(starts, stops, strict=True)])
    return Layout(
        traced,
        flow,
        tuple(order),
        starts,
        tuple(sorted({0} | {place for place in blocks if 0 < place < len(order)})),
        frozenset(inner - blocks),
        pieces,
        seeds,
        keys,
        handed,
    )


def _operations(traced: Traced, flow: Flow) -> list[fx.Node]:
    """Return the operations to run; constants are not among them."""
    order = [node for node in traced.graph.nodes if node.op == "call_function" and node not in flow.constants]
    return _with_tuples_unpacked(order)


def _gathered(plain: Sequence[fx.Node], regions: Iterable[Region]) -> list[fx.Node]:
    """Return the operations with those of each region side by side, behind what stands between them."""
    order = list(plain)
    for region in regions:
        members = region.inside | ({region.source} if is_entry(region.source) else set())
        places = [index for index, node in enumerate(order) if node in members]
        first, stop = places[0], places[-1] + 1
        middle = order[first:stop]
        order[first:stop] = [n for n in middle if n not in members] + [n for n in middle if n in members]
    return order


def _with_tuples_unpacked(order: list[fx.Node]) -> list[fx.Node]:
    """Put what is taken out of a tuple right behind the operation that gives it, so that no tuple is cut off."""
    placed: dict[fx.Node, None] = {}
    for node in order:
        placed[node] = None
        if isinstance(value_of(node), tuple | list):
            placed |= dict.fromkeys(user for user in node.users if user.target is operator.getitem)
    return list(placed)


def _ends(order: Sequence[fx.Node], regions: Iterable[Region]) -> dict[str, tuple[int, int]]:
    ends = {}
    for region in regions:
        places = [index for index, node in enumerate(order) if node in region.inside]
        ends[region.weight] = (places[0], places[-1] + 1)
    return ends


def _seeds(plain: Sequence[fx.Node], model: nn.Module) -> list[tuple[fx.Node, str, fx.Node]]:
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
    for node in plain:
        for call in calls_of(node):
            if call not in seen and aliases.get(call[0]) in seeded:
                latest = node, paths.next(aliases[call[0]])
            seen.add(call)
        if draws_random(node) and latest is not None:
            needed[latest[0]] = latest[1], node
    return [(node, label, last) for node, (label, last) in needed.items()]


def _forbidden(flow: Flow, order: Sequence[fx.Node], seeds: Iterable[tuple[fx.Node, str, fx.Node]]) -> set[int]:
    """Return where no cut may be: between a seed and what is drawn from it, and among values that share memory."""
    index_of = {node: index for index, node in enumerate(order)}
    forbidden = {place for node, _, last in seeds for place in range(index_of[node] + 1, index_of[last] + 1)}
    until = {node: max((index_of.get(user, len(order)) for user in node.users), default=0) for node in flow.storage}
    for root, changes in flow.changes.items():
        last = max(index_of.get(node, 0) for node in changes)
        sharing = [(index_of.get(node, -1), until[node]) for node, storage in flow.storage.items() if storage is root]
        first = min(born for born, _ in sharing) + 1
        for place in range(max(first, 1), last + 1):
            if sum(born < place <= used for born, used in sharing) > 1:
                forbidden.add(place)
    return forbidden


def _with_params(
    traced: Traced, order: Sequence[fx.Node], places: Mapping[str, int], marked: Mapping[str, int]
) -> tuple[str, ...]:
    """Leave out the places that would make a block without parameters, but for those that a user has marked."""
    keys: dict[int, str] = {}
    for key, place in places.items():
        keys.setdefault(place, key)
    fixed = set(marked.values())
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
