"""Build one Python function of values, parameters and buffers from a run of layers of a trace."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from counterpoint.partitioning.fx_ops import mutated_inputs
from counterpoint.partitioning.partitioned_model import SeedFn
from counterpoint.partitioning.tracing.export_trace import read_dtype
from counterpoint.partitioning.tracing.linear_pairs import is_entry_alias, linear_with_bias
from counterpoint.partitioning.tracing.split_trace import SplitTrace, find_buffer_updates

_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


@dataclass(frozen=True, slots=True)
class BuiltSegment:
    """A run of layers for inputs of one signature.

    Args:
        function: takes the seed function if it calls it, the values, the parameters, the buffers and the sizes, as
            positional arguments.
        inputs: the nodes of the values.
        outputs: the nodes of the results.
        params: the names of the parameters.
        buffers: the names of the buffers.
        sizes: the nodes of the sizes, which depend on the shapes of the model's inputs.
        code: the same text for functions that do the same.
    """

    function: Callable[..., tuple[Tensor, ...]]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    params: tuple[str, ...]
    buffers: tuple[str, ...]
    sizes: tuple[fx.Node, ...]
    code: str


def build_segment(
    split_trace: SplitTrace, first_layer: int, stop_layer: int, *, dtype: torch.dtype | None = None, seeds: bool = True
) -> BuiltSegment:
    """Build a run of layers as a function.

    Args:
        split_trace: has the layers.
        first_layer: the first of them.
        stop_layer: one past the last.
        dtype: replaces every floating-point dtype inside.
        seeds: whether it calls the seed function.
    """
    return _SegmentBuilder(split_trace, first_layer, stop_layer, dtype, seeds=seeds).build()


def call_seed(seed: SeedFn, path: str) -> None:
    """Set the random state for a call; a module-level function, so that generated code can call it."""
    seed(path)


def call_with_autocast(
    device_type: str,
    dtype: torch.dtype | None,
    enabled: bool,  # noqa: FBT001 - as torch's operator
    cache_enabled: bool | None,  # noqa: FBT001 - likewise
    body: Callable[..., Any],
    *args: Any,  # noqa: ANN401 - of the body
) -> Any:  # noqa: ANN401 - likewise
    """Call a part of a trace under autocast."""
    with torch.autocast(device_type, dtype, enabled, cache_enabled):
        return body(*args)


def call_with_grad_enabled(
    enabled: bool,  # noqa: FBT001 - as torch's operator
    body: Callable[..., Any],
    *args: Any,  # noqa: ANN401 - of the body
) -> Any:  # noqa: ANN401 - likewise
    """Call a part of a trace with gradients enabled or not."""
    with torch.set_grad_enabled(enabled):
        return body(*args)


PLAIN_FUNCTIONS: Mapping[Any, Callable[..., Any]] = {
    torch.ops.higher_order.wrap_with_autocast: call_with_autocast,
    torch.ops.higher_order.wrap_with_set_grad_enabled: call_with_grad_enabled,
}
"""Operators that call a part of a trace, and the same as functions, inside of which Dynamo lets draws be counted."""


class _SegmentBuilder:
    """Copies a part of the trace into a graph of its own."""

    def __init__(
        self, split_trace: SplitTrace, first_layer: int, stop_layer: int, dtype: torch.dtype | None, *, seeds: bool
    ) -> None:
        first, stop = split_trace.span(first_layer, stop_layer)
        self.split_trace = split_trace
        self.dtype = dtype
        self.calls_seed = seeds
        self.nodes = split_trace.order[first:stop]
        self.inputs = tuple(
            split_trace.boundary_values[index].node for index in split_trace.inputs_of(first_layer, stop_layer)
        )
        self.outputs = tuple(
            split_trace.boundary_values[index].node for index in split_trace.outputs_of(first_layer, stop_layer)
        )
        if stop_layer == split_trace.num_layers:
            self.outputs = split_trace.traced.outputs
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.updated: dict[fx.Node, fx.Node] = {}  # the buffer that an update changes

    def build(self) -> BuiltSegment:
        """Return the part as a function of a seed function, if any, its values, parameters, buffers and sizes."""
        traced, graph = self.split_trace.traced, self.graph
        params, buffers = self._used_names(traced.params), self._used_names(traced.buffers)
        sizes = tuple(self._used_names(traced.sizes))
        seed = graph.placeholder("seed") if self.calls_seed else None
        for index, node in enumerate(self.inputs):
            self.copies[node] = graph.placeholder(f"value_{index}")
        for kind, names in (("param", params), ("buffer", buffers)):
            unique = enumerate(dict.fromkeys(names.values()))
            placeholders = {name: graph.placeholder(f"{kind}_{index}") for index, name in unique}
            self.copies |= {node: placeholders[name] for node, name in names.items()}
        self.copies |= {node: graph.placeholder(f"size_{index}") for index, node in enumerate(sizes)}
        self._cast_params(params)
        self._keep_old_values(buffers)
        for node in self._mutated_inputs():
            self.copies[node] = graph.call_function(torch.ops.aten.clone.default, (self.copies[node],))
        for node in self.nodes:
            if seed is not None and node in self.split_trace.seeds:
                graph.call_function(call_seed, (seed, self.split_trace.seeds[node]))
            if node not in self.copies:
                self._copy(node)
        graph.output(tuple(self._get_output(node) for node in self.outputs))
        constants = {target: self._cast(value) for target, value in traced.constants.items()}
        module = fx.GraphModule(constants, graph)
        has_constants = any(node.op == "get_attr" for node in graph.nodes)
        return BuiltSegment(
            module.forward,
            self.inputs,
            self.outputs,
            tuple(dict.fromkeys(params.values())),
            tuple(dict.fromkeys(buffers.values())),
            sizes,
            f"{module.code}# {id(module)}" if has_constants else module.code,
        )

    def _cast_params(self, params: dict[fx.Node, str]) -> None:
        """Cast the parameters that are read in another dtype, each once."""
        casts: dict[tuple[str, torch.dtype], fx.Node] = {}
        for node, name in params.items():
            dtype = read_dtype(node)
            if dtype is None:
                continue
            if (name, dtype) not in casts:
                cast_args = (self.copies[node], self._cast(dtype))
                casts[name, dtype] = self.graph.call_function(torch.ops.aten.to.dtype, cast_args)
            self.copies[node] = casts[name, dtype]

    def _keep_old_values(self, buffers: dict[fx.Node, str]) -> None:
        """Let operations read a copy of a buffer that is updated here: autograd may save it for the backward."""
        split_trace = self.split_trace
        for update in find_buffer_updates(self.nodes, split_trace.traced, split_trace.dataflow):
            target = update.all_input_nodes[0]
            if target in buffers:
                self.updated[update] = self.copies[target]
                old = self.graph.call_function(torch.ops.aten.clone.default, (self.copies[target],))
                self.copies |= {node: old for node, name in buffers.items() if name == buffers[target]}

    def _used_names(self, names: dict[fx.Node, Any]) -> dict[fx.Node, Any]:
        """Return those of the named nodes that this part reads, directly or through constants."""
        used: dict[fx.Node, Any] = {}
        queue = [*self.nodes, *self.outputs]
        seen = set(self.inputs)
        while queue:
            node = queue.pop()
            if node not in seen:
                seen.add(node)
                queue += self._inputs_of(node)
                if node in names:
                    used[node] = names[node]
        return {node: name for node, name in names.items() if node in used}

    def _inputs_of(self, node: fx.Node) -> Iterable[fx.Node]:
        constants = self.split_trace.dataflow.constants
        is_local = node in constants or node in set(self.nodes)
        return node.all_input_nodes if is_local else ()

    def _mutated_inputs(self) -> list[fx.Node]:
        """Return the inputs that are changed in place here: they are cloned, because the caller still needs them."""
        storage = self.split_trace.dataflow.storage
        mutated = {storage[source] for node in self.nodes for source in mutated_inputs(node)}
        return [node for node in self.inputs if storage[node] in mutated]

    def _get_output(self, node: fx.Node) -> fx.Node:
        """Return the copy of an output; one in memory of its own if it is a parameter, or shares its memory.

        The weights of a part may be freed before the output is read, by a later part or by the loss.
        """
        storage = self.split_trace.dataflow.storage
        output = self._get_copy(node)
        if storage[node] in {storage[param] for param in self.split_trace.traced.params}:
            return self.graph.call_function(torch.ops.aten.clone.default, (output,))
        return output

    def _get_copy(self, node: fx.Node) -> fx.Node:
        """Return the copy of a node; a constant is copied at its first use."""
        if node not in self.copies:
            self._copy(node)
        return self.copies[node]

    def _copy(self, node: fx.Node) -> None:
        local = set(self.nodes)
        moved_bias = next((user for user in node.users if user.meta.get("bias_of") is node), None)
        if is_entry_alias(node) and all(user in local for user in node.users):
            self.copies[node] = self._get_copy(node.meta["alias_of"])
        elif (
            moved_bias is not None and moved_bias in local
        ):  # the bias was moved after the sum of a pair that is not sharded here
            target, layer_args = linear_with_bias(node, moved_bias.all_input_nodes[1])
            fused = self.graph.call_function(target, tuple(map(self._get_copy, layer_args)))
            self.copies[node] = self.copies[moved_bias] = fused
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), self._get_copy)
            if node in self.updated:
                args = (self.updated[node], *args[1:])
            operator: Any = node.target
            if not self.calls_seed:
                operator = PLAIN_FUNCTIONS.get(operator, operator)
            copy = self.graph.create_node(node.op, operator, self._cast(args), self._cast(kwargs))
            self.copies[node] = copy

    def _cast(self, value: Any) -> Any:  # noqa: ANN401
        """Replace floating-point dtypes and tensors in a constant or an argument."""
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
        """Return the body of a no_grad or an autocast with its floating-point dtypes replaced."""
        body = copy.deepcopy(module)
        for node in body.graph.nodes:
            node.args, node.kwargs = self._cast(node.args), self._cast(node.kwargs)
        body.recompile()
        return body
