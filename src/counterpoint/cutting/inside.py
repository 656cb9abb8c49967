"""Places inside the blocks of a model at which a stage may begin, because no more is sent there than between blocks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, pairwise

from torch import fx, nn

from counterpoint.cutting.cut import num_bytes
from counterpoint.cutting.flow import Flow
from counterpoint.cutting.ops import is_tensor, value_of
from counterpoint.cutting.places import Spans, spans_of
from counterpoint.cutting.trace import Traced


def inner_places(
    model: nn.Module,
    traced: Traced,
    flow: Flow,
    order: Sequence[fx.Node],
    *,
    blocks: Collection[int],
    closed: Collection[int],
) -> Mapping[str, int]:
    """Return where modules with parameters begin inside blocks and no more is alive than at a border of the block.

    A transformer's block has such a place between attention and feed-forward, where the one activation is all there is;
    inside a residual branch that activation and the branch's are alive, which is more. Places are names of modules, so
    that every trace has the same. There is none where what is behind has no parameters, or some that are also read in
    front of it.

    Args:
        model: what was traced.
        traced: the operations.
        flow: facts about them.
        order: the operations of all blocks.
        blocks: the places between blocks.
        closed: where no cut can be.
    """
    alive = _alive_bytes(traced, flow, order)
    spans, _ = spans_of(order)
    names = traced.params | traced.buffers
    reads = [{names[source] for source in node.all_input_nodes if source in names} for node in order]
    trains = [any(source in traced.params for source in node.all_input_nodes) for node in order]
    chosen: dict[int, str] = {}
    for start, stop in pairwise(sorted({0, *blocks, len(order)})):
        most, last = max(alive[start], alive[stop]), start
        for place, path in _begun(model, spans, range(start + 1, stop)):
            is_tied = bool(set().union(*reads[start:place]) & set().union(*reads[place:stop]))
            is_whole = any(trains[last:place]) and any(trains[place:stop])
            if place not in closed and alive[place] <= most and is_whole and not is_tied:
                chosen[place] = path
                last = place
    return {f">{path}": place for place, path in chosen.items()}


def _begun(model: nn.Module, spans: Spans, places: range) -> list[tuple[int, str]]:
    """Return the places of a part of the order at which modules with parameters begin, each with the outermost one."""
    begun: dict[int, str] = {}
    for path, (first, _) in spans.items():
        if path and first in places and any(True for _ in model.get_submodule(path).parameters()):
            begun.setdefault(first, path)
    return sorted(begun.items())


def _alive_bytes(traced: Traced, flow: Flow, order: Sequence[fx.Node]) -> list[int]:
    """Return for each place how many bytes are made before it and read behind it; none at both ends."""
    index_of = {node: index for index, node in enumerate(order)}
    outputs = set(traced.outputs)
    changes = [0] * (len(order) + 2)
    for born, node in enumerate(order):
        if is_tensor(node) and node not in flow.constants:
            last = max((index_of.get(user, born) for user in node.users), default=born)
            size = num_bytes([value_of(node)])
            changes[born + 1] += size
            changes[(len(order) - 1 if node in outputs else last) + 1] -= size
    alive = list(accumulate(changes))
    return [0, *alive[1 : len(order)], 0]
