"""The interface of all partitionings: segments of a model that run separately, and the description strategies read.

Layers are the finest units of a partition; a segment is a run of consecutive layers. A segment takes the values that
its layers read and earlier ones produced (the model's own inputs among them) and returns those that later layers read.
Values are numbered by their index in :meth:`PartitionedModel.values`. The segment with the last layer returns the
model's output, flattened.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from counterpoint.model.dataflow import ValueSpec
from counterpoint.model.spec import ModelSpec, Param
from counterpoint.partitioning.input_shapes import InputShapes
from counterpoint.partitioning.segment_compiler import SegmentCompiler

SeedFn: TypeAlias = Callable[[str], None]
"""Set the random state for one call of the module at a path; in a compiled segment, the function mode of its graph."""

SegmentFn: TypeAlias = Callable[
    [Sequence[Tensor], Mapping[str, Tensor], Mapping[str, Tensor], SeedFn, InputShapes], tuple[Tensor, ...]
]

SwapInFn: TypeAlias = Callable[[Mapping[str, Tensor], Mapping[str, Tensor], SeedFn], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of layers as one function; it owns no parameter and keeps no state between calls.

    Args:
        inputs: indices of the values it takes; the model's own inputs come first.
        outputs: indices of the values it returns; empty for the last segment, which returns the model's output.
        params: names of the parameters it reads, as in ``model.named_parameters()``, so a tied one once.
        buffers: names of the buffers it reads or changes in place, as in ``model.named_buffers()``.
        run: the function itself.
        partial_inputs: inputs whose gradient must be summed over the tensor-parallel ranks.
        partial_outputs: outputs that must be summed over the tensor-parallel ranks.
        is_compiled: whether ``run`` calls a graph of ``torch.compile``; it does not seed then.
        drawing_calls: the paths of the module calls in it that may draw random numbers, in order; None if it is the
            whole model.
        parts: the segments that run one after the other in its place, each a graph of its own; none if it runs itself.
        swap_in: returns a context in which modules have the parameters, buffers and seeds that are passed in, as while
            ``run`` calls them; for a backward in which ``torch.utils.checkpoint`` calls them again. None if ``run``
            calls no modules with other tensors than their own.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    params: tuple[str, ...]
    buffers: tuple[str, ...]
    run: SegmentFn
    partial_inputs: tuple[int, ...] = ()
    partial_outputs: tuple[int, ...] = ()
    is_compiled: bool = False
    drawing_calls: tuple[str, ...] | None = None
    parts: tuple[Segment, ...] = ()
    swap_in: SwapInFn | None = None

    def __call__(
        self,
        values: Sequence[Tensor],
        params: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        seed: SeedFn,
        input_shapes: InputShapes = (),
    ) -> tuple[Tensor, ...]:
        """Run the segment on its input values, which come from a call of the model with inputs of these shapes."""
        return self.run(values, params, buffers, seed, input_shapes)


class FlatInputs(NamedTuple):
    """The inputs of one call.

    Args:
        values: the tensors that layers read.
        shapes: those of all inputs, if segments must know them.
    """

    values: tuple[Tensor, ...]
    shapes: InputShapes = ()


class PartitionedModel(ABC):
    """A model split into segments; one serves all ranks of a process, because parameters are passed in.

    Args:
        spec: the model's blocks and layers, for strategies.
        uses_rng: whether a forward in training mode draws random numbers, so that seeds matter.
        compiler: compiles the functions of segments; None to run them eagerly.
    """

    def __init__(self, spec: ModelSpec, *, uses_rng: bool, compiler: SegmentCompiler | None = None) -> None:
        self.spec = spec
        self.uses_rng = uses_rng
        self.compiler = compiler

    @property
    def compiles_blocks(self) -> bool:
        """Whether each block is a graph of its own."""
        return self.compiler is not None and self.compiler.compilation.parts == "blocks"

    @abstractmethod
    def segment(self, first_layer: int, stop_layer: int, *, training: bool) -> Segment:
        """Return layers ``first_layer`` up to, not including, ``stop_layer`` as one function; built once."""

    def read_dtypes(self, *, training: bool) -> Mapping[str, torch.dtype]:
        """Return the parameters that all segments read in the same narrower dtype, by name; none if that is unknown."""
        del training
        return {}

    @abstractmethod
    def values(self, *, training: bool) -> tuple[ValueSpec, ...]:
        """Return the values passed between layers in a mode; the model's flattened inputs come first."""

    @abstractmethod
    def flatten_inputs(self, inputs: Any, *, training: bool = True) -> FlatInputs:  # noqa: ANN401
        """Return the input tensors that layers read, from the inputs of one call (as given to `partition_model`)."""

    @abstractmethod
    def unflatten_output(
        self, values: Sequence[Tensor], *, training: bool = True, input_shapes: InputShapes = ()
    ) -> Any:  # noqa: ANN401
        """Return the model's output in its original structure, from the tensors that the last segment returns."""


def as_call_args(inputs: Any) -> Any:  # noqa: ANN401 - whatever the model takes
    """Return inputs as the arguments of a call: a tuple of positional or a dict of keyword arguments."""
    return inputs if isinstance(inputs, tuple | dict) else (inputs,)


def list_params(model: nn.Module) -> tuple[Param, ...]:
    """Return every parameter of a model as strategies see it, a tied one once."""
    tables = find_embedding_tables(model)
    return tuple(
        Param(name, tuple(parameter.shape), parameter.element_size(), tables.get(name, False))
        for name, parameter in model.named_parameters()
    )


def find_embedding_tables(model: nn.Module) -> dict[str, bool]:
    """Return the trainable embedding tables of a model, and whether they ask for sparse gradients.

    Example:
        >>> find_embedding_tables(nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Embedding(4, 2), nn.Linear(2, 2)))
        {'0.weight': True, '1.weight': False}
    """
    names = {id(param): name for name, param in model.named_parameters() if param.requires_grad}
    tables: dict[str, bool] = {}
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and id(module.weight) in names:
            name = names[id(module.weight)]
            tables[name] = tables.get(name, False) or module.sparse
    return tables


def canonical_names(model: nn.Module) -> dict[str, str]:
    """Map every name of a parameter or buffer to the first name of the same tensor."""
    names: dict[str, str] = {}
    for pairs in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        first: dict[int, str] = {}
        for name, tensor in pairs:
            names[name] = first.setdefault(id(tensor), name)
    return names


def num_bytes(values: Sequence[Tensor]) -> int:
    """Return the total size of tensors."""
    return sum(value.numel() * value.element_size() for value in values)
