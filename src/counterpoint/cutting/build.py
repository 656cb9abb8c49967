"""A run of pieces of a trace as one Python function of values, parameters and buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from counterpoint.cutting.cut import Seed
from counterpoint.cutting.layout import Layout
from counterpoint.cutting.ops import changed_by
from counterpoint.cutting.regions import is_entry

_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


@dataclass(frozen=True, slots=True)
class Built:
    """A run of pieces for inputs of one signature.

    Args:
        function: takes the seed, the values, the parameters and the buffers, one after the other.
        inputs: the nodes of the values.
        outputs: the nodes of what it returns.
        params: the names of the parameters.
        buffers: the names of the buffers.
    """

    function: Callable[..., tuple[Tensor, ...]]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    params: tuple[str, ...]
    buffers: tuple[str, ...]


def build(layout: Layout, first_piece: int, stop_piece: int, *, dtype: torch.dtype | None = None) -> Built:
    """Return a run of pieces as a function; with a dtype, everything of floating point inside is of that dtype."""
    return _Builder(layout, first_piece, stop_piece, dtype).build()


def call_seed(seed: Seed, path: str) -> None:
    """Set the random state for a call; a function of its own, for the generated code to call."""
    seed(path)


class _Builder:
    """Copies a part of the trace into a graph of its own."""

    def __init__(self, layout: Layout, first_piece: int, stop_piece: int, dtype: torch.dtype | None) -> None:
        first, stop = layout.span(first_piece, stop_piece)
        self.layout = layout
        self.dtype = dtype
        self.nodes = layout.order[first:stop]
        self.inputs = tuple(layout.handed[place].node for place in layout.taken(first_piece, stop_piece))
        self.outputs = tuple(layout.handed[place].node for place in layout.given(first_piece, stop_piece))
        if stop_piece == layout.num_pieces:
            self.outputs = layout.traced.outputs
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}

    def build(self) -> Built:
        """Return the part as a function of a seed, the values it takes, its parameters and its buffers."""
        traced, graph = self.layout.traced, self.graph
        params, buffers = self._read(traced.params), self._read(traced.buffers)
        seed = graph.placeholder("seed")
        for node in self.inputs:
            self.env[node] = graph.placeholder(f"value_{node.name}")
        for names in (params, buffers):
            given = {name: graph.placeholder(f"own_{name.replace('.', '_')}") for name in dict.fromkeys(names.values())}
            self.env |= {node: given[name] for node, name in names.items()}
        for node in self._changed_inputs():
            self.env[node] = graph.call_function(torch.ops.aten.clone.default, (self.env[node],))
        for node in self.nodes:
            if node in self.layout.seeds:
                graph.call_function(call_seed, (seed, self.layout.seeds[node]))
            if node not in self.env:
                self._copy(node)
        graph.output(tuple(self._get(node) for node in self.outputs))
        constants = {target: self._cast(value) for target, value in traced.constants.items()}
        module = fx.GraphModule(constants, graph)
        return Built(
            module.forward,
            self.inputs,
            self.outputs,
            tuple(dict.fromkeys(params.values())),
            tuple(dict.fromkeys(buffers.values())),
        )

    def _read(self, names: dict[fx.Node, str]) -> dict[fx.Node, str]:
        """Return those of the named nodes that this part reads, by way of constants too."""
        read: dict[fx.Node, str] = {}
        queue = [*self.nodes, *self.outputs]
        seen = set(self.inputs)
        while queue:
            node = queue.pop()
            if node not in seen:
                seen.add(node)
                queue += self._sources(node)
                if node in names:
                    read[node] = names[node]
        return {node: name for node, name in names.items() if node in read}

    def _sources(self, node: fx.Node) -> Iterable[fx.Node]:
        constants = self.layout.flow.constants
        own = node in constants or node in set(self.nodes)
        return node.all_input_nodes if own else ()

    def _changed_inputs(self) -> list[fx.Node]:
        """Return the values taken in that are changed in place here: the caller's own must stay as they are."""
        storage = self.layout.flow.storage
        changed = {storage[source] for node in self.nodes for source in changed_by(node)}
        return [node for node in self.inputs if storage[node] in changed]

    def _get(self, node: fx.Node) -> fx.Node:
        """Return the copy of a node; a constant is copied when it is first asked for."""
        if node not in self.env:
            self._copy(node)
        return self.env[node]

    def _copy(self, node: fx.Node) -> None:
        own = set(self.nodes)
        late = next((user for user in node.users if user.meta.get("bias_of") is node), None)
        if is_entry(node) and all(user in own for user in node.users):
            self.env[node] = self._get(node.meta["alias_of"])
        elif late is not None and late in own:  # the bias was moved for a cut that is not made here
            fused = tuple(self._get(arg) for arg in (*node.args, late.args[1]) if isinstance(arg, fx.Node))
            self.env[node] = self.env[late] = self.graph.call_function(torch.ops.aten.linear.default, fused)
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), self._get)
            copy = self.graph.create_node(node.op, node.target, self._cast(args), self._cast(kwargs))
            self.env[node] = copy

    def _cast(self, value: Any) -> Any:  # noqa: ANN401
        """Return a constant or an argument in the dtype asked for."""
        if self.dtype is None:
            return value
        match value:
            case torch.dtype():
                return self.dtype if value in _FLOATS else value
            case Tensor():
                return value.to(self.dtype) if value.is_floating_point() else value
            case fx.GraphModule():
                return self._cast_body(value)
            case tuple() | list():
                return type(value)(self._cast(entry) for entry in value)
            case dict():
                return {key: self._cast(entry) for key, entry in value.items()}
            case _:
                return value

    def _cast_body(self, module: fx.GraphModule) -> fx.GraphModule:
        """Return the body of a no_grad or an autocast in the dtype asked for."""
        body = copy.deepcopy(module)
        for node in body.graph.nodes:
            node.args, node.kwargs = self._cast(node.args), self._cast(node.kwargs)
        body.recompile()
        return body
