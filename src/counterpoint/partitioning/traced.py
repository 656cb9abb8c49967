"""Partition any traceable model along the graph of its forward, where few values are live."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from counterpoint.errors import PlanError
from counterpoint.model.dataflow import INPUT, ValueSpec
from counterpoint.model.spec import Block, LayerSpec, ModelSpec, TensorParallelSpec
from counterpoint.partitioning.dry_run import Inputs, num_samples, split_call_args
from counterpoint.partitioning.export_trace import export_graph, innermost_module, module_calls
from counterpoint.partitioning.flop_counter import FlopCounter
from counterpoint.partitioning.fx_ops import fake_value, is_aten_op, is_random_op, returns_tensor
from counterpoint.partitioning.graph_dataflow import find_differentiable_values
from counterpoint.partitioning.linear_pairs import ColumnRowPair, DimNames, format_path_range
from counterpoint.partitioning.partitioned_model import PartitionedModel, SeedFn, Segment, list_params, num_bytes
from counterpoint.partitioning.pytree import require_unchanged_leaves
from counterpoint.partitioning.segment_builder import BuiltSegment, build_segment
from counterpoint.partitioning.split_points import compute_module_spans
from counterpoint.partitioning.split_trace import SplitPreference, SplitTrace, choose_split_points, split_trace


class TracedPartition(PartitionedModel):
    """A model split along the operations of its forward; it refers to the model but copies none of its tensors.

    It is traced once per mode and per batch size, on demand; only the batch size may differ between batches.

    Args:
        model: a module whose forward can be traced.
        inputs: example arguments of its forward; the first dim of their tensors is the sample.
        dims: names for the dims of linear layers, by pattern of module path.
        split_points: paths of modules that start a block, in addition to the automatic ones.
        prefer: what stays whole if a column-row pair crosses the end of a block.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Inputs,
        *,
        dims: DimNames | None = None,
        split_points: Sequence[str] = (),
        prefer: SplitPreference = "blocks",
    ) -> None:
        self.model = model
        self._example_inputs = inputs
        self._has_only_tensors = all(isinstance(leaf, Tensor) for leaf in tree_leaves(split_call_args(inputs)))
        self._num_samples = num_samples(inputs)
        self._dims = dims or {}
        traced = export_graph(model, inputs, training=True)
        self._split_points = choose_split_points(traced, model, self._dims, prefer, split_points)
        reference = split_trace(traced, model, self._dims, self._split_points)
        self._structure = reference.structure
        self._split_traces = {(True, self._num_samples): reference}
        self._segments: dict[tuple[int, int, bool], Segment] = {}
        super().__init__(
            ModelSpec(
                _make_blocks(reference, self._num_samples),
                list_params(model),
                _value_specs(reference, self._num_samples),
            ),
            uses_rng=any(is_random_op(node) for node in reference.order),
        )

    def split_trace(self, *, training: bool, num_samples: int | None = None) -> SplitTrace:
        """Return the split trace for a mode and a batch size, by default the example's."""
        key = (training, self._num_samples if num_samples is None else num_samples)
        if key not in self._split_traces:
            traced = export_graph(self.model, self._resize_example(key[1]), training=training)
            trace = split_trace(traced, self.model, self._dims, self._split_points)
            if trace.structure != self._structure:
                mode = "training" if training else "evaluation"
                raise PlanError(
                    f"the model has other layers in {mode} with {key[1]} samples than in training with "
                    f"{self._num_samples}; its modules must run in the same order for all its batches; "
                    "move what differs into a module, or use a strategy that keeps the model whole (data, zero, server)"
                )
            self._split_traces[key] = trace
        return self._split_traces[key]

    def _resize_example(self, batch_size: int) -> Inputs:
        """Return the example with another batch size, repeating its samples."""
        indices = torch.arange(batch_size) % self._num_samples

        def resize(leaf: Any) -> Any:  # noqa: ANN401
            has_samples = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == self._num_samples
            return leaf[indices.to(leaf.device)] if has_samples else leaf

        return self._example_inputs if batch_size == self._num_samples else tree_map(resize, self._example_inputs)

    def segment(self, first_layer: int, stop_layer: int, *, training: bool) -> Segment:
        """Return the layers as one function, which traces the model again for a new batch size."""
        key = (first_layer, stop_layer, training)
        if key not in self._segments:
            self._segments[key] = self._build_segment(first_layer, stop_layer, training=training)
        return self._segments[key]

    def _build_segment(self, first_layer: int, stop_layer: int, *, training: bool) -> Segment:
        trace = self.split_trace(training=training)
        built = build_segment(trace, first_layer, stop_layer)
        functions = {_shapes(map(fake_value, built.inputs)): built.function}
        params, buffers = built.params, built.buffers

        def run(
            values: Sequence[Tensor], tensors: Mapping[str, Tensor], buffer_tensors: Mapping[str, Tensor], seed: SeedFn
        ) -> tuple[Tensor, ...]:
            """Run the layers; they are built again for new shapes."""
            key = _shapes(values)
            if key not in functions:
                functions[key] = self._rebuild(built, values, (first_layer, stop_layer), training=training).function
            function = functions[key]
            return function(
                seed, *values, *[tensors[name] for name in params], *[buffer_tensors[name] for name in buffers]
            )

        pair = trace.pairs.get(first_layer) if stop_layer == first_layer + 1 else None
        inputs, outputs = trace.inputs_of(first_layer, stop_layer), trace.outputs_of(first_layer, stop_layer)
        return Segment(
            inputs,
            outputs,
            params,
            buffers,
            run,
            tuple(index for index in inputs if pair and trace.boundary_values[index].node is pair.source),
            tuple(index for index in outputs if pair and trace.boundary_values[index].node is pair.row),
        )

    def _rebuild(
        self, known: BuiltSegment, values: Sequence[Tensor], layers: tuple[int, int], *, training: bool
    ) -> BuiltSegment:
        """Build the same layers for another batch size, which the values show."""
        sizes = [
            (value.numel(), int(fake_value(node).numel())) for value, node in zip(values, known.inputs, strict=True)
        ]
        batch_size = next(
            (new * self._num_samples // old for new, old in sizes if new != old and old), self._num_samples
        )
        built = build_segment(self.split_trace(training=training, num_samples=batch_size), *layers)
        if _value_routes(self.split_trace(training=training, num_samples=batch_size)) != _value_routes(
            self.split_trace(training=training)
        ):
            names = ({node.name for node in (*segment.inputs, *segment.outputs)} for segment in (known, built))
            differing = ", ".join(sorted(set.symmetric_difference(*names)))
            raise PlanError(
                f"for {batch_size} samples the model passes other values between layers than for {self._num_samples}: "
                f"{differing}; between batches only the number of samples may differ; have forward do the same "
                "for every number"
            )
        expected = tuple(map(fake_value, built.inputs))
        if _shapes(expected) != _shapes(values):
            pairs = zip(known.inputs, values, expected, strict=True)
            name, actual, expected_shape = next((n.name, v.shape, e.shape) for n, v, e in pairs if v.shape != e.shape)
            raise PlanError(
                f"value '{name}' has shape {tuple(actual)}, but for {batch_size} samples the model was traced with "
                f"{tuple(expected_shape)}; between batches only the number of samples may differ; pad the other dims "
                "to one size, or partition the model again for this size"
            )
        return built

    def values(self, *, training: bool) -> tuple[ValueSpec, ...]:
        """Return the values passed between layers."""
        return _value_specs(self.split_trace(training=training), self._num_samples)

    def flatten_inputs(self, inputs: Inputs, *, training: bool = True) -> tuple[Tensor, ...]:
        """Return the input tensors that the forward reads.

        Raises:
            DataError: a value that is no tensor differs from the one that the model was traced with.
        """
        trace = self.split_trace(training=training)
        if not self._has_only_tensors:
            require_unchanged_leaves(split_call_args(self._example_inputs), split_call_args(inputs))
        leaves = dict(zip(trace.traced.inputs, tree_leaves(split_call_args(inputs)), strict=True))
        return tuple(leaves[value.node] for value in trace.boundary_values if value.producer == INPUT)

    def unflatten_output(self, values: Sequence[Tensor], *, training: bool = True) -> Any:  # noqa: ANN401
        """Return the output as the model returns it in this mode."""
        return self.split_trace(training=training).traced.output_tree.unflatten(values)


def _value_routes(split_trace: SplitTrace) -> list[tuple[int, tuple[int, ...]]]:
    """Return the producer and the consumers of each value."""
    return [(value.producer, value.consumers) for value in split_trace.boundary_values]


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


def _shapes(values: Any) -> tuple[torch.Size, ...]:  # noqa: ANN401
    return tuple([value.shape for value in values])


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
    names = dict.fromkeys(params[source] for node in nodes for source in node.all_input_nodes if source in params)
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
    params = split_trace.traced.params
    sharded_dims = [(params[source], 0) for column in pair.columns for source in column.all_input_nodes[1:]]
    sharded_dims += [(params[pair.row.all_input_nodes[1]], 1)]
    return TensorParallelSpec(
        dim=pair.dim,
        sharded_dims=tuple(sharded_dims),
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
