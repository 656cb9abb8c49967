"""What every way of cutting gives: segments of a model that run alone, and the description strategies read.

A segment takes the values that its pieces read and earlier ones have made, the model's own inputs among them, and
gives those that later pieces read. They are known by their place in :meth:`Cut.values`. The segment with the last piece
gives the model's output, flattened.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn

from counterpoint.model.dataflow import ValueSpec
from counterpoint.model.spec import ModelSpec, Param

SeedFn: TypeAlias = Callable[[str], None]
"""Sets the random state for one call of the module at a path."""

SegmentFn: TypeAlias = Callable[
    [Sequence[Tensor], Mapping[str, Tensor], Mapping[str, Tensor], SeedFn], tuple[Tensor, ...]
]


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of pieces as one function; it owns no parameter and keeps nothing from one call to the next.

    Args:
        inputs: the values it takes, by their place in those of the cut; the model's own inputs come first.
        outputs: the values it gives; none of those are the output of the model, which its last segment gives.
        params: names of the parameters it reads, as ``model.named_parameters()`` has them, so a tied one once.
        buffers: names of the buffers it reads or changes in place, as ``model.named_buffers()`` has them.
        run: the function itself.
        partial_inputs: inputs whose gradient must be summed over the slices when the segment runs sliced.
        partial_outputs: outputs that must be summed over the slices when the segment runs sliced.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    params: tuple[str, ...]
    buffers: tuple[str, ...]
    run: SegmentFn
    partial_inputs: tuple[int, ...] = ()
    partial_outputs: tuple[int, ...] = ()

    def __call__(
        self, values: Sequence[Tensor], params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], seed: SeedFn
    ) -> tuple[Tensor, ...]:
        """Return what the segment gives for what it takes."""
        return self.run(values, params, buffers, seed)


class PartitionedModel(ABC):
    """A model as segments; one serves all ranks of a process, because values of parameters are passed in.

    Args:
        spec: the model's blocks and pieces, for strategies.
        draws: whether a forward in training mode draws random numbers, so that seeds matter.
    """

    def __init__(self, spec: ModelSpec, *, uses_rng: bool) -> None:
        self.spec = spec
        self.uses_rng = uses_rng

    @abstractmethod
    def segment(self, first_layer: int, stop_layer: int, *, training: bool) -> Segment:
        """Return pieces ``first_piece`` up to, not including, ``stop_piece`` as one function; made once."""

    @abstractmethod
    def values(self, *, training: bool) -> tuple[ValueSpec, ...]:
        """Return what pieces make for later ones in a mode; the model's inputs first, as they are flattened."""

    @abstractmethod
    def flatten_inputs(self, inputs: Any, *, training: bool = True) -> tuple[Tensor, ...]:  # noqa: ANN401
        """Return the inputs of the model that pieces read, of one call's inputs, given as to `partition_model`."""

    @abstractmethod
    def unflatten_output(self, values: Sequence[Tensor], *, training: bool = True) -> Any:  # noqa: ANN401
        """Return the model's output, in the shape the model gives it, from what the last segment gives."""


def list_params(model: nn.Module) -> tuple[Param, ...]:
    """Return every parameter of a model as strategies see it, a tied one once."""
    return tuple(
        Param(name, tuple(parameter.shape), parameter.element_size()) for name, parameter in model.named_parameters()
    )


def canonical_names(model: nn.Module) -> dict[str, str]:
    """Return, for every name of a parameter or buffer, the first name of the same tensor."""
    names: dict[str, str] = {}
    for pairs in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        first: dict[int, str] = {}
        for name, tensor in pairs:
            names[name] = first.setdefault(id(tensor), name)
    return names


def num_bytes(values: Sequence[Tensor]) -> int:
    """Return how many bytes it takes to send the values."""
    return sum(value.numel() * value.element_size() for value in values)
