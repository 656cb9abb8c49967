"""Compression codecs on tensors: encode a flat gradient, or flat weights, as bytes, and decode the bytes.

Every member, the sender included, decodes the same bytes in the same way. So all members get identical results, and the
sender knows its exact compression error. A gradient that is not finite decodes to one that is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from counterpoint.program.compression import CHUNK_ELEMENTS, CODECS, INDEX_BYTES, Codec, topk_count

INT8_LEVELS = 127
"""Quantization levels of ``int8`` on each side of zero."""

INT4_LEVELS = 7
"""Quantization levels of ``int4`` on each side of zero."""

CAST_DTYPES: dict[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""Codecs that only cast: their values can be summed without decoding."""


@dataclass(frozen=True, slots=True)
class TensorCodec:
    """Encoder and decoder of one codec.

    Args:
        encode: from the codec and a flat gradient to the tensors whose bytes are sent.
        decode: from the codec, the bytes, the number of elements and the dtype to the flat gradient.
    """

    encode: Callable[[Codec, Tensor], tuple[Tensor, ...]]
    decode: Callable[[Codec, Tensor, int, torch.dtype], Tensor]


def compress(codec: Codec, values: Tensor) -> Tensor:
    """Return the encoded bytes of a flat gradient, for a codec whose bytes are gathered or that casts."""
    parts = TENSOR_CODECS[codec.name].encode(codec, values)
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts])


def decompress(codec: Codec, data: Tensor, like: Tensor) -> Tensor:
    """Return the flat gradient that :func:`compress` encoded, with the length and dtype of ``like``."""
    return decompress_to(codec, data, len(like), like.dtype)


def decompress_to(codec: Codec, data: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return the ``count`` values of this dtype that :func:`compress` encoded."""
    return TENSOR_CODECS[codec.name].decode(codec, data, count, dtype)


def cast_clamped(values: Tensor, dtype: torch.dtype, num_members: int) -> Tensor:
    """Cast to a narrower dtype, clamped such that a sum over ``num_members`` cannot overflow.

    Infinities stay infinite.
    """
    if values.dtype == dtype:
        return values.clone()
    limit = torch.finfo(dtype).max / 2 ** math.ceil(math.log2(num_members))  # a number of this dtype
    clamped = values.clamp(-limit, limit).to(dtype)
    return torch.where(values.isinf(), values.to(dtype), clamped)


def orthonormalize(columns: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns' span, column by column; a linearly dependent column becomes zero.

    Source:
        The modified Gram-Schmidt process, applied twice, which makes it orthogonal to rounding.
    """
    basis = torch.zeros_like(columns)
    for index in range(columns.shape[1]):
        column = columns[:, index].clone()
        initial_norm = torch.linalg.vector_norm(column)
        for _ in range(2):
            column -= basis[:, :index] @ (basis[:, :index].t() @ column)
        norm = torch.linalg.vector_norm(column)
        is_dependent = norm <= initial_norm * 10 * torch.finfo(columns.dtype).eps  # false for nan
        basis[:, index] = (column / norm).masked_fill_(is_dependent, 0.0)
    return basis


def initial_powersgd_factor(num_rows: int, rank: int, like: Tensor) -> Tensor:
    """Return PowerSGD's initial factor: normal random numbers, identical on every rank."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num_rows, rank, generator=generator, dtype=torch.float64).to(like)


def next_powersgd_factor(summed: Tensor, initial: Tensor) -> Tensor:
    """Return the warm start of PowerSGD's next step: this step's factor, with zero columns replaced by initial ones."""
    norms = torch.linalg.vector_norm(summed, dim=0)
    return torch.where(norms > 0, summed, initial)


def _to_chunks(values: Tensor) -> Tensor:
    return F.pad(values, (0, -len(values) % CHUNK_ELEMENTS)).view(-1, CHUNK_ELEMENTS)


def _repeat_per_chunk(scales: Tensor, count: int) -> Tensor:
    return scales.repeat_interleave(CHUNK_ELEMENTS)[:count]


def _view_as(data: Tensor, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    return data[start:stop].clone().view(dtype)  # a copy begins where any dtype may


def _pack_bits(values: Tensor, bits: int) -> Tensor:
    """Pack small integers into bytes, the first one in the lowest bits."""
    per_byte = 8 // bits
    rows = F.pad(values.to(torch.uint8), (0, -len(values) % per_byte)).view(-1, per_byte)
    packed = rows.new_zeros(len(rows))
    for index in range(per_byte):
        packed |= rows[:, index] << (bits * index)
    return packed


def _unpack_bits(data: Tensor, bits: int, count: int) -> Tensor:
    rows = [(data >> (bits * index)) & ((1 << bits) - 1) for index in range(8 // bits)]
    return torch.stack(rows, dim=1).reshape(-1)[:count]


def _to_levels(values: Tensor, num_levels: int) -> tuple[Tensor, Tensor]:
    """Return the nearest multiple of its chunk's scale for each value, as an integer, and the scales.

    The largest magnitude of a chunk is ``num_levels`` scales. 16-bit floats are divided in 32 bits: a ratio of 16 bits
    would be rounded before it is rounded to an integer.
    """
    rows = _to_chunks(values)
    scales = rows.abs().amax(dim=1) / num_levels
    wide = torch.promote_types(values.dtype, torch.float32)
    ratios = rows.to(wide) / torch.where(scales > 0, scales, 1).to(wide)[:, None]
    levels = ratios.round_().clamp_(-num_levels, num_levels)
    return levels.nan_to_num_().to(torch.int8).view(-1)[: len(values)], scales


def _encode_int8(codec: Codec, values: Tensor) -> tuple[Tensor, ...]:
    return _to_levels(values, INT8_LEVELS)


def _decode_int8(codec: Codec, data: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    scales = _view_as(data, count, len(data), dtype)
    return _view_as(data, 0, count, torch.int8).to(dtype) * _repeat_per_chunk(scales, count)


def _encode_int4(codec: Codec, values: Tensor) -> tuple[Tensor, ...]:
    levels, scales = _to_levels(values, INT4_LEVELS)
    return _pack_bits(levels + INT4_LEVELS, 4), scales


def _decode_int4(codec: Codec, data: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    level_bytes = -(-count // 2)
    levels = _unpack_bits(data[:level_bytes], 4, count).to(dtype).sub_(INT4_LEVELS)
    return levels * _repeat_per_chunk(_view_as(data, level_bytes, len(data), dtype), count)


def _encode_signs(codec: Codec, values: Tensor) -> tuple[Tensor, ...]:
    rows = _to_chunks(values)
    lengths = values.new_full((len(rows),), CHUNK_ELEMENTS)
    if len(rows):
        lengths[-1] = len(values) - CHUNK_ELEMENTS * (len(rows) - 1)
    return _pack_bits(values >= 0, 1), rows.abs().sum(dim=1) / lengths


def _encode_one_bit(codec: Codec, values: Tensor) -> tuple[Tensor, ...]:
    rows = _to_chunks(values)
    lengths = values.new_full((len(rows),), CHUNK_ELEMENTS)
    if len(rows):
        lengths[-1] = len(values) - CHUNK_ELEMENTS * (len(rows) - 1)
    return _pack_bits(values >= 0, 1), torch.linalg.vector_norm(rows, dim=1) / lengths.sqrt()


def _decode_signs(codec: Codec, data: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    sign_bytes = -(-count // 8)
    signs = _unpack_bits(data[:sign_bytes], 1, count).to(dtype).mul_(2).sub_(1)
    return signs * _repeat_per_chunk(_view_as(data, sign_bytes, len(data), dtype), count)


def _encode_two_bits(codec: Codec, values: Tensor) -> tuple[Tensor, ...]:
    threshold = float(codec.number)
    signs = (values >= threshold).to(torch.uint8) + 2 * (values <= -threshold).to(torch.uint8)
    return (_pack_bits(torch.where(values.isfinite(), signs, 3), 2),)


def _decode_two_bits(codec: Codec, data: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    threshold = float(codec.number)
    levels = torch.zeros(4, dtype=dtype, device=data.device)
    for code, level in ((1, threshold), (2, -threshold), (3, math.nan)):
        levels[code : code + 1].fill_(level)
    return levels[_unpack_bits(data, 2, count).int()]


def _encode_topk(codec: Codec, values: Tensor) -> tuple[Tensor, ...]:
    indices = values.abs().topk(topk_count(len(values), codec.number), sorted=False).indices
    return indices.to(torch.int32), values[indices]


def _decode_topk(codec: Codec, data: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    index_bytes = topk_count(count, codec.number) * INDEX_BYTES
    indices = _view_as(data, 0, index_bytes, torch.int32)
    zeros = torch.zeros(count, dtype=dtype, device=data.device)
    return zeros.index_put_((indices,), _view_as(data, index_bytes, len(data), dtype))


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
    "int4": TensorCodec(_encode_int4, _decode_int4),
    "twobit": TensorCodec(_encode_two_bits, _decode_two_bits),
    "sign": TensorCodec(_encode_signs, _decode_signs),
    "onebit": TensorCodec(_encode_one_bit, _decode_signs),
    "topk": TensorCodec(_encode_topk, _decode_topk),
    "adasum": TensorCodec(_encode_identity, _decode_identity),
}
"""Codecs that encode a gradient without knowing the other members'."""

POINT_TO_POINT_CODECS = tuple(name for name in TENSOR_CODECS if CODECS[name].works_point_to_point)
"""Codecs that also work for a message between two ranks, where nothing is reduced."""
