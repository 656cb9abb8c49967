"""Any traceable model as pieces: the graph of its forward, cut where few values are alive."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from counterpoint.cutting.build import Built, build
from counterpoint.cutting.cost import Meter
from counterpoint.cutting.cut import Cut, Seed, Segment, num_bytes, params_of
from counterpoint.cutting.eager import Inputs, call_of, num_samples
from counterpoint.cutting.handing import learned_in
from counterpoint.cutting.layout import Layout, Prefer, choose_keys, lay_out
from counterpoint.cutting.ops import draws_random, is_kernel, is_tensor, value_of
from counterpoint.cutting.places import spans_of
from counterpoint.cutting.regions import Dims, Region, from_to
from counterpoint.cutting.trace import calls_of, path_of, trace
from counterpoint.errors import PlanError
from counterpoint.model.spec import Block, ModelSpec, Piece, Split
from counterpoint.model.values import INPUT, Made


class GraphCut(Cut):
    """A model cut along the operations of its forward; it refers to the model but to no copy of its values.

    It is traced once per mode and per number of samples, when first needed; nothing but the number of samples may
    differ between batches.

    Args:
        model: a module whose forward can be traced.
        inputs: an example of what it is called with; the first dim of its tensors is the sample.
        dims: names for the dims of linear layers, by pattern of module path.
        cuts: paths of modules with which a block begins wherever else the model is cut.
        prefer: whether a linear pair that reaches over the end of a block stays whole or is not taken as one.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Inputs,
        *,
        dims: Dims | None = None,
        cuts: Sequence[str] = (),
        prefer: Prefer = "blocks",
    ) -> None:
        self.model = model
        self._inputs = inputs
        self._samples = num_samples(inputs)
        self._dims = dims or {}
        traced = trace(model, inputs, training=True)
        self._keys = choose_keys(traced, model, self._dims, prefer, cuts)
        reference = lay_out(traced, model, self._dims, self._keys)
        self._outline = reference.outline
        self._layouts = {(True, self._samples): reference}
        self._segments: dict[tuple[int, int, bool], Segment] = {}
        super().__init__(
            ModelSpec(_blocks(reference, self._samples), params_of(model), _values(reference, self._samples)),
            draws=any(draws_random(node) for node in reference.order),
        )

    def layout(self, *, training: bool, samples: int | None = None) -> Layout:
        """Return the trace for a mode and a number of samples, by default the example's."""
        key = (training, self._samples if samples is None else samples)
        if key not in self._layouts:
            traced = trace(self.model, self._example(key[1]), training=training)
            layout = lay_out(traced, self.model, self._dims, self._keys)
            if layout.outline != self._outline:
                mode = "training" if training else "evaluation"
                raise PlanError(
                    f"the model has other pieces in {mode} with {key[1]} samples than in training with "
                    f"{self._samples}; its parts must follow one another in the same way for all its batches; "
                    "move what differs into a module, or use a strategy that needs no cut (data, zero, server)"
                )
            self._layouts[key] = layout
        return self._layouts[key]

    def _example(self, samples: int) -> Inputs:
        """Return the example with another number of samples."""
        rows = torch.arange(samples) % self._samples

        def resized(leaf: Any) -> Any:  # noqa: ANN401
            has_samples = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == self._samples
            return leaf[rows.to(leaf.device)] if has_samples else leaf

        return self._inputs if samples == self._samples else tree_map(resized, self._inputs)

    def segment(self, first_piece: int, stop_piece: int, *, training: bool) -> Segment:
        """Return the pieces as one function, which traces the model again when the number of samples is new."""
        key = (first_piece, stop_piece, training)
        if key not in self._segments:
            self._segments[key] = self._make(first_piece, stop_piece, training=training)
        return self._segments[key]

    def _make(self, first_piece: int, stop_piece: int, *, training: bool) -> Segment:
        layout = self.layout(training=training)
        built = build(layout, first_piece, stop_piece)
        functions = {_shapes(map(value_of, built.inputs)): built.function}
        params, buffers = built.params, built.buffers

        def run(
            values: Sequence[Tensor], own: Mapping[str, Tensor], state: Mapping[str, Tensor], seed: Seed
        ) -> tuple[Tensor, ...]:
            """Run the part, which is built anew for shapes that it has not seen."""
            key = _shapes(values)
            if key not in functions:
                functions[key] = self._rebuild(built, values, (first_piece, stop_piece), training=training).function
            function = functions[key]
            return function(seed, *values, *[own[name] for name in params], *[state[name] for name in buffers])

        region = layout.regions.get(first_piece) if stop_piece == first_piece + 1 else None
        taken, given = layout.taken(first_piece, stop_piece), layout.given(first_piece, stop_piece)
        return Segment(
            taken,
            given,
            params,
            buffers,
            run,
            tuple(place for place in taken if region and layout.handed[place].node is region.source),
            tuple(place for place in given if region and layout.handed[place].node is region.row),
        )

    def _rebuild(self, known: Built, values: Sequence[Tensor], pieces: tuple[int, int], *, training: bool) -> Built:
        """Return the same pieces for another number of samples, which the values tell."""
        sizes = [(value.numel(), int(value_of(node).numel())) for value, node in zip(values, known.inputs, strict=True)]
        samples = next((new * self._samples // old for new, old in sizes if new != old and old), self._samples)
        built = build(self.layout(training=training, samples=samples), *pieces)
        if _structure(self.layout(training=training, samples=samples)) != _structure(self.layout(training=training)):
            names = ({node.name for node in (*one.inputs, *one.outputs)} for one in (known, built))
            differing = ", ".join(sorted(set.symmetric_difference(*names)))
            raise PlanError(
                f"for {samples} samples the model hands on other values than for {self._samples}: {differing}; between "
                "batches only the number of samples may differ; have forward do the same whatever that number is"
            )
        expected = tuple(map(value_of, built.inputs))
        if _shapes(expected) != _shapes(values):
            pairs = zip(known.inputs, values, expected, strict=True)
            name, got, want = next((n.name, v.shape, e.shape) for n, v, e in pairs if v.shape != e.shape)
            raise PlanError(
                f"value '{name}' has shape {tuple(got)}, but for {samples} samples the model was traced with "
                f"{tuple(want)}; between batches only the number of samples may differ; pad the other dims to one "
                "size, or cut the model again for this size"
            )
        return built

    def values(self, *, training: bool) -> tuple[Made, ...]:
        """Return what pieces make for later ones."""
        return _values(self.layout(training=training), self._samples)

    def flatten_inputs(self, inputs: Inputs, *, training: bool = True) -> tuple[Tensor, ...]:
        """Return the tensors among the inputs that the forward reads."""
        layout = self.layout(training=training)
        leaves = dict(zip(layout.traced.inputs, tree_leaves(call_of(inputs)), strict=True))
        return tuple(leaves[value.node] for value in layout.handed if value.maker == INPUT)

    def unflatten_output(self, values: Sequence[Tensor], *, training: bool = True) -> Any:  # noqa: ANN401
        """Return the output as the model gives it in this mode."""
        return self.layout(training=training).traced.nest.unflatten(values)


def _structure(layout: Layout) -> list[tuple[int, tuple[int, ...]]]:
    """Return who makes and who reads each value."""
    return [(value.maker, value.readers) for value in layout.handed]


def _made(layout: Layout, index: int) -> Sequence[fx.Node]:
    """Return what a piece makes for later ones, or of the output if it is the last one."""
    if index == layout.num_pieces - 1:
        return layout.traced.outputs
    return [value.node for value in layout.handed if value.maker == index]


def _values(layout: Layout, samples: int) -> tuple[Made, ...]:
    learned = learned_in(layout.traced, layout.flow)
    return tuple(
        Made(value.maker, value.readers, _bytes([value.node]) // samples, value.node in learned)
        for value in layout.handed
    )


def _shapes(values: Any) -> tuple[torch.Size, ...]:  # noqa: ANN401
    return tuple([value.shape for value in values])


def _blocks(layout: Layout, samples: int) -> tuple[Block, ...]:
    """Return the blocks of a layout with their pieces."""
    starts: dict[int, list[str]] = {}
    for path, (first, _) in spans_of(layout.order)[0].items():
        starts.setdefault(first, []).append(path)
    pieces = tuple(
        replace(_piece(layout, index, samples), starts=tuple(filter(None, starts.get(layout.starts[index], ()))))
        for index in range(layout.num_pieces)
    )
    firsts = [layout.starts.index(start) for start in layout.block_starts]
    return tuple(
        Block(pieces[first:stop], first) for first, stop in zip(firsts, [*firsts[1:], layout.num_pieces], strict=True)
    )


def _piece(layout: Layout, index: int, samples: int) -> Piece:
    first, stop = layout.span(index, index + 1)
    nodes, params = layout.order[first:stop], layout.traced.params
    names = dict.fromkeys(params[source] for node in nodes for source in node.all_input_nodes if source in params)
    region = layout.regions.get(index)
    return Piece(
        name=region.name if region else _name(layout, index),
        params=tuple(names),
        cost=_flops(layout, nodes) / samples,
        output_bytes=_bytes(_made(layout, index)) // samples,
        split=_split(region, layout, samples) if region else None,
        may_begin=first in layout.inner_starts,
    )


def _name(layout: Layout, index: int) -> str:
    """Return the path of the module that a piece is, or of the first and the last in it."""
    first, stop = layout.span(index, index + 1)
    nodes = layout.order[first:stop]
    spans, _ = spans_of(layout.order)
    whole = [path for path, _ in calls_of(nodes[0]) if path and spans[path] == (first, stop)]
    if whole:
        return whole[0]
    params = layout.traced.params
    owners = [path_of(node) for node in nodes if any(source in params for source in node.all_input_nodes)]
    inner = [path for path in owners or map(path_of, nodes) if path]
    return from_to(inner[0], inner[-1]) if inner else "root"


def _split(region: Region, layout: Layout, samples: int) -> Split:
    params = layout.traced.params
    slices = [(params[source], 0) for column in region.columns for source in column.all_input_nodes[1:]]
    slices += [(params[region.row.all_input_nodes[1]], 1)]
    return Split(
        dim=region.dim,
        slices=tuple(slices),
        size=region.size,
        output_bytes=_bytes([region.row]) // samples,
        input_bytes=_bytes([region.source]) // samples,
    )


def _bytes(nodes: Sequence[fx.Node]) -> int:
    return num_bytes([value_of(node) for node in nodes if is_tensor(node)])


def _flops(layout: Layout, nodes: Sequence[fx.Node]) -> int:
    """Count the work of some operations, on the trace's tensors without values."""
    total = 0
    for node in nodes:
        if "bias_of" in node.meta:  # a layer's bias is part of its matmul, as everywhere
            continue
        values: list[Any] = [leaf for leaf in tree_leaves(value_of(node)) if isinstance(leaf, Tensor)]
        if not is_kernel(node) or not values:
            total += 0 if node.target is operator.getitem else sum(value.numel() for value in values)
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: value_of(n))
        with torch.no_grad(), values[0].fake_mode, Meter() as meter:
            operation: Any = node.target
            operation(*args, **kwargs)
        total += meter.flops
    return total
