"""Where a model may be cut into blocks: at the children of its chains, as they appear in the trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from torch import fx, nn

from counterpoint.cutting.seeds import children_of, is_plain_sequential
from counterpoint.cutting.trace import calls_of

Spans = dict[str, tuple[int, int]]
"""For each module path, the indices of its first operation and of the one behind its last."""


def spans_of(order: Sequence[fx.Node]) -> tuple[Spans, dict[str, int]]:
    """Return where each module stands in the order, and how often it is called."""
    spans: Spans = {}
    calls: dict[str, set[int]] = {}
    for index, node in enumerate(order):
        for path, count in calls_of(node):
            spans[path] = (spans.get(path, (index, 0))[0], index + 1)
            calls.setdefault(path, set()).add(count)
    return spans, {path: len(counts) for path, counts in calls.items()}


def block_keys(model: nn.Module, order: Sequence[fx.Node]) -> list[str]:
    """Return the places between blocks: ``>path`` before a module's first operation, ``<path`` behind its last.

    Chains are lists and Sequentials whose children run one after the other. Where they hold less than half of the
    model, it is cut at the children of the outermost module that has several.
    """
    spans, num_calls = spans_of(order)
    chains = list(_chains(model, "", _Executed(spans, num_calls), num_elements(model)))
    held = sum(num_elements(child) for chain in chains for _, child in chain)
    if 2 * held >= num_elements(model):
        keys = []
        for chain in chains:
            paths = [path for path, _ in chain if path in spans]
            last = max(paths, key=lambda path: spans[path][1])
            keys += [*(f">{path}" for path in paths), f"<{last}"]
        return keys
    return [f">{path}" for path, _ in _parts(model, "") if path in spans]


def position(key: str, spans: Spans) -> int | None:
    """Return the index in the order that a place stands for; None where the module does not run."""
    span = spans.get(key[1:])
    return None if span is None else span[key[0] == "<"]


def num_elements(module: nn.Module) -> int:
    """Return how many numbers the parameters of a module hold."""
    return sum(parameter.numel() for parameter in module.parameters())


class _Executed:
    """What the trace says about the order in which modules run."""

    def __init__(self, spans: Spans, num_calls: dict[str, int]) -> None:
        self.spans = spans
        self.num_calls = num_calls

    def one_after_the_other(self, paths: Sequence[str]) -> bool:
        """Tell whether each of the modules runs at most once, and none begins before the one before it ends."""
        run = sorted(self.spans[path] for path in paths if path in self.spans)
        once = all(self.num_calls.get(path, 0) <= 1 for path in paths)
        return len(run) > 1 and once and all(a[1] <= b[0] for a, b in pairwise(run))


def _children(module: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    return [(f"{path}.{name}" if path else name, child) for name, child in children_of(module)]


def _chains(module: nn.Module, path: str, executed: _Executed, total: int) -> Iterator[list[tuple[str, nn.Module]]]:
    """Yield the links of each outermost chain; a link that holds most of the model is opened in its place."""
    children = _children(module, path)
    is_chain = isinstance(module, nn.ModuleList | nn.Sequential)
    if not is_chain or not executed.one_after_the_other([inner for inner, _ in children]):
        for inner, child in children:
            yield from _chains(child, inner, executed, total)
        return
    links: list[tuple[str, nn.Module]] = []
    for inner, child in children:
        opened = is_plain_sequential(child) or 2 * num_elements(child) > total
        found = list(_chains(child, inner, executed, total)) if opened else []
        links += [link for chain in found for link in chain] or [(inner, child)]
    yield links


def _parts(module: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    """Return the children of the outermost module that has parameters in more than one place."""
    children = _children(module, path)
    owners = [(inner, child) for inner, child in children if num_elements(child)]
    alone = len(owners) == 1 and not list(module.parameters(recurse=False))
    return _parts(owners[0][1], owners[0][0]) if alone else owners
