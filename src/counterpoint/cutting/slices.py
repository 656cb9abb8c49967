"""Proof that a sliced piece is right: its slices, run one by one, add up to the whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from counterpoint.cutting.build import Built, build
from counterpoint.cutting.graph import GraphCut
from counterpoint.cutting.ops import value_of
from counterpoint.cutting.seeds import silent
from counterpoint.errors import PlanError
from counterpoint.model.spec import ModelSpec, Piece, Split

TOLERANCE = 1e-10


def verify_split(cut: GraphCut, spec: ModelSpec, params: Mapping[str, Tensor]) -> None:
    """Every block of ``spec`` that is sliced gives, summed over its slices, what it gives as a whole.

    Checked on random values in float64, whatever the model's own dtype, to 1e-10 of the largest value; a piece
    that does not run on slices, or whose slices do not add up, is refused with a PlanError.

    Args:
        cut: the model.
        spec: the refined description, ``cut.spec.refine(dims, num_slices)``.
        params: the whole parameters by name.
    """
    layout = cut.layout(training=True)
    for block in spec.blocks:
        if block.split is None:
            continue
        _check_size(block.pieces[0], block.split, block.num_slices)
        built = build(layout, block.first_piece, block.first_piece + 1, dtype=torch.float64)
        buffers = dict(cut.model.named_buffers())
        state = [_in_float64(buffers[name]) for name in built.buffers]
        row = built.outputs.index(layout.regions[block.first_piece].row)
        _Trial(built, row, state, block.pieces[0], block.split).check(params, block.num_slices)


def slice_of(params: Mapping[str, Tensor], split: Split, index: int, num_slices: int) -> dict[str, Tensor]:
    """Return the parameters of one slice: a part of those that are sliced, all of the others."""
    dims = dict(split.slices)
    return {
        name: tensor.chunk(num_slices, dims[name])[index] if name in dims else tensor for name, tensor in params.items()
    }


def _check_size(piece: Piece, split: Split, num_slices: int) -> None:
    if split.size % num_slices:
        fitting = [number for number in range(2, split.size + 1) if split.size % number == 0]
        raise PlanError(
            f"{piece.name} has {split.size} {split.dim}, which {num_slices} slices do not divide; "
            f"every rank holds the same number of them; use {', '.join(map(str, fitting[:6])) or 'no'} slices"
        )


@dataclass(frozen=True, slots=True)
class _Trial:
    """One sliced piece on random values.

    Args:
        built: the piece as a function.
        row: the place of the partial output among its outputs.
        state: the values of its buffers.
        piece: the piece.
        split: how it is sliced.
    """

    built: Built
    row: int
    state: list[Tensor]
    piece: Piece
    split: Split

    def check(self, params: Mapping[str, Tensor], num_slices: int) -> None:
        """Run the whole and the slices; refuse the piece if they differ."""
        generator = torch.Generator().manual_seed(0)
        values = [_random(value_of(node), generator) for node in self.built.inputs]
        own = {name: _random(params[name], generator) for name in self.built.params}
        whole = self._run(values, own)
        parts = []
        for index in range(num_slices):
            try:
                parts.append(self._run(values, slice_of(own, self.split, index, num_slices)))
            except (RuntimeError, IndexError, ValueError) as error:
                reason = str(error).strip().splitlines()[0]
                raise PlanError(
                    f"{self.piece.name} does not run on slice {index} of {num_slices} along {self.split.dim}: "
                    f"{reason}; {self._advice()}"
                ) from error
        off = float((torch.stack(parts).sum(0) - whole).abs().max() / whole.abs().max().clamp(min=1))
        if not off <= TOLERANCE:
            raise PlanError(
                f"{num_slices} slices of {self.piece.name} along {self.split.dim} do not add up: the sum is off by "
                f"{off:.1e} of the largest value; {self._advice()}"
            )

    def _run(self, values: list[Tensor], own: Mapping[str, Tensor]) -> Tensor:
        with torch.no_grad():
            return self.built.function(silent, *values, *own.values(), *self.state)[self.row]

    def _advice(self) -> str:
        return (
            "slices of the layers before may meet only the same slice of the layer behind, so that nothing between "
            "may mix them, as one layer for query, key and value together does, or a softmax over the features; "
            f"write separate layers, or keep this dim whole by giving it a name other than '{self.split.dim}' in dims"
        )


def _random(like: Tensor, generator: torch.Generator) -> Tensor:
    """Return random numbers in float64; whole numbers become zeros, which index anything."""
    if not like.is_floating_point():
        return torch.zeros(like.shape, dtype=like.dtype)
    scale = like.shape[-1] ** -0.5 if like.dim() > 1 else 1.0
    return torch.randn(like.shape, dtype=torch.float64, generator=generator) * scale


def _in_float64(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value
