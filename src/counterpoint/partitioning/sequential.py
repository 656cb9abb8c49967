"""Partition an ``nn.Sequential`` between its children, which run eagerly and may contain any code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from counterpoint.errors import PlanError
from counterpoint.model.dataflow import INPUT, ValueSpec
from counterpoint.model.spec import Block, LayerSpec, ModelSpec
from counterpoint.partitioning.dry_run import Inputs, TrainingModes, num_samples, preserve_state, split_call_args
from counterpoint.partitioning.flop_counter import FlopCounter
from counterpoint.partitioning.input_shapes import InputShapes
from counterpoint.partitioning.module_casts import find_cast_reads
from counterpoint.partitioning.partitioned_model import (
    FlatInputs,
    PartitionedModel,
    SeedFn,
    Segment,
    SwapInFn,
    canonical_names,
    list_params,
    num_bytes,
)
from counterpoint.partitioning.pytree import TensorTree, build_tensor_tree, require_unchanged_leaves
from counterpoint.partitioning.seed_hooks import SeedHooks, is_plain_sequential, iter_children, no_seed
from counterpoint.partitioning.segment_compiler import SegmentCompiler, call_in_order


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Where a module keeps a tensor that is passed in for a call.

    Args:
        owner: the module's own table of parameters or buffers.
        key: the tensor's key in that table.
        name: the tensor's first name in the whole model.
    """

    owner: dict[str, Tensor | None]
    key: str
    name: str


@dataclass(frozen=True, slots=True)
class SequentialChild:
    """One child of the Sequential; children of nested Sequentials count too.

    Args:
        path: the child's path.
        module: the child.
        param_slots: where its parameters are.
        buffer_slots: where its buffers are.
        rnn_layers: RNN modules inside, which keep a second list of their parameters.
    """

    path: str
    module: nn.Module
    param_slots: tuple[TensorSlot, ...]
    buffer_slots: tuple[TensorSlot, ...]
    rnn_layers: tuple[nn.RNNBase, ...]


@dataclass(frozen=True, slots=True)
class LayerBoundary:
    """What is known of the boundary before a layer, or after the last.

    Args:
        tree: how the tensors are nested in the one value that is passed on.
        num_calls: how often each seeded module was called before this boundary, in one forward.
        calls: the paths of the calls of seeded modules since the boundary before it, in order.
        sizes: bytes per sample of each tensor, and whether it is floating point.
        sample_bytes: bytes per sample of all of them.
    """

    tree: TensorTree
    num_calls: dict[str, int]
    calls: tuple[str, ...]
    sizes: tuple[tuple[int, bool], ...]
    sample_bytes: int


class SequentialPartition(PartitionedModel):
    """An ``nn.Sequential`` split between its children, nested ones included; nothing is traced.

    A child without parameters belongs to the block before it. The model is run once here to record its values.

    Args:
        model: a Sequential with the forward of ``nn.Sequential``.
        inputs: example arguments of its forward.
        split_points: paths of children, nested ones included, that start a block even without parameters.
        compiler: compiles the children of each segment together; None to run them eagerly.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Inputs,
        *,
        split_points: Sequence[str] = (),
        compiler: SegmentCompiler | None = None,
    ) -> None:
        if not is_plain_sequential(model):
            raise PlanError(
                f"{type(model).__name__} is not an nn.Sequential with its own forward and without hooks, so it cannot "
                "be split between its children; use TracedPartition, which traces the model"
            )
        self.model = model
        self._training_modes = TrainingModes(model)
        self._layers = _group_into_layers(model, split_points)
        self._example_inputs = inputs
        self._boundaries: dict[bool, tuple[LayerBoundary, ...]] = {}
        self._segments: dict[tuple[int, int, bool], Segment] = {}
        self._seed_hooks: SeedHooks | None = None
        boundaries, costs, uses_rng = self._run_once(training=True)
        self._boundaries[True] = boundaries
        self._seed_hooks = SeedHooks(model, no_seed) if uses_rng and compiler is None else None
        starts = _paths_starting_at(model)
        blocks = tuple(
            Block(
                (
                    LayerSpec(
                        _layer_name(children),
                        _layer_params(children),
                        cost,
                        boundary.sample_bytes,
                        modules_started=starts[children[0].path],
                    ),
                ),
                index,
            )
            for index, (children, cost, boundary) in enumerate(zip(self._layers, costs, boundaries[1:], strict=True))
        )
        spec = ModelSpec(blocks, list_params(model), _value_specs(boundaries))
        super().__init__(spec, uses_rng=uses_rng, compiler=compiler)

    def _run_once(self, *, training: bool) -> tuple[tuple[LayerBoundary, ...], list[float], bool]:
        """Run the model once; return its boundaries, the FLOPs per sample of each layer, and whether it is random."""
        (value,), _ = split_call_args(self._example_inputs)
        batch_size = num_samples(value)
        calls: list[str] = []
        seed_hooks = SeedHooks(self.model, calls.append)
        boundaries, costs, total = [_make_boundary(value, seed_hooks, calls, batch_size)], [], 0
        with preserve_state(self.model, training=training), FlopCounter() as counter:
            for children in self._layers:
                for child in children:
                    value = child.module(value)
                boundaries.append(_make_boundary(value, seed_hooks, calls, batch_size))
                calls.clear()
                costs.append((counter.flops - total) / batch_size)
                total = counter.flops
        seed_hooks.remove()
        return tuple(boundaries), costs, counter.uses_rng

    def _boundaries_for(self, *, training: bool) -> tuple[LayerBoundary, ...]:
        if training not in self._boundaries:
            self._boundaries[training] = self._run_once(training=training)[0]
        return self._boundaries[training]

    def segment(self, first_layer: int, stop_layer: int, *, training: bool) -> Segment:
        """Return the children of the layers as one function."""
        key = (first_layer, stop_layer, training)
        if key not in self._segments:
            self._segments[key] = self._build_segment(first_layer, stop_layer, training=training)
        return self._segments[key]

    def _build_segment(self, first_layer: int, stop_layer: int, *, training: bool) -> Segment:
        boundaries = self._boundaries_for(training=training)
        before, after = boundaries[first_layer], boundaries[stop_layer]
        children = tuple(child for layer in self._layers[first_layer:stop_layer] for child in layer)
        modules = tuple(child.module for child in children)
        model, seed_hooks, modes = self.model, self._seed_hooks, self._training_modes
        compiled = None
        if self.compiler is not None:
            compiled = self.compiler.compile(call_in_order, "\n".join(map(repr, modules)))

        swap_in = _make_swap_in(children, seed_hooks)

        def run(
            values: Sequence[Tensor],
            params: Mapping[str, Tensor],
            buffers: Mapping[str, Tensor],
            seed: SeedFn,
            input_shapes: InputShapes,
        ) -> tuple[Tensor, ...]:
            """Run the modules with the given parameters and buffers."""
            if model.training is not training:
                modes.set(training=training)
            if seed_hooks is not None:
                seed_hooks.begin_forward(seed, before.num_calls)
                if first_layer == 0:
                    seed(seed_hooks.call_paths.next(""))
            with swap_in(params, buffers, seed):
                value = before.tree.unflatten(values)
                if compiled is not None:
                    value = compiled(seed, modules, value)
                else:
                    for module in modules:
                        value = module(value)
            return tuple(_copy_if_param(output, params) for output in after.tree.flatten(value))

        params, buffers = (
            tuple(dict.fromkeys(slot.name for child in children for slot in slots_of(child)))
            for slots_of in (attrgetter("param_slots"), attrgetter("buffer_slots"))
        )
        ends = [sum(len(boundary.sizes) for boundary in boundaries[:layer]) for layer in range(len(boundaries))]
        inputs = tuple(range(ends[first_layer], ends[first_layer] + len(before.sizes)))
        outputs = tuple(range(ends[stop_layer], ends[stop_layer] + len(after.sizes)))
        return Segment(
            inputs,
            outputs if stop_layer < len(self._layers) else (),
            params,
            buffers,
            run,
            swap_in=swap_in,
            is_compiled=self.compiler is not None,
            drawing_calls=tuple(call for end in boundaries[first_layer + 1 : stop_layer + 1] for call in end.calls),
        )

    def read_dtypes(self, *, training: bool) -> Mapping[str, torch.dtype]:
        """Return the parameters that children read as casts only, in the mode's first run and those before."""
        self._boundaries_for(training=training)
        return find_cast_reads(self.model, {id(param): name for name, param in self.model.named_parameters()})

    def values(self, *, training: bool) -> tuple[ValueSpec, ...]:
        """Return the tensors passed from each layer to the next."""
        return _value_specs(self._boundaries_for(training=training))

    def flatten_inputs(self, inputs: Inputs, *, training: bool = True) -> FlatInputs:
        """Return the tensors of the one input.

        Raises:
            DataError: a value in it that is not a tensor differs from that of the first batch.
        """
        (value,), _ = split_call_args(inputs)
        if not isinstance(value, Tensor):
            require_unchanged_leaves(split_call_args(self._example_inputs), split_call_args(inputs))
        return FlatInputs(self._boundaries_for(training=training)[0].tree.flatten(value))

    def unflatten_output(
        self, values: Sequence[Tensor], *, training: bool = True, input_shapes: InputShapes = ()
    ) -> Any:  # noqa: ANN401
        """Return the output of the last child."""
        return self._boundaries_for(training=training)[-1].tree.unflatten(values)


def _copy_if_param(output: Tensor, params: Mapping[str, Tensor]) -> Tensor:
    """Return an output; a copy of one that is a parameter, or shares its memory.

    Weights may be freed before the output is read, by a later module or by the loss.
    """
    if output._base is None and not output.is_leaf:  # noqa: SLF001 - that of a view
        return output
    storage = output.untyped_storage()._cdata  # noqa: SLF001 - its identity
    is_param = any(param.untyped_storage()._cdata == storage for param in params.values())  # noqa: SLF001 - as above
    return output.clone() if is_param else output


def _make_swap_in(children: Sequence[SequentialChild], seed_hooks: SeedHooks | None) -> SwapInFn:
    """Return what lets children have other parameters and buffers for a while, and draw from other seeds."""
    param_slots = tuple(slot for child in children for slot in child.param_slots)
    buffer_slots = tuple(slot for child in children for slot in child.buffer_slots)
    rnn_layers = tuple(layer for child in children for layer in child.rnn_layers)

    @contextmanager
    def swap_in(params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], seed: SeedFn) -> Iterator[None]:
        """Let the modules have these parameters and buffers inside, and restore their own afterwards."""
        if seed_hooks is not None:
            seed_hooks.seed = seed
        original = _swap_in_tensors(param_slots, params), _swap_in_tensors(buffer_slots, buffers)
        _refresh_flat_weights(rnn_layers)
        try:
            yield
        finally:
            _restore_tensors(param_slots, original[0])
            _restore_tensors(buffer_slots, original[1])
            _refresh_flat_weights(rnn_layers)

    return swap_in


def _iter_leaf_children(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the children in the order they run, descending into nested plain Sequentials."""
    for name, child in iter_children(module):
        child_path = f"{path}.{name}" if path else name
        if is_plain_sequential(child):
            yield from _iter_leaf_children(child, child_path)
        else:
            yield child_path, child


def opened_modules(model: nn.Module) -> set[str]:
    """Return the paths of the Sequentials whose children are called one by one: the model, and those inside it.

    Example:
        >>> sorted(opened_modules(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh(), nn.Linear(2, 2)))))
        ['', '1']
    """
    names = [path.split(".") for path, _ in _iter_leaf_children(model)]
    return {".".join(one[:depth]) for one in names for depth in range(len(one))}


def splittable_modules(model: nn.Module) -> set[str]:
    """Return the paths at which a Sequential can be split: those of its children, nested ones included."""
    return {path for paths in _paths_starting_at(model).values() for path in paths}


def _paths_starting_at(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Map each child to the paths that start with it: its own, and those of Sequentials around it."""
    starts: dict[str, tuple[str, ...]] = {}
    seen: set[str] = set()
    for path, _ in _iter_leaf_children(model):
        names = path.split(".")
        enclosing = (".".join(names[:depth]) for depth in range(1, len(names) + 1))
        starts[path] = tuple(candidate for candidate in enclosing if candidate not in seen)
        seen.update(starts[path])
    return starts


def _group_into_layers(model: nn.Module, split_points: Sequence[str]) -> tuple[tuple[SequentialChild, ...], ...]:
    """Group the children into layers; each starts at a child with parameters or at a split point."""
    starts = _paths_starting_at(model)
    names = canonical_names(model)
    layers: list[list[SequentialChild]] = []
    for path, module in _iter_leaf_children(model):
        child = _make_child(path, module, names)
        is_named = any(start in split_points for start in starts[path])
        if not layers or is_named or (child.param_slots and any(earlier.param_slots for earlier in layers[-1])):
            layers.append([])
        layers[-1].append(child)
    return tuple(tuple(layer) for layer in layers)


def _make_child(path: str, module: nn.Module, names: Mapping[str, str]) -> SequentialChild:
    tables: dict[str, list[TensorSlot]] = {"_parameters": [], "_buffers": []}
    for module_path, owner in module.named_modules(prefix=path):
        for table, slots in tables.items():
            table_tensors = vars(owner)[table]
            slots += [
                TensorSlot(table_tensors, key, names[f"{module_path}.{key}"])
                for key, value in table_tensors.items()
                if value is not None
            ]
    rnn_layers = tuple(layer for layer in module.modules() if isinstance(layer, nn.RNNBase))
    return SequentialChild(path, module, tuple(tables["_parameters"]), tuple(tables["_buffers"]), rnn_layers)


def _layer_name(children: Sequence[SequentialChild]) -> str:
    owners = [child.path for child in children if child.param_slots] or [children[0].path]
    return owners[0] if len(owners) == 1 else f"{owners[0]}..{owners[-1]}"


def _layer_params(children: Sequence[SequentialChild]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(slot.name for child in children for slot in child.param_slots))


def _make_boundary(value: Any, seed_hooks: SeedHooks, calls: Sequence[str], batch_size: int) -> LayerBoundary:  # noqa: ANN401
    tree = build_tensor_tree(value)
    tensors = tree.flatten(value)
    sizes = tuple((num_bytes([tensor]) // batch_size, tensor.is_floating_point()) for tensor in tensors)
    num_calls = dict(seed_hooks.call_paths.num_calls)
    return LayerBoundary(tree, num_calls, tuple(calls), sizes, num_bytes(tensors) // batch_size)


def _value_specs(boundaries: Sequence[LayerBoundary]) -> tuple[ValueSpec, ...]:
    """Return what each layer passes to the next; the last layer's result is the output, not a value."""
    return tuple(
        ValueSpec(producer, (producer + 1,), size, is_float)
        for producer, boundary in enumerate(boundaries[:-1], INPUT)
        for size, is_float in boundary.sizes
    )


def _swap_in_tensors(slots: Sequence[TensorSlot], tensors: Mapping[str, Tensor]) -> list[Tensor | None]:
    """Put the tensors into their slots; return the original ones."""
    original = [slot.owner[slot.key] for slot in slots]
    for slot in slots:
        slot.owner[slot.key] = tensors[slot.name]
    return original


def _restore_tensors(slots: Sequence[TensorSlot], original: Sequence[Tensor | None]) -> None:
    for slot, tensor in zip(slots, original, strict=True):
        slot.owner[slot.key] = tensor


def _refresh_flat_weights(layers: Sequence[nn.RNNBase]) -> None:
    """Make RNN modules use the parameters that are in their slots now (``_flat_weights`` caches them)."""
    for layer in layers:
        table = vars(layer)
        table["_flat_weights"] = [table["_parameters"][name] for name in table["_flat_weights_names"]]
