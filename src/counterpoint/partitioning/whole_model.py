"""Run a model unpartitioned: one block that calls it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from counterpoint.errors import PlanError
from counterpoint.model.dataflow import INPUT, ValueSpec
from counterpoint.model.spec import Block, LayerSpec, ModelSpec
from counterpoint.partitioning.dry_run import (
    BufferSlots,
    Inputs,
    KeptValues,
    TrainingModes,
    num_samples,
    preserve_state,
    split_call_args,
)
from counterpoint.partitioning.flop_counter import FlopCounter
from counterpoint.partitioning.input_shapes import InputShapes
from counterpoint.partitioning.partitioned_model import (
    FlatInputs,
    PartitionedModel,
    SeedFn,
    Segment,
    list_params,
    num_bytes,
)
from counterpoint.partitioning.pytree import TensorTree, build_output_tree, build_tensor_tree
from counterpoint.partitioning.seed_hooks import SeedHooks, no_seed
from counterpoint.partitioning.segment_compiler import SegmentCompiler, call_module


@dataclass(frozen=True, slots=True)
class ExampleForward:
    """What a forward on the example inputs shows of a model, and of every copy of it.

    Attributes:
        flops: of the forward.
        uses_rng: whether it draws random numbers.
        replaced_buffers: the buffers that it replaces by other tensors, by their full names.
        kept_attributes: in which it keeps differentiable values.
        output_tree: of the output in training.
        output_bytes: of its tensors.
    """

    flops: int
    uses_rng: bool
    replaced_buffers: frozenset[str]
    kept_attributes: tuple[str, ...]
    output_tree: TensorTree
    output_bytes: int


def run_example(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ExampleForward:
    """Run the model once in training; its state is preserved."""
    kept_values, buffer_slots = KeptValues(model), BufferSlots(model)
    with (
        preserve_state(model),
        torch.enable_grad(),  # for a forward that differentiates
        FlopCounter() as counter,
    ):
        output = model(*args, **kwargs)
        buffer_slots.find_replaced()
        kept_values.find()
    kept_values.restore()
    tree = build_output_tree(output)
    return ExampleForward(
        counter.flops,
        counter.uses_rng,
        frozenset(buffer_slots.replaced),
        tuple(kept_values.names),
        tree,
        num_bytes(tree.flatten(output)),
    )


class WholeModel(PartitionedModel):
    """The model as one block ``model``, run with its own parameters: those passed to a call are ignored.

    So each rank of a process needs its own copy of the model. The model is run once here to count its FLOPs.

    Args:
        model: any module.
        inputs: example arguments of its forward.
        example: a forward on these inputs of the model that this one is a copy of; None runs the model.
        compiler: compiles the call of the model; None to run it eagerly.

    Attributes:
        example: the forward on the example inputs.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Inputs,
        example: ExampleForward | None = None,
        *,
        compiler: SegmentCompiler | None = None,
    ) -> None:
        self._inputs = inputs
        self._args, self._kwargs = split_call_args(inputs)
        self.example = example = example or run_example(model, self._args, self._kwargs)
        self._buffer_slots = BufferSlots(model)
        self._buffer_slots.replaced.update(example.replaced_buffers)
        batch_size = num_samples(inputs)
        params = list_params(model)
        layer = LayerSpec(
            "model",
            tuple(param.name for param in params),
            cost=example.flops / batch_size,
            output_bytes=example.output_bytes // batch_size,
        )
        self._call_tree = build_tensor_tree((self._args, self._kwargs))
        self._values = (ValueSpec(INPUT, (0,)),) * len(self._call_tree.tensor_indices)
        super().__init__(
            ModelSpec((Block((layer,), 0),), params, self._values), uses_rng=example.uses_rng, compiler=compiler
        )
        self.model = model
        self._training_modes = TrainingModes(model)
        self._seed_hooks = SeedHooks(model, no_seed) if example.uses_rng and compiler is None else None
        self._has_only_tensor_args = not self._kwargs and all(isinstance(arg, Tensor) for arg in self._args)
        self._output_trees = {True: example.output_tree}
        self._segments: dict[bool, Segment] = {}

    def of_copy(self, model: nn.Module) -> WholeModel:
        """Return the partition of a deep copy of the model, which is not run: it would show the same."""
        return WholeModel(model, self._inputs, self.example, compiler=self.compiler)

    def segment(self, first_layer: int, stop_layer: int, *, training: bool) -> Segment:
        """Return the call of the model; there is only one layer."""
        if (first_layer, stop_layer) != (0, 1):
            raise PlanError(
                f"layers {first_layer} to {stop_layer} of an unpartitioned model, which has only layer 0; "
                "ask for segment(0, 1), or partition the model with granularity='blocks'"
            )
        if training not in self._segments:
            self._segments[training] = self._build_segment(training=training)
        return self._segments[training]

    def _build_segment(self, *, training: bool) -> Segment:
        model, seed_hooks = self.model, self._seed_hooks
        modes, compiled = self._training_modes, None
        if self.compiler is not None:
            compiled = self.compiler.compile(call_module, f"training={training}")

        def run(
            values: Sequence[Tensor],
            params: Mapping[str, Tensor],
            buffers: Mapping[str, Tensor],
            seed: SeedFn,
            input_shapes: InputShapes,
        ) -> tuple[Tensor, ...]:
            """Run the whole model with its own parameters and buffers; those that are passed are ignored."""
            if model.training is not training:
                modes.set(training=training)
            if seed_hooks is not None:
                seed_hooks.begin_forward(seed)
            self._buffer_slots.register_copies()
            args, kwargs = (values, {}) if self._has_only_tensor_args else self._call_tree.unflatten(values)
            output = model(*args, **kwargs) if compiled is None else compiled(seed, model, args, kwargs)
            self._buffer_slots.adopt()
            self._output_trees[training] = output_tree = build_output_tree(output)  # its other values are this call's
            return output_tree.flatten(output)

        return Segment(
            inputs=tuple(range(len(self._values))),
            outputs=(),
            params=self.spec.layers[0].params,
            buffers=tuple(name for name, _ in model.named_buffers()),
            run=run,
            is_compiled=compiled is not None,
        )

    def _output_tree(self, *, training: bool) -> TensorTree:
        if training not in self._output_trees:
            with preserve_state(self.model, training=training):
                output = self.model(*self._args, **self._kwargs)
            self._output_trees[training] = build_output_tree(output)
        return self._output_trees[training]

    def values(self, *, training: bool) -> tuple[ValueSpec, ...]:
        """Return the inputs; there are no other values."""
        return self._values

    def flatten_inputs(self, inputs: Inputs, *, training: bool = True) -> FlatInputs:
        """Return the tensors among the inputs, however many; the next call of the model has their other values, too."""
        if self._has_only_tensor_args and type(inputs) is tuple and all(isinstance(arg, Tensor) for arg in inputs):
            return FlatInputs(inputs)
        call = split_call_args(inputs)
        self._call_tree, self._has_only_tensor_args = build_tensor_tree(call), False
        return FlatInputs(self._call_tree.flatten(call))

    def unflatten_output(
        self, values: Sequence[Tensor], *, training: bool = True, input_shapes: InputShapes = ()
    ) -> Any:  # noqa: ANN401
        """Return the output as the model returns it in this mode."""
        return self._output_tree(training=training).unflatten(values)
