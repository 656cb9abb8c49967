"""Find where a model may be split: at blocks, at modules that a user names, and inside blocks."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

from torch import fx, nn

from counterpoint.errors import PlanError
from counterpoint.partitioning.fx_ops import fake_value, returns_tensor
from counterpoint.partitioning.partitioned_model import num_bytes
from counterpoint.partitioning.seed_hooks import is_plain_sequential, iter_children
from counterpoint.partitioning.tracing.export_trace import TracedGraph, module_calls
from counterpoint.partitioning.tracing.graph_dataflow import DataflowInfo

ModuleSpans = dict[str, tuple[int, int]]
"""For each module path, the index of its first operation and the one after its last."""


def compute_module_spans(order: Sequence[fx.Node]) -> tuple[ModuleSpans, dict[str, int]]:
    """Return the span of each module in the order of operations, and how often it is called."""
    spans: ModuleSpans = {}
    calls: dict[str, set[int]] = {}
    for index, node in enumerate(order):
        for path, count in module_calls(node):
            spans[path] = (spans.get(path, (index, 0))[0], index + 1)
            calls.setdefault(path, set()).add(count)
    return spans, {path: len(counts) for path, counts in calls.items()}


def block_boundaries(model: nn.Module, order: Sequence[fx.Node]) -> list[str]:
    """Return the boundaries between blocks: ``>path`` before a module's first operation, ``<path`` after its last.

    Layer lists are ModuleLists and Sequentials whose children run one after the other. If they hold less than half of
    the model, the boundaries are at the children of the outermost module that has several.
    """
    spans, num_calls = compute_module_spans(order)
    layer_lists = list(_layer_lists(model, "", _ExecutionOrder(spans, num_calls), num_elements(model)))
    list_elements = sum(num_elements(child) for layer_list in layer_lists for _, child in layer_list)
    if 2 * list_elements >= num_elements(model):
        keys = []
        for layer_list in layer_lists:
            paths = [path for path, _ in layer_list if path in spans]
            last = max(paths, key=lambda path: spans[path][1])
            keys += [*(f">{path}" for path in paths), f"<{last}"]
        return keys
    return [f">{path}" for path, _ in _outermost_children(model, "") if path in spans]


def boundary_index(key: str, spans: ModuleSpans) -> int | None:
    """Return the index in the order of operations of a boundary; None if the module does not run."""
    span = spans.get(key[1:])
    return None if span is None else span[key[0] == "<"]


def num_elements(module: nn.Module) -> int:
    """Return the number of parameter elements of a module."""
    return sum(parameter.numel() for parameter in module.parameters())


class _ExecutionOrder:
    """The order in which modules run, from the trace."""

    def __init__(self, spans: ModuleSpans, num_calls: dict[str, int]) -> None:
        self.spans = spans
        self.num_calls = num_calls

    def runs_sequentially(self, paths: Sequence[str]) -> bool:
        """Tell whether each of the modules runs at most once, and none begins before the previous one ends."""
        executed = sorted(self.spans[path] for path in paths if path in self.spans)
        once = all(self.num_calls.get(path, 0) <= 1 for path in paths)
        return len(executed) > 1 and once and all(a[1] <= b[0] for a, b in pairwise(executed))


def _children(module: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    return [(f"{path}.{name}" if path else name, child) for name, child in iter_children(module)]


def _layer_lists(
    module: nn.Module, path: str, executed: _ExecutionOrder, total: int
) -> Iterator[list[tuple[str, nn.Module]]]:
    """Yield the children of each outermost layer list; a child that holds most of the model is expanded."""
    children = _children(module, path)
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    if not is_list or not executed.runs_sequentially([child_path for child_path, _ in children]):
        for child_path, child in children:
            yield from _layer_lists(child, child_path, executed, total)
        return
    layers: list[tuple[str, nn.Module]] = []
    for child_path, child in children:
        is_expanded = is_plain_sequential(child) or 2 * num_elements(child) > total
        inner_lists = list(_layer_lists(child, child_path, executed, total)) if is_expanded else []
        layers += [layer for layer_list in inner_lists for layer in layer_list] or [(child_path, child)]
    yield layers


def _outermost_children(module: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    """Return the children of the outermost module that has parameters in more than one place."""
    children = _children(module, path)
    owners = [(child_path, child) for child_path, child in children if num_elements(child)]
    is_wrapper = len(owners) == 1 and not list(module.parameters(recurse=False))
    return _outermost_children(owners[0][1], owners[0][0]) if is_wrapper else owners


def require_modules(model: nn.Module, split_points: Sequence[str]) -> None:
    """Check that a model has the modules named as split points.

    Raises:
        PlanError: it has no such module; the message has the nearest path.
    """
    paths = [path for path, _ in model.named_modules(remove_duplicate=False) if path]
    for path in split_points:
        if path not in paths:
            matches = difflib.get_close_matches(path, paths, n=3)
            hint = f"did you mean {' or '.join(map(repr, matches))}? " if matches else ""
            raise PlanError(
                f"split_points names {path!r}, but {type(model).__name__} has no such module; {hint}a stage begins "
                "with a module, named by its path as in model.named_modules()"
            )


def resolve_split_points(
    split_points: Sequence[str], spans: ModuleSpans, illegal: Collection[int]
) -> Mapping[str, int]:
    """Return the index in the order of operations at which each named module begins.

    Raises:
        PlanError: a module has no operations, or the model cannot be split where it begins.
    """
    for path in split_points:
        if path not in spans:
            raise PlanError(
                f"split_points names {path!r}, which runs no operation of its own (it returns its input, or is not "
                "called); no stage can begin with it; name the module that runs next"
            )
        if spans[path][0] in illegal:
            raise PlanError(
                f"split_points names {path!r}, but no stage can begin there: random numbers are drawn on both sides "
                "from one state, or a tensor that is used before it is changed in place after it; name a later module, "
                "or one that contains all of it"
            )
    return {f">{path}": spans[path][0] for path in split_points}


def find_intra_block_splits(
    model: nn.Module,
    traced: TracedGraph,
    dataflow: DataflowInfo,
    order: Sequence[fx.Node],
    *,
    block_starts: Collection[int],
    illegal: Collection[int],
) -> Mapping[str, int]:
    """Return where modules with parameters begin inside blocks and no more is live than at a boundary of the block.

    A transformer block has such a place between attention and feed-forward, where only the residual stream is live;
    inside a residual branch the residual and the branch's activation are live, which is more. Split points are named
    by modules, so that every trace has the same. There is none where no parameters follow, or where some are read on
    both sides.

    Args:
        model: the traced model.
        traced: the operations.
        dataflow: facts about them.
        order: the operations of all blocks.
        block_starts: the indices at which blocks begin.
        illegal: the indices at which no split is possible.
    """
    live = _live_bytes(traced, dataflow, order)
    spans, _ = compute_module_spans(order)
    names = traced.params | traced.buffers
    reads = [{names[source] for source in node.all_input_nodes if source in names} for node in order]
    reads_param = [any(source in traced.params for source in node.all_input_nodes) for node in order]
    chosen: dict[int, str] = {}
    for start, stop in pairwise(sorted({0, *block_starts, len(order)})):
        limit, previous = max(live[start], live[stop]), start
        for index, path in _module_starts(model, spans, range(start + 1, stop)):
            is_tied = bool(set().union(*reads[start:index]) & set().union(*reads[index:stop]))
            has_params_on_both_sides = any(reads_param[previous:index]) and any(reads_param[index:stop])
            if index not in illegal and live[index] <= limit and has_params_on_both_sides and not is_tied:
                chosen[index] = path
                previous = index
    return {f">{path}": index for index, path in chosen.items()}


def _module_starts(model: nn.Module, spans: ModuleSpans, indices: range) -> list[tuple[int, str]]:
    """Return the indices at which modules with parameters begin, each with the outermost module."""
    starts: dict[int, str] = {}
    for path, (first, _) in spans.items():
        if path and first in indices and any(True for _ in model.get_submodule(path).parameters()):
            starts.setdefault(first, path)
    return sorted(starts.items())


def _live_bytes(traced: TracedGraph, dataflow: DataflowInfo, order: Sequence[fx.Node]) -> list[int]:
    """Return for each index the bytes made before it and read after it; 0 at both ends."""
    index_of = {node: index for index, node in enumerate(order)}
    outputs = set(traced.outputs)
    changes = [0] * (len(order) + 2)
    for index, node in enumerate(order):
        if returns_tensor(node) and node not in dataflow.constants:
            last = max((index_of.get(user, index) for user in node.users), default=index)
            size = num_bytes([fake_value(node)])
            changes[index + 1] += size
            changes[(len(order) - 1 if node in outputs else last) + 1] -= size
    live = list(accumulate(changes))
    return [0, *live[1 : len(order)], 0]
