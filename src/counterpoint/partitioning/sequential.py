"""An ``nn.Sequential`` as blocks of its children: run eagerly, whatever their code does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from counterpoint.errors import PlanError
from counterpoint.model.dataflow import INPUT, ValueSpec
from counterpoint.model.spec import Block, LayerSpec, ModelSpec
from counterpoint.partitioning.dry_run import Inputs, TrainingModes, num_samples, preserve_state, split_call_args
from counterpoint.partitioning.flop_counter import FlopCounter
from counterpoint.partitioning.partitioned_model import (
    PartitionedModel,
    SeedFn,
    Segment,
    canonical_names,
    list_params,
    num_bytes,
)
from counterpoint.partitioning.pytree import TensorTree, build_tensor_tree
from counterpoint.partitioning.seed_hooks import SeedHooks, is_plain_sequential, iter_children, no_seed


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Where a module keeps a tensor that is passed in for a call.

    Args:
        owner: the module's own table of parameters or buffers.
        key: the tensor's place in that table.
        name: the tensor's first name in the whole model.
    """

    owner: dict[str, Tensor | None]
    key: str
    name: str


@dataclass(frozen=True, slots=True)
class SequentialChild:
    """One child of the chain.

    Args:
        path: the child's path.
        module: the child.
        params: the slots of its parameters.
        buffers: the slots of its buffers.
        recurrent: layers inside that keep a second list of their parameters.
    """

    path: str
    module: nn.Module
    param_slots: tuple[TensorSlot, ...]
    buffer_slots: tuple[TensorSlot, ...]
    rnn_layers: tuple[nn.RNNBase, ...]


@dataclass(frozen=True, slots=True)
class LayerBoundary:
    """What is known of the place before a piece, or behind the last.

    Args:
        nest: how the values are nested into the one that a chain passes on.
        num_calls: how often each seeded module was called before, in one forward.
        sizes: bytes per sample of each value, and whether it is of floating point.
        sample_bytes: bytes per sample of all of them.
    """

    tree: TensorTree
    num_calls: dict[str, int]
    sizes: tuple[tuple[int, bool], ...]
    sample_bytes: int


class SequentialPartition(PartitionedModel):
    """A ``Sequential`` cut between its children, nested ones included; nothing is traced.

    A child without parameters belongs to the block before it. The model is run once here to see its values.

    Args:
        model: a Sequential that has the forward of ``nn.Sequential``.
        inputs: an example of what it is called with.
        cuts: paths of children, nested ones included, with which a block begins whatever they hold.
    """

    def __init__(self, model: nn.Module, inputs: Inputs, *, split_points: Sequence[str] = ()) -> None:
        if not is_plain_sequential(model):
            raise PlanError(
                f"{type(model).__name__} is not a chain of its children; a chain is an nn.Sequential with its own "
                "forward and without hooks; use GraphCut, which traces the model"
            )
        self.model = model
        self._training_modes = TrainingModes(model)
        self._layers = _group_into_layers(model, split_points)
        self._example_inputs = inputs
        self._boundaries: dict[bool, tuple[LayerBoundary, ...]] = {}
        self._segments: dict[tuple[int, int, bool], Segment] = {}
        self._seed_hooks: SeedHooks | None = None
        seams, costs, draws = self._run_once(training=True)
        self._boundaries[True] = seams
        self._seed_hooks = SeedHooks(model, no_seed) if draws else None
        starts = _paths_starting_at(model)
        blocks = tuple(
            Block(
                (
                    LayerSpec(
                        _layer_name(links),
                        _layer_params(links),
                        cost,
                        seam.sample_bytes,
                        modules_started=starts[links[0].path],
                    ),
                ),
                index,
            )
            for index, (links, cost, seam) in enumerate(zip(self._layers, costs, seams[1:], strict=True))
        )
        super().__init__(ModelSpec(blocks, list_params(model), _value_specs(seams)), uses_rng=draws)

    def _run_once(self, *, training: bool) -> tuple[tuple[LayerBoundary, ...], list[float], bool]:
        """Run the chain once; return its seams, the work of each piece per sample, and whether it draws."""
        (value,), _ = split_call_args(self._example_inputs)
        samples = num_samples(value)
        seeding = SeedHooks(self.model, no_seed)
        seams, costs, total = [_make_boundary(value, seeding, samples)], [], 0
        with preserve_state(self.model, training=training), FlopCounter() as meter:
            for links in self._layers:
                for link in links:
                    value = link.module(value)
                seams.append(_make_boundary(value, seeding, samples))
                costs.append((meter.flops - total) / samples)
                total = meter.flops
        seeding.remove()
        return tuple(seams), costs, meter.uses_rng

    def _boundaries_for(self, *, training: bool) -> tuple[LayerBoundary, ...]:
        if training not in self._boundaries:
            self._boundaries[training] = self._run_once(training=training)[0]
        return self._boundaries[training]

    def segment(self, first_layer: int, stop_layer: int, *, training: bool) -> Segment:
        """Return the children of the pieces as one function."""
        key = (first_layer, stop_layer, training)
        if key not in self._segments:
            self._segments[key] = self._build_segment(first_layer, stop_layer, training=training)
        return self._segments[key]

    def _build_segment(self, first_layer: int, stop_layer: int, *, training: bool) -> Segment:
        seams = self._boundaries_for(training=training)
        before, behind = seams[first_layer], seams[stop_layer]
        links = tuple(link for piece in self._layers[first_layer:stop_layer] for link in piece)
        param_slots = tuple(slot for link in links for slot in link.param_slots)
        buffer_slots = tuple(slot for link in links for slot in link.buffer_slots)
        recurrent = tuple(layer for link in links for layer in link.rnn_layers)
        modules = tuple(link.module for link in links)
        model, seeding, modes = self.model, self._seed_hooks, self._training_modes

        def run(
            values: Sequence[Tensor], params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], seed: SeedFn
        ) -> tuple[Tensor, ...]:
            """Run the modules with these parameters and buffers in place of their own, which are back afterwards."""
            if model.training is not training:
                modes.set(training=training)
            if seeding is not None:
                seeding.seed = seed
                seeding.call_paths.num_calls = dict(before.num_calls)
                if first_layer == 0:
                    seed(seeding.call_paths.next(""))
            own = _swap_in_tensors(param_slots, params), _swap_in_tensors(buffer_slots, buffers)
            _refresh_flat_weights(recurrent)
            try:
                value = before.tree.unflatten(values)
                for module in modules:
                    value = module(value)
            finally:
                _restore_tensors(param_slots, own[0])
                _restore_tensors(buffer_slots, own[1])
                _refresh_flat_weights(recurrent)
            return behind.tree.flatten(value)

        names = [tuple(dict.fromkeys(slot.name for slot in slots)) for slots in (param_slots, buffer_slots)]
        ends = [sum(len(seam.sizes) for seam in seams[:piece]) for piece in range(len(seams))]
        taken = tuple(range(ends[first_layer], ends[first_layer] + len(before.sizes)))
        given = tuple(range(ends[stop_layer], ends[stop_layer] + len(behind.sizes)))
        return Segment(taken, given if stop_layer < len(self._layers) else (), names[0], names[1], run)

    def values(self, *, training: bool) -> tuple[ValueSpec, ...]:
        """Return what the children of each piece hand on to the next one."""
        return _value_specs(self._boundaries_for(training=training))

    def flatten_inputs(self, inputs: Inputs, *, training: bool = True) -> tuple[Tensor, ...]:
        """Return the tensors of the one input."""
        (value,), _ = split_call_args(inputs)
        return self._boundaries_for(training=training)[0].tree.flatten(value)

    def unflatten_output(self, values: Sequence[Tensor], *, training: bool = True) -> Any:  # noqa: ANN401
        """Return what the last child gives."""
        return self._boundaries_for(training=training)[-1].tree.unflatten(values)


def _iter_leaf_children(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the children of a chain in the order they run, nested chains opened."""
    for name, child in iter_children(module):
        inner = f"{path}.{name}" if path else name
        if is_plain_sequential(child):
            yield from _iter_leaf_children(child, inner)
        else:
            yield inner, child


def splittable_modules(model: nn.Module) -> set[str]:
    """Return the paths at which a Sequential can be cut: those of its children, nested ones included."""
    return {place for places in _paths_starting_at(model).values() for place in places}


def _paths_starting_at(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return for each child of the chain the paths that begin with it: its own, and of chains around it."""
    starts: dict[str, tuple[str, ...]] = {}
    seen: set[str] = set()
    for path, _ in _iter_leaf_children(model):
        names = path.split(".")
        around = (".".join(names[:depth]) for depth in range(1, len(names) + 1))
        starts[path] = tuple(place for place in around if place not in seen)
        seen.update(starts[path])
    return starts


def _group_into_layers(model: nn.Module, split_points: Sequence[str]) -> tuple[tuple[SequentialChild, ...], ...]:
    """Return the children in runs that each begin with a child that has parameters, or is named among the cuts."""
    starts = _paths_starting_at(model)
    names = canonical_names(model)
    runs: list[list[SequentialChild]] = []
    for path, module in _iter_leaf_children(model):
        link = _make_child(path, module, names)
        is_named = any(place in split_points for place in starts[path])
        if not runs or is_named or (link.param_slots and any(earlier.param_slots for earlier in runs[-1])):
            runs.append([])
        runs[-1].append(link)
    return tuple(tuple(run) for run in runs)


def _make_child(path: str, module: nn.Module, names: Mapping[str, str]) -> SequentialChild:
    tables: dict[str, list[TensorSlot]] = {"_parameters": [], "_buffers": []}
    for inner, owner in module.named_modules(prefix=path):
        for table, slots in tables.items():
            own = vars(owner)[table]
            slots += [TensorSlot(own, key, names[f"{inner}.{key}"]) for key, value in own.items() if value is not None]
    recurrent = tuple(layer for layer in module.modules() if isinstance(layer, nn.RNNBase))
    return SequentialChild(path, module, tuple(tables["_parameters"]), tuple(tables["_buffers"]), recurrent)


def _layer_name(children: Sequence[SequentialChild]) -> str:
    owners = [link.path for link in children if link.param_slots] or [children[0].path]
    return owners[0] if len(owners) == 1 else f"{owners[0]}..{owners[-1]}"


def _layer_params(children: Sequence[SequentialChild]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(slot.name for link in children for slot in link.param_slots))


def _make_boundary(value: Any, seed_hooks: SeedHooks, samples: int) -> LayerBoundary:  # noqa: ANN401
    nest = build_tensor_tree(value)
    tensors = nest.flatten(value)
    sizes = tuple((num_bytes([tensor]) // samples, tensor.is_floating_point()) for tensor in tensors)
    return LayerBoundary(nest, dict(seed_hooks.call_paths.num_calls), sizes, num_bytes(tensors) // samples)


def _value_specs(boundaries: Sequence[LayerBoundary]) -> tuple[ValueSpec, ...]:
    """Return what each piece makes for the next one; what the last one makes is the output."""
    return tuple(
        ValueSpec(maker, (maker + 1,), size, is_float)
        for maker, seam in enumerate(boundaries[:-1], INPUT)
        for size, is_float in seam.sizes
    )


def _swap_in_tensors(slots: Sequence[TensorSlot], tensors: Mapping[str, Tensor]) -> list[Tensor | None]:
    """Put the tensors into their slots; return what was there."""
    own = [slot.owner[slot.key] for slot in slots]
    for slot in slots:
        slot.owner[slot.key] = tensors[slot.name]
    return own


def _restore_tensors(slots: Sequence[TensorSlot], own: Sequence[Tensor | None]) -> None:
    for slot, tensor in zip(slots, own, strict=True):
        slot.owner[slot.key] = tensor


def _refresh_flat_weights(layers: Sequence[nn.RNNBase]) -> None:
    """Have recurrent layers use the parameters that are in their slots now."""
    for layer in layers:
        table = vars(layer)
        table["_flat_weights"] = [table["_parameters"][name] for name in table["_flat_weights_names"]]
