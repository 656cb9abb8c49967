"""What codes do with tensors: one parameter's flat gradient to the bytes that every member is sent, and back.

Every member decodes the same bytes in the same way, the sender's own among them, so that all come to the same numbers
and the sender knows exactly what it has not sent. A gradient that is not finite decodes to one that is not either.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from counterpoint.program.compression import CHUNK_ELEMENTS, INDEX_BYTES, Codec, topk_count

INT8_LEVELS = 127
"""``int8`` has so many steps above zero, and as many below."""

CAST_DTYPES: dict[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""The codes that are dtypes: their values can be added up as they are."""


@dataclass(frozen=True, slots=True)
class TensorCodec:
    """How one code writes and reads.

    Args:
        encode: from the code and a flat gradient to the tensors whose bytes are sent.
        decode: from the code, these bytes, how many numbers they stand for, and their dtype to the gradient.
    """

    encode: Callable[[Codec, Tensor], tuple[Tensor, ...]]
    decode: Callable[[Codec, Tensor, int, torch.dtype], Tensor]


def compress(codec: Codec, values: Tensor) -> Tensor:
    """Return the bytes that stand for a flat gradient in a code whose bytes are gathered, or in a narrower dtype."""
    parts = TENSOR_CODECS[codec.name].encode(codec, values)
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts])


def decompress(codec: Codec, data: Tensor, like: Tensor) -> Tensor:
    """Return the flat gradient that :func:`encoded` wrote, as many numbers and of the dtype of ``like``."""
    return TENSOR_CODECS[codec.name].decode(codec, data, len(like), like.dtype)


def cast_clamped(values: Tensor, dtype: torch.dtype, num_members: int) -> Tensor:
    """Return numbers in a narrower dtype; what is so large that the members' sum may overflow, is cut off.

    Infinite numbers stay infinite.
    """
    if values.dtype == dtype:
        return values.clone()
    most = torch.finfo(dtype).max / 2 ** math.ceil(math.log2(num_members))  # a number of this dtype
    cut = values.clamp(-most, most).to(dtype)
    return torch.where(values.isinf(), values.to(dtype), cut)


def orthonormalize(columns: Tensor) -> Tensor:
    """Return an orthonormal basis of what the columns span, one by one; zeros for a column that adds nothing.

    Source:
        The modified Gram-Schmidt process, gone through twice, so that it is orthogonal to rounding.
    """
    basis = torch.zeros_like(columns)
    for at in range(columns.shape[1]):
        column = columns[:, at].clone()
        before = torch.linalg.vector_norm(column)
        for _ in range(2):
            column -= basis[:, :at] @ (basis[:, :at].t() @ column)
        norm = torch.linalg.vector_norm(column)
        if not norm <= before * 10 * torch.finfo(columns.dtype).eps:  # nan goes on as nan
            basis[:, at] = column / norm
    return basis


def initial_powersgd_factor(num_rows: int, rank: int, like: Tensor) -> Tensor:
    """Return the factor that ``powersgd`` starts with: normal numbers, the same on every rank."""
    draw = torch.Generator().manual_seed(0)
    return torch.randn(num_rows, rank, generator=draw, dtype=torch.float64).to(like)


def next_powersgd_factor(summed: Tensor) -> Tensor:
    """Return the factor that the next step starts with: this one's, but for columns that have become nothing."""
    norms = torch.linalg.vector_norm(summed, dim=0)
    return torch.where(norms > 0, summed, initial_powersgd_factor(len(summed), summed.shape[1], summed))


def _to_chunks(values: Tensor) -> Tensor:
    return F.pad(values, (0, -len(values) % CHUNK_ELEMENTS)).view(-1, CHUNK_ELEMENTS)


def _repeat_per_chunk(scales: Tensor, count: int) -> Tensor:
    return scales.repeat_interleave(CHUNK_ELEMENTS)[:count]


def _view_as(data: Tensor, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    return data[start:stop].clone().view(dtype)  # a copy begins where any dtype may


def _pack_bits(values: Tensor, bits: int) -> Tensor:
    """Return small numbers packed into bytes, the first one lowest."""
    each = 8 // bits
    rows = F.pad(values.to(torch.uint8), (0, -len(values) % each)).view(-1, each)
    packed = rows.new_zeros(len(rows))
    for at in range(each):
        packed |= rows[:, at] << (bits * at)
    return packed


def _unpack_bits(data: Tensor, bits: int, count: int) -> Tensor:
    rows = [(data >> (bits * at)) & ((1 << bits) - 1) for at in range(8 // bits)]
    return torch.stack(rows, dim=1).reshape(-1)[:count]


def _encode_int8(codec: Codec, values: Tensor) -> tuple[Tensor, ...]:
    rows = _to_chunks(values)
    scales = rows.abs().amax(dim=1) / INT8_LEVELS
    steps = (rows / torch.where(scales > 0, scales, 1)[:, None]).round_().clamp_(-INT8_LEVELS, INT8_LEVELS)
    return steps.nan_to_num_().to(torch.int8).view(-1)[: len(values)], scales


def _decode_int8(codec: Codec, data: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    scales = _view_as(data, count, len(data), dtype)
    return _view_as(data, 0, count, torch.int8).to(dtype) * _repeat_per_chunk(scales, count)


def _encode_signs(codec: Codec, values: Tensor) -> tuple[Tensor, ...]:
    rows = _to_chunks(values)
    lengths = values.new_full((len(rows),), CHUNK_ELEMENTS)
    if len(rows):
        lengths[-1] = len(values) - CHUNK_ELEMENTS * (len(rows) - 1)
    return _pack_bits(values >= 0, 1), rows.abs().sum(dim=1) / lengths


def _decode_signs(codec: Codec, data: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    middle = -(-count // 8)
    signs = _unpack_bits(data[:middle], 1, count).to(dtype).mul_(2).sub_(1)
    return signs * _repeat_per_chunk(_view_as(data, middle, len(data), dtype), count)


def _encode_two_bits(codec: Codec, values: Tensor) -> tuple[Tensor, ...]:
    threshold = float(codec.number)
    marks = (values >= threshold).to(torch.uint8) + 2 * (values <= -threshold).to(torch.uint8)
    return (_pack_bits(torch.where(values.isfinite(), marks, 3), 2),)


def _decode_two_bits(codec: Codec, data: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    threshold = float(codec.number)
    meant = torch.tensor([0.0, threshold, -threshold, math.nan], dtype=dtype, device=data.device)
    return meant[_unpack_bits(data, 2, count).int()]


def _encode_topk(codec: Codec, values: Tensor) -> tuple[Tensor, ...]:
    places = values.abs().topk(topk_count(len(values), codec.number), sorted=False).indices
    return places.to(torch.int32), values[places]


def _decode_topk(codec: Codec, data: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    middle = topk_count(count, codec.number) * INDEX_BYTES
    places = _view_as(data, 0, middle, torch.int32)
    zeros = torch.zeros(count, dtype=dtype, device=data.device)
    return zeros.index_put_((places,), _view_as(data, middle, len(data), dtype))


def _encode_cast(codec: Codec, values: Tensor) -> tuple[Tensor, ...]:
    return (cast_clamped(values, CAST_DTYPES[codec.name], 1),)


def _decode_cast(codec: Codec, data: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    return _view_as(data, 0, len(data), CAST_DTYPES[codec.name]).to(dtype)


def _encode_identity(codec: Codec, values: Tensor) -> tuple[Tensor, ...]:
    return (values,)


def _decode_identity(codec: Codec, data: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    return _view_as(data, 0, len(data), dtype)


TENSOR_CODECS: dict[str, TensorCodec] = {
    "fp16": TensorCodec(_encode_cast, _decode_cast),
    "bf16": TensorCodec(_encode_cast, _decode_cast),
    "int8": TensorCodec(_encode_int8, _decode_int8),
    "twobit": TensorCodec(_encode_two_bits, _decode_two_bits),
    "sign": TensorCodec(_encode_signs, _decode_signs),
    "topk": TensorCodec(_encode_topk, _decode_topk),
    "adasum": TensorCodec(_encode_identity, _decode_identity),
}
"""How the codes write and read whose bytes stand for themselves."""

POINT_TO_POINT_CODECS = tuple(name for name in TENSOR_CODECS if name != "adasum")
"""The codes whose bytes stand for one gradient, whatever the others are."""
