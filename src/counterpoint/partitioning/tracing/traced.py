"""Partition any traceable model along the graph of its forward, where few values are live."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from counterpoint.errors import PlanError
from counterpoint.model.dataflow import INPUT, ValueSpec
from counterpoint.model.spec import Block, LayerSpec, ModelSpec, TensorParallelSpec
from counterpoint.partitioning.dry_run import CallArgs, Inputs, num_samples, split_call_args
from counterpoint.partitioning.flop_counter import FlopCounter
from counterpoint.partitioning.fx_ops import fake_value, is_aten_op, is_random_op, returns_tensor
from counterpoint.partitioning.input_shapes import InputShapes, format_shapes, list_input_shapes
from counterpoint.partitioning.module_casts import is_narrower
from counterpoint.partitioning.partitioned_model import (
    FlatInputs,
    PartitionedModel,
    SeedFn,
    Segment,
    list_params,
    num_bytes,
)
from counterpoint.partitioning.pytree import (
    require_unchanged_dtypes,
    require_unchanged_leaves,
    require_unchanged_structure,
)
from counterpoint.partitioning.segment_compiler import SegmentCompiler, with_mode
from counterpoint.partitioning.tracing.export_trace import export_graph, innermost_module, module_calls, read_dtype
from counterpoint.partitioning.tracing.graph_dataflow import find_differentiable_values
from counterpoint.partitioning.tracing.linear_pairs import ColumnRowPair, DimNames, format_path_range
from counterpoint.partitioning.tracing.split_points import compute_module_spans
from counterpoint.partitioning.tracing.split_trace import SplitPreference, SplitTrace, choose_split_points, split_trace
from counterpoint.partitioning.tracing.trace_cache import TraceCache


class TracedPartition(PartitionedModel):
    """A model split along the operations of its forward; it refers to the model but copies none of its tensors.

    Inputs of other shapes than the example's are traced on demand, see
    :mod:`counterpoint.partitioning.tracing.trace_cache`.

    Args:
        model: a module whose forward can be traced.
        inputs: example arguments of its forward; the first dim of their tensors is the sample.
        dims: names for the dims of linear layers, by pattern of module path.
        split_points: paths of modules that start a block, in addition to the automatic ones.
        prefer: what stays whole if a column-row pair crosses the end of a block.
        compiler: compiles each segment; None to run them eagerly.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Inputs,
        *,
        dims: DimNames | None = None,
        split_points: Sequence[str] = (),
        prefer: SplitPreference = "blocks",
        compiler: SegmentCompiler | None = None,
    ) -> None:
        self.model = model
        self._example_inputs = inputs
        self._example_shapes = list_input_shapes(inputs)
        self._example_call = split_call_args(inputs)
        leaves = tree_leaves(self._example_call)
        self._is_nested = len(leaves) != sum(map(len, self._example_call))
        self._example_dtypes = [leaf.dtype if isinstance(leaf, Tensor) else None for leaf in leaves]
        self._has_only_tensors = None not in self._example_dtypes
        self._num_samples = num_samples(inputs)
        self._autocasts = [
            (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
            for device in sorted({"cpu", *(param.device.type for param in model.parameters())} - {"meta"})
        ]
        self._dims = dims or {}
        traced = export_graph(model, inputs, training=True)
        self._split_points = choose_split_points(traced, model, self._dims, prefer, split_points)
        reference = split_trace(traced, model, self._dims, self._split_points)
        self._structure = reference.structure
        self._caches: dict[bool, TraceCache] = {}
        self._segments: dict[tuple[int, int, bool], Segment] = {}
        super().__init__(
            ModelSpec(
                _make_blocks(reference, self._num_samples),
                list_params(model),
                _value_specs(reference, self._num_samples),
            ),
            uses_rng=any(is_random_op(node) for node in reference.order),
            compiler=compiler,
        )
        self._caches[True] = self._make_cache(reference, training=True)

    def _make_cache(self, reference: SplitTrace | None, *, training: bool) -> TraceCache:
        """Return the traces for one mode; the first one is the reference, if it is given."""

        def make_trace(shapes: InputShapes, varying_dims: frozenset[tuple[int, int]]) -> SplitTrace:
            if reference is not None and shapes == self._example_shapes and not varying_dims:
                return reference
            return self._trace(shapes, varying_dims, training=training)

        return TraceCache(type(self.model).__name__, self._example_shapes, make_trace, seeds=self.compiler is None)

    def _trace(self, shapes: InputShapes, varying_dims: frozenset[tuple[int, int]], *, training: bool) -> SplitTrace:
        """Trace the model for inputs of some shapes, and split it as it was for the example.

        Raises:
            PlanError: it has other layers, or passes other values between them.
        """
        inputs = self._resize_example(shapes)
        with ExitStack() as stack:
            for device, dtype, enabled in self._autocasts:  # as for the example, or its values would have other dtypes
                stack.enter_context(torch.autocast(device, dtype, enabled))
            traced = export_graph(self.model, inputs, training=training, varying_dims=varying_dims)
        trace = split_trace(traced, self.model, self._dims, self._split_points)
        if trace.structure != self._structure:
            mode = "training" if training else "evaluation"
            raise PlanError(
                f"the model has other layers in {mode} with inputs of the shapes {format_shapes(shapes)} than in "
                f"training with {format_shapes(self._example_shapes)}; its modules must run in the same order for all "
                "its batches; move what differs into a module, or use a strategy that keeps the model whole (data, "
                "zero, server)"
            )
        if training in self._caches:
            self._require_same_values(self._caches[training].first, trace, shapes)
        return trace

    def _require_same_values(self, first: SplitTrace, trace: SplitTrace, shapes: InputShapes) -> None:
        """Check that a trace passes values between the same layers as the first one of its mode.

        Raises:
            PlanError: it does not, or it has layers that read other parameters or buffers.
        """
        remedy = (
            "have forward do the same for all shapes, or use a strategy that keeps the model whole (data, zero of "
            "level 1 or 2, server)"
        )
        if _value_routes(trace) != _value_routes(first):
            names = (
                {
                    (*route, value.node.name)
                    for route, value in zip(_value_routes(split), split.boundary_values, strict=True)
                }
                for split in (first, trace)
            )
            differing = sorted({name for *_, name in set.symmetric_difference(*names)})
            raise PlanError(
                f"for inputs of the shapes {format_shapes(shapes)} the model passes other values between layers than "
                f"for {format_shapes(self._example_shapes)}: {', '.join(differing)}; "
                f"{remedy}"
            )
        if self._narrow_reads(trace) != self._narrow_reads(first):
            reads = [set(self._narrow_reads(split).items()) for split in (first, trace)]
            changed = sorted({name for name, _ in reads[0] ^ reads[1]})
            raise PlanError(
                f"for inputs of the shapes {format_shapes(shapes)} the model reads {', '.join(changed)} in another "
                f"dtype than for {format_shapes(self._example_shapes)}; ranks gather weights in the dtype of the "
                f"first batch: {remedy}"
            )
        for index, (known, read) in enumerate(zip(_read_names(first), _read_names(trace), strict=True)):
            if not read <= known:
                raise PlanError(
                    f"for inputs of the shapes {format_shapes(shapes)} {self.spec.layers[index].name} of the model "
                    f"uses {', '.join(sorted(read - known))}, which it does not for "
                    f"{format_shapes(self._example_shapes)}; ranks have the weights that their layers use for the "
                    f"first batch: {remedy}"
                )

    def _resize_example(self, shapes: InputShapes) -> Inputs:
        """Return the example with tensors of zeros of other shapes."""
        if shapes == self._example_shapes:
            return self._example_inputs
        remaining = iter(shapes)
        return tree_map_only(Tensor, lambda leaf: leaf.new_zeros(next(remaining)), self._example_inputs)

    def _cache(self, *, training: bool) -> TraceCache:
        """Return the traces for one mode."""
        if training not in self._caches:
            self._caches[training] = self._make_cache(None, training=training)
        return self._caches[training]

    @property
    def num_traces(self) -> int:
        """How often the model was traced."""
        return sum(cache.num_traces for cache in self._caches.values())

    def split_trace(self, *, training: bool, input_shapes: InputShapes = ()) -> SplitTrace:
        """Return the split trace for a mode and the shapes of the inputs, by default the example's."""
        return self._cache(training=training).find(input_shapes or self._example_shapes).trace.split

    def segment(self, first_layer: int, stop_layer: int, *, training: bool) -> Segment:
        """Return the layers as one function, which traces the model again for shapes that no trace serves."""
        key = (first_layer, stop_layer, training)
        if key not in self._segments:
            self._segments[key] = self._build_segment(first_layer, stop_layer, training=training)
        return self._segments[key]

    def _build_segment(self, first_layer: int, stop_layer: int, *, training: bool) -> Segment:
        cache, example_shapes, compiler = self._cache(training=training), self._example_shapes, self.compiler
        trace = cache.first
        example = cache.find(example_shapes).trace.segment(first_layer, stop_layer)

        def run(
            values: Sequence[Tensor],
            tensors: Mapping[str, Tensor],
            buffer_tensors: Mapping[str, Tensor],
            seed: SeedFn,
            input_shapes: InputShapes,
        ) -> tuple[Tensor, ...]:
            """Run the layers, by the trace for these shapes of the model's inputs."""
            bound = cache.find(input_shapes or example_shapes)
            built = bound.trace.segment(first_layer, stop_layer)
            function = built.function if compiler is None else compiler.compile(with_mode(built.function), built.code)
            return function(  # of the seed function, or a mode
                seed,
                *values,
                *[tensors[name] for name in built.params],
                *[buffer_tensors[name] for name in built.buffers],
                *[bound.sizes[node] for node in built.sizes],
            )

        pair = trace.pairs.get(first_layer) if stop_layer == first_layer + 1 else None
        inputs, outputs = trace.inputs_of(first_layer, stop_layer), trace.outputs_of(first_layer, stop_layer)
        return Segment(
            inputs,
            outputs,
            example.params,
            example.buffers,
            run,
            tuple(index for index in inputs if pair and trace.boundary_values[index].node is pair.source),
            tuple(index for index in outputs if pair and trace.boundary_values[index].node is pair.row),
            compiler is not None,
            tuple(
                trace.seeds[node]
                for node in trace.order[slice(*trace.span(first_layer, stop_layer))]
                if node in trace.seeds
            ),
        )

    def values(self, *, training: bool) -> tuple[ValueSpec, ...]:
        """Return the values passed between layers."""
        return _value_specs(self.split_trace(training=training), self._num_samples)

    def read_dtypes(self, *, training: bool) -> Mapping[str, torch.dtype]:
        """Return the parameters that all segments read in the same narrower dtype, by name."""
        return self._narrow_reads(self._cache(training=training).first)

    def _narrow_reads(self, trace: SplitTrace) -> dict[str, torch.dtype]:
        """Return the parameters that a trace reads in the same narrower dtype everywhere."""
        found: dict[str, set[torch.dtype | None]] = {}
        for node, name in trace.traced.params.items():
            if node.users:
                found.setdefault(name, set()).add(read_dtype(node))
        own = {name: param.dtype for name, param in self.model.named_parameters()}
        return {
            name: dtype
            for name, dtypes in found.items()
            for dtype in dtypes
            if len(dtypes) == 1 and dtype is not None and is_narrower(dtype, own[name])
        }

    def flatten_inputs(self, inputs: Inputs, *, training: bool = True) -> FlatInputs:
        """Return the input tensors that the forward reads, and the shapes of all.

        Raises:
            DataError: the inputs have another structure, dtype or value that is not a tensor than the example's.
        """
        trace, call = self._cache(training=training).first, self._order_names(split_call_args(inputs))
        leaves = tree_leaves(call)
        dtypes = [leaf.dtype if isinstance(leaf, Tensor) else None for leaf in leaves]
        if not self._has_only_tensors or dtypes != self._example_dtypes:
            require_unchanged_leaves(self._example_call, call)
            require_unchanged_dtypes(self._example_call, call)
        if self._is_nested:
            require_unchanged_structure(self._example_call, call)
        values = dict(zip(trace.traced.inputs, leaves, strict=True))
        return FlatInputs(
            tuple([values[value.node] for value in trace.boundary_values if value.producer == INPUT]),
            tuple([leaf.shape for leaf in leaves if isinstance(leaf, Tensor)]),
        )

    def _order_names(self, call: CallArgs) -> CallArgs:
        """Return the arguments of a call with those that have names in the order of the example.

        Raises:
            DataError: they have other names.
        """
        names = self._example_call[1].keys()
        if list(call[1]) == list(names):
            return call
        if call[1].keys() != names:
            require_unchanged_structure(self._example_call, call)
        return call[0], {name: call[1][name] for name in names}

    def unflatten_output(
        self, values: Sequence[Tensor], *, training: bool = True, input_shapes: InputShapes = ()
    ) -> Any:  # noqa: ANN401
        """Return the output as the model returns it in this mode."""
        trace = self.split_trace(training=training, input_shapes=input_shapes)
        return trace.traced.output_tree.unflatten(values)


def _value_routes(split_trace: SplitTrace) -> list[tuple[Any, ...]]:
    """Return the producer and the consumers of each value, and what tells it from others of the same."""
    pairs = split_trace.pairs.values()
    sharded = {pair.source for pair in pairs}, {pair.row for pair in pairs}
    return [
        (
            value.producer,
            value.consumers,
            fake_value(value.node).dtype,
            fake_value(value.node).dim(),
            *(value.node in nodes for nodes in sharded),
        )
        for value in split_trace.boundary_values
    ]


def _read_names(split_trace: SplitTrace) -> list[set[str]]:
    """Return the parameters and buffers that each layer reads."""
    names = {**split_trace.traced.params, **split_trace.traced.buffers}
    return [
        {
            names[source]
            for node in split_trace.order[slice(*split_trace.span(index, index + 1))]
            for source in node.all_input_nodes
            if source in names
        }
        for index in range(split_trace.num_layers)
    ]


def _produced_nodes(split_trace: SplitTrace, index: int) -> Sequence[fx.Node]:
    """Return what a layer produces for later ones; for the last layer, the output."""
    if index == split_trace.num_layers - 1:
        return split_trace.traced.outputs
    return [value.node for value in split_trace.boundary_values if value.producer == index]


def _value_specs(split_trace: SplitTrace, num_samples: int) -> tuple[ValueSpec, ...]:
    differentiable = find_differentiable_values(split_trace.traced, split_trace.dataflow)
    return tuple(
        ValueSpec(
            value.producer, value.consumers, _num_bytes([value.node]) // num_samples, value.node in differentiable
        )
        for value in split_trace.boundary_values
    )


def _make_blocks(split_trace: SplitTrace, num_samples: int) -> tuple[Block, ...]:
    """Return the blocks of a split trace with their layers."""
    starts: dict[int, list[str]] = {}
    for path, (first, _) in compute_module_spans(split_trace.order)[0].items():
        starts.setdefault(first, []).append(path)
    layers = tuple(
        replace(
            _make_layer(split_trace, index, num_samples),
            modules_started=tuple(filter(None, starts.get(split_trace.layer_starts[index], ()))),
        )
        for index in range(split_trace.num_layers)
    )
    firsts = [split_trace.layer_starts.index(start) for start in split_trace.block_starts]
    return tuple(
        Block(layers[first:stop], first)
        for first, stop in zip(firsts, [*firsts[1:], split_trace.num_layers], strict=True)
    )


def _make_layer(split_trace: SplitTrace, index: int, num_samples: int) -> LayerSpec:
    first, stop = split_trace.span(index, index + 1)
    nodes, params = split_trace.order[first:stop], split_trace.traced.params
    sources = [source for node in nodes for source in node.all_input_nodes]
    if index == split_trace.num_layers - 1:
        sources += split_trace.traced.outputs  # a forward may return a parameter itself
    names = dict.fromkeys(params[source] for source in sources if source in params)
    pair = split_trace.pairs.get(index)
    return LayerSpec(
        name=pair.name if pair else _layer_name(split_trace, index),
        params=tuple(names),
        cost=_count_flops(split_trace, nodes) / num_samples,
        output_bytes=_num_bytes(_produced_nodes(split_trace, index)) // num_samples,
        tp=_tensor_parallel_spec(pair, split_trace, num_samples) if pair else None,
        can_start_stage=first in split_trace.intra_block_starts,
    )


def _layer_name(split_trace: SplitTrace, index: int) -> str:
    """Return the path of the module that a layer is, or of the first and the last in it."""
    first, stop = split_trace.span(index, index + 1)
    nodes = split_trace.order[first:stop]
    spans, _ = compute_module_spans(split_trace.order)
    exact = [path for path, _ in module_calls(nodes[0]) if path and spans[path] == (first, stop)]
    if exact:
        return exact[0]
    params = split_trace.traced.params
    owners = [innermost_module(node) for node in nodes if any(source in params for source in node.all_input_nodes)]
    paths = [path for path in owners or map(innermost_module, nodes) if path]
    return format_path_range(paths[0], paths[-1]) if paths else "root"


def _tensor_parallel_spec(pair: ColumnRowPair, split_trace: SplitTrace, num_samples: int) -> TensorParallelSpec:
    return TensorParallelSpec(
        dim=pair.dim,
        sharded_dims=pair.sharded_dims(split_trace.traced.params),
        dim_size=pair.size,
        output_bytes=_num_bytes([pair.row]) // num_samples,
        input_bytes=_num_bytes([pair.source]) // num_samples,
    )


def _num_bytes(nodes: Sequence[fx.Node]) -> int:
    return num_bytes([fake_value(node) for node in nodes if returns_tensor(node)])


def _count_flops(split_trace: SplitTrace, nodes: Sequence[fx.Node]) -> int:
    """Count the FLOPs of operations, on the fake tensors of the trace."""
    total = 0
    for node in nodes:
        if "bias_of" in node.meta:  # a linear layer's bias is counted with its matmul
            continue
        values: list[Any] = [leaf for leaf in tree_leaves(fake_value(node)) if isinstance(leaf, Tensor)]
        if not is_aten_op(node) or not values:
            total += 0 if node.target is operator.getitem else sum(value.numel() for value in values)
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: fake_value(n))
        with torch.no_grad(), values[0].fake_mode, FlopCounter() as counter:
            operation: Any = node.target
            operation(*args, **kwargs)
        total += counter.flops
    return total
