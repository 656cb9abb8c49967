"""Embedding lookups whose backward records row gradients, instead of a dense or sparse gradient of the table.

Plain lookups are replaced: single rows, and sums and means of bags. Calls that scale by frequency, renormalize the
table, weight samples or take the maximum of a bag stay torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from counterpoint.runtime.params.sparse_grads import RowGrad


class RowGradSink(Protocol):
    """Where the row gradient of a table is put."""

    @property
    def accepts_grads(self) -> bool:
        """Whether gradients that autograd computes now belong to a step."""
        ...

    def add(self, row_grad: RowGrad) -> None:
        """Add rows, instead of a gradient of the weight's shape."""


class EmbeddingCall(NamedTuple):
    """Arguments of one lookup.

    Args:
        weight: the table.
        indices: the rows that are looked up.
        offsets: where bags begin in ``indices``, and its length at the end; None if each row of ``indices`` is a bag,
            or there are none.
        mode: ``row``, ``sum`` or ``mean``.
        padding_idx: a row without a gradient; -1 for none.
        is_sparse: whether a sparse gradient is wanted.
        forward: what torch computes.
    """

    weight: Tensor
    indices: Tensor
    offsets: Tensor | None
    mode: str
    padding_idx: int
    is_sparse: bool
    forward: Callable[[], Tensor]


class EmbeddingRowGrad(torch.autograd.Function):
    """A lookup whose backward records a row gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, call: EmbeddingCall, sink: RowGradSink) -> Tensor:  # noqa: ANN401
        """Return what torch computes."""
        ctx.save_for_backward(call.indices, *(() if call.offsets is None else (call.offsets,)))
        ctx.args = (tuple(weight.shape), call.mode, call.padding_idx, call.is_sparse, sink)
        return call.forward()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:  # noqa: ANN401
        """Put the row gradient into the sink; return a gradient of the table only if the sink accepts none."""
        (grad_output,) = gradients
        shape, mode, padding_idx, is_sparse, sink = ctx.args
        indices, *offsets = ctx.saved_tensors
        row_grad = _build_row_grad(indices, offsets[0] if offsets else None, mode, grad_output)
        if padding_idx >= 0:
            row_grad = RowGrad(
                row_grad.rows.masked_fill(row_grad.rows == padding_idx, -1),
                row_grad.values,
                row_grad.value_index,
                row_grad.rows_per_value,
            )
        if not torch.is_grad_enabled() and sink.accepts_grads:
            sink.add(RowGrad(row_grad.rows, row_grad.values, row_grad.value_index, row_grad.rows_per_value, is_sparse))
            return None, None, None
        rows, values = row_grad.expand()
        if is_sparse:
            return torch.sparse_coo_tensor(rows[None], values, shape, check_invariants=False), None, None
        return grad_output.new_zeros(shape).index_add(0, rows, values), None, None


def _build_row_grad(indices: Tensor, offsets: Tensor | None, mode: str, grad_output: Tensor) -> RowGrad:
    flat = indices.reshape(-1).long()
    if mode == "row":
        return RowGrad(flat, grad_output.reshape(-1, grad_output.shape[-1]).contiguous())
    if offsets is None:
        bag_size = max(indices.shape[1], 1)
        return RowGrad(
            flat, grad_output.contiguous() if mode == "sum" else grad_output / bag_size, rows_per_value=bag_size
        )
    counts = offsets.diff()
    values = grad_output if mode == "sum" else grad_output / counts.clamp(min=1)[:, None]
    value_index = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    return RowGrad(flat[: len(value_index)], values.contiguous(), value_index)


def embedding_lookup(call: EmbeddingCall, sink: RowGradSink) -> Tensor:
    """Return the rows; backward puts their gradient into the sink."""
    output: Tensor = EmbeddingRowGrad.apply(call.weight, call, sink)  # type: ignore[no-untyped-call]
    return output


def parse_embedding(  # noqa: PLR0913 - torch's arguments
    input: Tensor,  # noqa: A002 - torch's name
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,  # noqa: FBT001, FBT002
    sparse: bool = False,  # noqa: FBT001, FBT002
) -> EmbeddingCall | None:
    """Return a call of ``torch.nn.functional.embedding``; None if it is not replaced."""
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
    """Return a call of ``torch.nn.functional.embedding_bag``; None if it is not replaced."""
    is_unsupported = (
        max_norm is not None or scale_grad_by_freq or per_sample_weights is not None or padding_idx is not None
    )
    if is_unsupported or mode not in {"sum", "mean"} or not _is_supported(input, weight):
        return None
    if (offsets is None) != (input.dim() == 2) or not input.numel():
        return None
    bags = offsets
    if offsets is not None and not include_last_offset:
        bags = torch.cat([offsets, offsets.new_tensor([len(input)])])

    def forward() -> Tensor:
        table = weight.detach()
        return F.embedding_bag(input, table, offsets, mode=mode, include_last_offset=include_last_offset)

    return EmbeddingCall(weight, input, bags, mode, -1, sparse, forward)


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
"""Functions that look up rows, and how to parse their arguments."""
