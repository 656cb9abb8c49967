"""Where a model may be cut into blocks: at the children of its chains, as they appear in the trace.

Cuts that a user asks for by the name of a module, and what stands in the way of one.

Places inside the blocks of a model at which a stage may begin, because no more is sent there than between blocks.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

from torch import fx, nn

from counterpoint.errors import PlanError
from counterpoint.partitioning.export_trace import TracedGraph, module_calls
from counterpoint.partitioning.fx_ops import fake_value, returns_tensor
from counterpoint.partitioning.graph_dataflow import DataflowInfo
from counterpoint.partitioning.partitioned_model import num_bytes
from counterpoint.partitioning.seed_hooks import is_plain_sequential, iter_children

ModuleSpans = dict[str, tuple[int, int]]
"""For each module path, the indices of its first operation and of the one behind its last."""


def compute_module_spans(order: Sequence[fx.Node]) -> tuple[ModuleSpans, dict[str, int]]:
    """Return where each module stands in the order, and how often it is called."""
    spans: ModuleSpans = {}
    calls: dict[str, set[int]] = {}
    for index, node in enumerate(order):
        for path, count in module_calls(node):
            spans[path] = (spans.get(path, (index, 0))[0], index + 1)
            calls.setdefault(path, set()).add(count)
    return spans, {path: len(counts) for path, counts in calls.items()}


def block_boundaries(model: nn.Module, order: Sequence[fx.Node]) -> list[str]:
    """Return the places between blocks: ``>path`` before a module's first operation, ``<path`` behind its last.

    Chains are lists and Sequentials whose children run one after the other. Where they hold less than half of the
    model, it is cut at the children of the outermost module that has several.
    """
    spans, num_calls = compute_module_spans(order)
    chains = list(_layer_lists(model, "", _ExecutionOrder(spans, num_calls), num_elements(model)))
    held = sum(num_elements(child) for chain in chains for _, child in chain)
    if 2 * held >= num_elements(model):
        keys = []
        for chain in chains:
            paths = [path for path, _ in chain if path in spans]
            last = max(paths, key=lambda path: spans[path][1])
            keys += [*(f">{path}" for path in paths), f"<{last}"]
        return keys
    return [f">{path}" for path, _ in _outermost_children(model, "") if path in spans]


def boundary_index(key: str, spans: ModuleSpans) -> int | None:
    """Return the index in the order that a place stands for; None where the module does not run."""
    span = spans.get(key[1:])
    return None if span is None else span[key[0] == "<"]


def num_elements(module: nn.Module) -> int:
    """Return how many numbers the parameters of a module hold."""
    return sum(parameter.numel() for parameter in module.parameters())


class _ExecutionOrder:
    """What the trace says about the order in which modules run."""

    def __init__(self, spans: ModuleSpans, num_calls: dict[str, int]) -> None:
        self.spans = spans
        self.num_calls = num_calls

    def runs_sequentially(self, paths: Sequence[str]) -> bool:
        """Tell whether each of the modules runs at most once, and none begins before the one before it ends."""
        run = sorted(self.spans[path] for path in paths if path in self.spans)
        once = all(self.num_calls.get(path, 0) <= 1 for path in paths)
        return len(run) > 1 and once and all(a[1] <= b[0] for a, b in pairwise(run))


def _children(module: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    return [(f"{path}.{name}" if path else name, child) for name, child in iter_children(module)]


def _layer_lists(
    module: nn.Module, path: str, executed: _ExecutionOrder, total: int
) -> Iterator[list[tuple[str, nn.Module]]]:
    """Yield the links of each outermost chain; a link that holds most of the model is opened in its place."""
    children = _children(module, path)
    is_chain = isinstance(module, nn.ModuleList | nn.Sequential)
    if not is_chain or not executed.runs_sequentially([inner for inner, _ in children]):
        for inner, child in children:
            yield from _layer_lists(child, inner, executed, total)
        return
    links: list[tuple[str, nn.Module]] = []
    for inner, child in children:
        opened = is_plain_sequential(child) or 2 * num_elements(child) > total
        found = list(_layer_lists(child, inner, executed, total)) if opened else []
        links += [link for chain in found for link in chain] or [(inner, child)]
    yield links


def _outermost_children(module: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    """Return the children of the outermost module that has parameters in more than one place."""
    children = _children(module, path)
    owners = [(inner, child) for inner, child in children if num_elements(child)]
    alone = len(owners) == 1 and not list(module.parameters(recurse=False))
    return _outermost_children(owners[0][1], owners[0][0]) if alone else owners


def require_modules(model: nn.Module, split_points: Sequence[str]) -> None:
    """Check that a model has the modules that a cut is to stand before.

    Raises:
        PlanError: it has no such module; the message has the nearest path.
    """
    paths = [path for path, _ in model.named_modules(remove_duplicate=False) if path]
    for cut in split_points:
        if cut not in paths:
            near = difflib.get_close_matches(cut, paths, n=3)
            hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
            raise PlanError(
                f"split_points names {cut!r}, but {type(model).__name__} has no such module; {hint}a stage begins with a "
                "module, named by its path as in model.named_modules()"
            )


def resolve_split_points(
    split_points: Sequence[str], spans: ModuleSpans, illegal: Collection[int]
) -> Mapping[str, int]:
    """Return the place in the order of operations at which each named module begins.

    Raises:
        PlanError: a module has no operations, or no cut can be where it begins.
    """
    for cut in split_points:
        if cut not in spans:
            raise PlanError(
                f"split_points names {cut!r}, which runs no operation of its own (it hands its input on, or is not called); no "
                "stage can begin with it; name the module that runs next"
            )
        if spans[cut][0] in illegal:
            raise PlanError(
                f"split_points names {cut!r}, but no stage can begin there: random numbers are drawn on both sides from one "
                "state, or a tensor is changed in place behind it that is in use before; name a module further on, or "
                "one that has all of it inside"
            )
    return {f">{cut}": spans[cut][0] for cut in split_points}


def find_intra_block_splits(
    model: nn.Module,
    traced: TracedGraph,
    dataflow: DataflowInfo,
    order: Sequence[fx.Node],
    *,
    block_starts: Collection[int],
    illegal: Collection[int],
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
    alive = _live_bytes(traced, dataflow, order)
    spans, _ = compute_module_spans(order)
    names = traced.params | traced.buffers
    reads = [{names[source] for source in node.all_input_nodes if source in names} for node in order]
    trains = [any(source in traced.params for source in node.all_input_nodes) for node in order]
    chosen: dict[int, str] = {}
    for start, stop in pairwise(sorted({0, *block_starts, len(order)})):
        most, last = max(alive[start], alive[stop]), start
        for place, path in _module_starts(model, spans, range(start + 1, stop)):
            is_tied = bool(set().union(*reads[start:place]) & set().union(*reads[place:stop]))
            is_whole = any(trains[last:place]) and any(trains[place:stop])
            if place not in illegal and alive[place] <= most and is_whole and not is_tied:
                chosen[place] = path
                last = place
    return {f">{path}": place for place, path in chosen.items()}


def _module_starts(model: nn.Module, spans: ModuleSpans, indices: range) -> list[tuple[int, str]]:
    """Return the places of a part of the order at which modules with parameters begin, each with the outermost one."""
    begun: dict[int, str] = {}
    for path, (first, _) in spans.items():
        if path and first in indices and any(True for _ in model.get_submodule(path).parameters()):
            begun.setdefault(first, path)
    return sorted(begun.items())


def _live_bytes(traced: TracedGraph, dataflow: DataflowInfo, order: Sequence[fx.Node]) -> list[int]:
    """Return for each place how many bytes are made before it and read behind it; none at both ends."""
    index_of = {node: index for index, node in enumerate(order)}
    outputs = set(traced.outputs)
    changes = [0] * (len(order) + 2)
    for born, node in enumerate(order):
        if returns_tensor(node) and node not in dataflow.constants:
            last = max((index_of.get(user, born) for user in node.users), default=born)
            size = num_bytes([fake_value(node)])
            changes[born + 1] += size
            changes[(len(order) - 1 if node in outputs else last) + 1] -= size
    alive = list(accumulate(changes))
    return [0, *alive[1 : len(order)], 0]
