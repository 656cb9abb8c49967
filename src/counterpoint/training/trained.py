"""What of a model is trained: descriptions without frozen parameters, and with those that nothing reads."""

from __future__ import annotations

from dataclasses import replace

from counterpoint.model.spec import ModelSpec
from counterpoint.runtime.optimizers import Face


def trainable(spec: ModelSpec, face: Face) -> ModelSpec:
    """Return the model without its frozen parameters, which no gradient and no update is about."""
    return replace(spec, params=tuple(param for param in spec.params if param.name in face.group_of))


def with_unused(spec: ModelSpec) -> ModelSpec:
    """Return the model with the parameters that no piece reads given to one, so that they are trained or missed."""
    read = {name for piece in spec.pieces for name in piece.params}
    unused = tuple(param.name for param in spec.params if param.name not in read)
    if not unused:
        return spec
    index, piece = next(((i, piece) for i, piece in enumerate(spec.pieces) if piece.split is None), (0, spec.pieces[0]))
    adopted = replace(piece, params=(*piece.params, *unused))
    blocks = tuple(
        replace(
            block,
            pieces=tuple(adopted if at == index else piece for at, piece in enumerate(block.pieces, block.first_piece)),
        )
        for block in spec.blocks
    )
    return replace(spec, blocks=blocks)
