"""Gradients of graphs of ``torch.compile`` of which the loss uses not all outputs: none, where eager autograd has none.

AOTAutograd replaces the missing gradients of outputs by zeros, and so returns zeros for inputs that affect only these.
An optimizer then moves a weight, by its decay or momentum, which it would leave alone. Here a backend finds which
inputs of a graph affect which of its outputs; where that differs between outputs, hooks take such zeros away again::

    forward     a, b  ->  graph  ->  x (of a), y (of a and b)
    backward    x has a gradient, y has none  ->  graph  ->  gradient of a, zeros of b  ->  hook  ->  of a only
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from counterpoint.partitioning.saved_masks import inductor_options

Graph: TypeAlias = Any  # a module of torch.fx, or what a backend makes of it
Affected: TypeAlias = Mapping[int, frozenset[int]]
"""Of inputs of a graph, by index, the indices of the outputs that each affects."""
AUTOGRAD_BACKENDS = frozenset({"eager", "eager_debug", "eager_noexcept"})
"""Backends whose graphs autograd records by operator, as without compilation: their missing gradients stay missing."""
UNREACHED: ContextVar[tuple[int, frozenset[int] | None]] = ContextVar("UNREACHED", default=(-1, frozenset()))
"""The number of a run of autograd, and the addresses of inputs without gradient in its compiled backward; None for all.

If a backward raises, the hook that resets the addresses is not called. They count for the run of that number only.
"""


number_of_run: Callable[[], int] = torch._C._current_graph_task_id  # noqa: SLF001 - it has no public name
"""Returns the number of the present run of autograd; -1 outside of one."""


def is_unreached(weight: Tensor) -> bool:
    """Return whether the compiled backward that runs now is to give a weight no gradient instead of zeros."""
    run, addresses = UNREACHED.get()
    return run == number_of_run() and (addresses is None or weight.data_ptr() in addresses)


def set_unreached(addresses: frozenset[int] | None) -> None:
    """Set what :func:`is_unreached` reads until autograd's present run ends."""
    UNREACHED.set((number_of_run(), addresses))


@dataclass(frozen=True)
class EagerGradients:
    """A backend of ``torch.compile`` whose graphs give gradients to the inputs that have one without compilation.

    Args:
        name: of the backend that compiles.
        mode: of ``torch.compile``; None for the default one.
        is_chained: whether outputs of graphs are inputs of others, so that a graph's outputs may all have no gradient.
    """

    name: str
    mode: str | None = None
    is_chained: bool = False

    @property
    def __name__(self) -> str:
        """Name the backend in torch's errors."""
        return self.name

    def __call__(self, graph: Graph, examples: Sequence[Any]) -> Graph:
        """Return the graph compiled."""
        if self.name in AUTOGRAD_BACKENDS:
            return self.find_compiler()(graph, examples)
        affected = find_affected(graph, examples)
        compiled = self.find_compiler()(graph, examples)
        outputs = frozenset[int]().union(*affected.values())
        if all(reached == outputs for reached in affected.values()):
            if not self.is_chained:
                return compiled
            affected = {}  # outputs have gradients together

        def call(*args: Any) -> Any:  # noqa: ANN401 - as the graph
            inputs = [GraphInput(args[index], reached) for index, reached in affected.items()]
            before = find_histories(args)
            results = compiled(*args)
            watch_backward(inputs, results, before)
            return results

        return call

    def find_compiler(self) -> Callable[[Graph, Sequence[Any]], Graph]:
        """Return what compiles a graph; raise torch's error if there is no such backend, or it has no such mode."""
        from torch._dynamo import lookup_backend  # two seconds, if nothing is compiled

        compiler: Any = lookup_backend(self.name)
        if self.name == "inductor":
            return partial(compiler, config_patches=inductor_options(self.mode))
        return compiler if self.mode in {None, "default"} else partial(compiler, mode=self.mode)


class GraphInput:
    """An input of one call of a graph, which may write to it, so that this is made before the call.

    Args:
        tensor: the input.
        affected: outputs that it affects.
    """

    def __init__(self, tensor: Tensor, affected: frozenset[int]) -> None:
        self.edge = get_gradient_edge(tensor) if tensor.requires_grad else None
        self.tensor, self.affected = ref(tensor), affected

    def address(self) -> int:
        """Return where its values are now; 0 if it is gone."""
        tensor = self.tensor()
        return 0 if tensor is None else tensor.data_ptr()


def find_affected(graph: Graph, examples: Sequence[Any]) -> Affected:
    """Return which outputs the inputs of a graph affect, as autograd sees it; nothing if all affect the same ones.

    Args:
        graph: of Dynamo.
        examples: its inputs, without values.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    (returned,) = graph.graph.find_nodes(op="output")[0].args
    if len(returned) < 2 or not any(isinstance(value, Tensor) and value.requires_grad for value in examples):
        return {}
    sizes = ShapeEnv()  # names those that depend on values; its own, so that the graph gets no guards from here
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=sizes), torch.enable_grad():
        leaves = [make_leaf(value) for value in examples]
        results = graph(*(written_to(leaf, value) for leaf, value in zip(leaves, examples, strict=True)))
    reached = {
        index: frozenset(edge.variable for edge, _ in find_edges(result, is_leaf))
        for index, result in enumerate(results)
        if isinstance(result, Tensor) and result.requires_grad
    }
    return {
        number: frozenset(index for index, found in reached.items() if leaf in found)
        for number, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and leaf.requires_grad and any(leaf in found for found in reached.values())
    }


def make_leaf(value: Any) -> Any:  # noqa: ANN401 - an input of a graph
    """Return a tensor like another one, without its history, or the number that a symbol stands for; else the value."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value if value.node.hint is None else value.node.hint
    if not isinstance(value, Tensor):
        return value
    like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return like.requires_grad_(value.requires_grad)


def written_to(leaf: Any, value: Any) -> Any:  # noqa: ANN401 - as above
    """Return what a graph may write to, as it may to an input that is none of autograd's leaves; else the leaf."""
    return leaf.clone() if isinstance(value, Tensor) and not value.is_leaf else leaf


def is_leaf(node: Any) -> bool:  # noqa: ANN401 - a node of autograd has no type
    """Return whether a node adds up the gradient of a leaf."""
    return type(node).__name__ == "AccumulateGrad"


def is_compiled(node: Any) -> bool:  # noqa: ANN401 - as above
    """Return whether a node is the backward of a graph of AOTAutograd."""
    return type(node).__name__ == "CompiledFunctionBackward"


def find_histories(args: Sequence[Any]) -> frozenset[Any]:
    """Return the nodes of autograd that computed the inputs of a call of a graph, which may write to the inputs."""
    return frozenset(value.grad_fn for value in args if isinstance(value, Tensor) and value.grad_fn is not None)


def find_edges(
    result: Tensor, accepts: Callable[[Any], bool], before: frozenset[Any] = frozenset()
) -> Iterator[tuple[Any, int]]:
    """Yield the nearest nodes of a tensor's history that a function accepts, each with the number of its output.

    Args:
        result: the tensor.
        accepts: tells of a node whether it is wanted.
        before: nodes at which the search ends; they are not yielded.
    """
    edge = get_gradient_edge(result)
    pending: list[tuple[Any, int]] = [(edge.node, edge.output_nr)]
    seen = set[Any]()
    while pending:
        node, number = pending.pop()
        if node is None or node in before or (node, number) in seen:
            continue
        seen.add((node, number))
        if accepts(node):
            yield node, number
        else:
            pending.extend(node.next_functions)


def watch_backward(inputs: Sequence[GraphInput], results: Sequence[Any], before: frozenset[Any]) -> None:
    """Let the backward of one call of a graph return no gradients of inputs that affect only outputs without one.

    Args:
        inputs: of the call, those that affect outputs; none if all affect the same ones.
        results: of it. One may be an input or a view of one, whose history is not of this call.
        before: nodes of autograd that computed the inputs of the call.
    """
    by_edge = {(found.edge.node, found.edge.output_nr): found for found in inputs if found.edge is not None}
    outputs = {
        (node, number): index
        for index, result in enumerate(results)
        if isinstance(result, Tensor) and result.requires_grad
        for node, number in find_edges(result, is_compiled, before)
    }
    nodes = {node for node, _ in outputs}
    if len(nodes) != 1:  # computed without autograd, or by a backend that does not make one node of a graph
        return
    (node,) = nodes
    by_number = {number: index for (_, number), index in outputs.items()}
    by_place = {place: by_edge[edge] for place, edge in enumerate(node.next_functions) if edge in by_edge}
    unreached, num_places = set[int](), len(node.next_functions)

    def find_unreached(grads: Sequence[Tensor | None]) -> None:
        unreached.clear()  # of a run that has raised
        used = {by_number.get(number) for number, grad in enumerate(grads) if grad is not None}
        if not used:
            unreached.update(range(num_places))
            set_unreached(None)
        elif None not in used:  # as an input is that the graph writes to
            unreached.update(place for place, found in by_place.items() if used.isdisjoint(found.affected))
            set_unreached(frozenset(by_place[place].address() for place in unreached))

    def drop_zeros(grads: Sequence[Tensor | None], _: object) -> tuple[Tensor | None, ...]:
        kept = tuple(None if place in unreached else grad for place, grad in enumerate(grads))
        unreached.clear()
        set_unreached(frozenset())
        return kept

    node.register_prehook(find_unreached)
    node.register_hook(drop_zeros)
