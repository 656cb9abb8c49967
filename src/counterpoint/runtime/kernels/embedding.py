"""Embeddings whose backward notes rows, instead of making a gradient of the table's size or a sparse one.

What is looked up in the plain ways is done here: single rows, and sums and means of bags. Calls that count frequencies,
renormalize the table, weigh samples or take the largest of a bag are torch's, whose gradient is taken as it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from counterpoint.runtime.params.sparse_grads import RowGrad


class RowGradSink(Protocol):
    """Where the rows of a gradient belong."""

    @property
    def accepts_grads(self) -> bool:
        """Whether what autograd makes now are the gradients of a step."""
        ...

    def add(self, row_grad: RowGrad) -> None:
        """Take rows in the place of a gradient of the weight's size."""


class EmbeddingCall(NamedTuple):
    """One look-up.

    Args:
        weight: the table.
        rows: which of its rows.
        bags: where bags begin in ``rows``, and its length at the end; None where each row of ``rows`` is a bag, or
            where there are none.
        mode: ``row``, ``sum`` or ``mean``.
        padding: a row that gets no gradient; -1 for none.
        is_sparse: whether a sparse gradient is wanted.
        plain: what torch computes.
    """

    weight: Tensor
    indices: Tensor
    offsets: Tensor | None
    mode: str
    padding_idx: int
    is_sparse: bool
    forward: Callable[[], Tensor]


class EmbeddingRowGrad(torch.autograd.Function):
    """A look-up whose backward notes rows."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, call: EmbeddingCall, sink: RowGradSink) -> Tensor:  # noqa: ANN401
        """Return what torch computes."""
        ctx.save_for_backward(call.indices, *(() if call.offsets is None else (call.offsets,)))
        ctx.how = (tuple(weight.shape), call.mode, call.padding_idx, call.is_sparse, sink)
        return call.forward()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:  # noqa: ANN401
        """Return nothing for the table, unless its gradient is somebody else's."""
        (above,) = gradients
        shape, mode, padding, is_sparse, place = ctx.how
        rows, *bags = ctx.saved_tensors
        piece = _build_row_grad(rows, bags[0] if bags else None, mode, above)
        if padding >= 0:
            piece = RowGrad(
                piece.rows.masked_fill(piece.rows == padding, -1), piece.values, piece.value_index, piece.rows_per_value
            )
        if not torch.is_grad_enabled() and place.is_open:
            place.add(RowGrad(piece.rows, piece.values, piece.value_index, piece.rows_per_value, is_sparse))
            return None, None, None
        numbers, values = piece.expand()
        if is_sparse:
            return torch.sparse_coo_tensor(numbers[None], values, shape, check_invariants=False), None, None
        return above.new_zeros(shape).index_add(0, numbers, values), None, None


def _build_row_grad(indices: Tensor, offsets: Tensor | None, mode: str, grad_output: Tensor) -> RowGrad:
    flat = indices.reshape(-1).long()
    if mode == "row":
        return RowGrad(flat, grad_output.reshape(-1, grad_output.shape[-1]).contiguous())
    if offsets is None:
        each = max(indices.shape[1], 1)
        return RowGrad(flat, grad_output.contiguous() if mode == "sum" else grad_output / each, rows_per_value=each)
    counts = offsets.diff()
    values = grad_output if mode == "sum" else grad_output / counts.clamp(min=1)[:, None]
    at = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return RowGrad(flat[: len(at)], values.contiguous(), at)


def embedding_lookup(call: EmbeddingCall, sink: RowGradSink) -> Tensor:
    """Return the rows, and note those that get a gradient in a backward."""
    found: Tensor = EmbeddingRowGrad.apply(call.weight, call, sink)  # type: ignore[no-untyped-call]
    return found


def parse_embedding(  # noqa: PLR0913 - torch's arguments
    input: Tensor,  # noqa: A002 - torch's name
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,  # noqa: FBT001, FBT002
    sparse: bool = False,  # noqa: FBT001, FBT002
) -> EmbeddingCall | None:
    """Return a call of ``torch.nn.functional.embedding``; None where it is not done here."""
    if max_norm is not None or scale_grad_by_freq or not _is_supported(input, weight):
        return None
    padding = -1 if padding_idx is None else padding_idx + (len(weight) if padding_idx < 0 else 0)
    return EmbeddingCall(weight, input, None, "row", padding, sparse, lambda: F.embedding(input, weight.detach()))


def parse_embedding_bag(  # noqa: PLR0913 - torch's arguments
    input: Tensor,  # noqa: A002 - torch's name
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,  # noqa: FBT001, FBT002
    mode: str = "mean",
    sparse: bool = False,  # noqa: FBT001, FBT002
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,  # noqa: FBT001, FBT002
    padding_idx: int | None = None,
) -> EmbeddingCall | None:
    """Return a call of ``torch.nn.functional.embedding_bag``; None where it is not done here."""
    is_odd = max_norm is not None or scale_grad_by_freq or per_sample_weights is not None or padding_idx is not None
    if is_odd or mode not in {"sum", "mean"} or not _is_supported(input, weight):
        return None
    if (offsets is None) != (input.dim() == 2) or not input.numel():
        return None
    bags = offsets
    if offsets is not None and not include_last_offset:
        bags = torch.cat([offsets, offsets.new_tensor([len(input)])])

    def plain() -> Tensor:
        table = weight.detach()
        return F.embedding_bag(input, table, offsets, mode=mode, include_last_offset=include_last_offset)

    return EmbeddingCall(weight, input, bags, mode, -1, sparse, plain)


def _is_supported(indices: Tensor, weight: Tensor) -> bool:
    return not indices.is_floating_point() and indices.is_cpu and weight.is_cpu and weight.requires_grad


def _parse_aten_embedding(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,  # noqa: FBT001, FBT002
    sparse: bool = False,  # noqa: FBT001, FBT002
) -> EmbeddingCall | None:
    padding = None if padding_idx < 0 else padding_idx
    return parse_embedding(indices, weight, padding, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)


EMBEDDING_FNS: Mapping[Callable[..., Any], Callable[..., EmbeddingCall | None]] = {
    F.embedding: parse_embedding,
    F.embedding_bag: parse_embedding_bag,
    torch.ops.aten.embedding.default: _parse_aten_embedding,
}
"""The functions that look up rows, and how their arguments are read."""
