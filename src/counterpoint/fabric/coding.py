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

from counterpoint.program.codes import CHUNK, INDEX_BYTES, Code, most_large

STEPS = 127
"""``int8`` has so many steps above zero, and as many below."""

NARROW: dict[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""The codes that are dtypes: their values can be added up as they are."""


@dataclass(frozen=True, slots=True)
class Coder:
    """How one code writes and reads.

    Args:
        encode: from the code and a flat gradient to the tensors whose bytes are sent.
        decode: from the code, these bytes, how many numbers they stand for, and their dtype to the gradient.
    """

    encode: Callable[[Code, Tensor], tuple[Tensor, ...]]
    decode: Callable[[Code, Tensor, int, torch.dtype], Tensor]


def encoded(code: Code, values: Tensor) -> Tensor:
    """Return the bytes that stand for a flat gradient in a code whose bytes are gathered, or in a narrower dtype."""
    parts = CODERS[code.name].encode(code, values)
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts])


def decoded(code: Code, written: Tensor, like: Tensor) -> Tensor:
    """Return the flat gradient that :func:`encoded` wrote, as many numbers and of the dtype of ``like``."""
    return CODERS[code.name].decode(code, written, len(like), like.dtype)


def narrowed(values: Tensor, dtype: torch.dtype, num_members: int) -> Tensor:
    """Return numbers in a narrower dtype; what is so large that the members' sum may overflow, is cut off.

    Infinite numbers stay infinite.
    """
    if values.dtype == dtype:
        return values.clone()
    most = torch.finfo(dtype).max / 2 ** math.ceil(math.log2(num_members))  # a number of this dtype
    cut = values.clamp(-most, most).to(dtype)
    return torch.where(values.isinf(), values.to(dtype), cut)


def orthogonal(columns: Tensor) -> Tensor:
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


def first_columns(num_rows: int, rank: int, like: Tensor) -> Tensor:
    """Return the factor that ``powersgd`` starts with: normal numbers, the same on every rank."""
    draw = torch.Generator().manual_seed(0)
    return torch.randn(num_rows, rank, generator=draw, dtype=torch.float64).to(like)


def next_columns(summed: Tensor) -> Tensor:
    """Return the factor that the next step starts with: this one's, but for columns that have become nothing."""
    norms = torch.linalg.vector_norm(summed, dim=0)
    return torch.where(norms > 0, summed, first_columns(len(summed), summed.shape[1], summed))


def _chunks(values: Tensor) -> Tensor:
    return F.pad(values, (0, -len(values) % CHUNK)).view(-1, CHUNK)


def _spread(scales: Tensor, count: int) -> Tensor:
    return scales.repeat_interleave(CHUNK)[:count]


def _read(written: Tensor, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    return written[start:stop].clone().view(dtype)  # a copy begins where any dtype may


def _packed(marks: Tensor, bits: int) -> Tensor:
    """Return small numbers packed into bytes, the first one lowest."""
    each = 8 // bits
    rows = F.pad(marks.to(torch.uint8), (0, -len(marks) % each)).view(-1, each)
    packed = rows.new_zeros(len(rows))
    for at in range(each):
        packed |= rows[:, at] << (bits * at)
    return packed


def _unpacked(written: Tensor, bits: int, count: int) -> Tensor:
    rows = [(written >> (bits * at)) & ((1 << bits) - 1) for at in range(8 // bits)]
    return torch.stack(rows, dim=1).reshape(-1)[:count]


def _to_int8(code: Code, values: Tensor) -> tuple[Tensor, ...]:
    rows = _chunks(values)
    scales = rows.abs().amax(dim=1) / STEPS
    steps = (rows / torch.where(scales > 0, scales, 1)[:, None]).round_().clamp_(-STEPS, STEPS)
    return steps.nan_to_num_().to(torch.int8).view(-1)[: len(values)], scales


def _from_int8(code: Code, written: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    scales = _read(written, count, len(written), dtype)
    return _read(written, 0, count, torch.int8).to(dtype) * _spread(scales, count)


def _to_signs(code: Code, values: Tensor) -> tuple[Tensor, ...]:
    rows = _chunks(values)
    lengths = values.new_full((len(rows),), CHUNK)
    if len(rows):
        lengths[-1] = len(values) - CHUNK * (len(rows) - 1)
    return _packed(values >= 0, 1), rows.abs().sum(dim=1) / lengths


def _from_signs(code: Code, written: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    middle = -(-count // 8)
    signs = _unpacked(written[:middle], 1, count).to(dtype).mul_(2).sub_(1)
    return signs * _spread(_read(written, middle, len(written), dtype), count)


def _to_two_bits(code: Code, values: Tensor) -> tuple[Tensor, ...]:
    threshold = float(code.number)
    marks = (values >= threshold).to(torch.uint8) + 2 * (values <= -threshold).to(torch.uint8)
    return (_packed(torch.where(values.isfinite(), marks, 3), 2),)


def _from_two_bits(code: Code, written: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    threshold = float(code.number)
    meant = torch.tensor([0.0, threshold, -threshold, math.nan], dtype=dtype, device=written.device)
    return meant[_unpacked(written, 2, count).int()]


def _to_largest(code: Code, values: Tensor) -> tuple[Tensor, ...]:
    places = values.abs().topk(most_large(len(values), code.number), sorted=False).indices
    return places.to(torch.int32), values[places]


def _from_largest(code: Code, written: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    middle = most_large(count, code.number) * INDEX_BYTES
    places = _read(written, 0, middle, torch.int32)
    zeros = torch.zeros(count, dtype=dtype, device=written.device)
    return zeros.index_put_((places,), _read(written, middle, len(written), dtype))


def _to_narrow(code: Code, values: Tensor) -> tuple[Tensor, ...]:
    return (narrowed(values, NARROW[code.name], 1),)


def _from_narrow(code: Code, written: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    return _read(written, 0, len(written), NARROW[code.name]).to(dtype)


def _to_itself(code: Code, values: Tensor) -> tuple[Tensor, ...]:
    return (values,)


def _from_itself(code: Code, written: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    return _read(written, 0, len(written), dtype)


CODERS: dict[str, Coder] = {
    "fp16": Coder(_to_narrow, _from_narrow),
    "bf16": Coder(_to_narrow, _from_narrow),
    "int8": Coder(_to_int8, _from_int8),
    "twobit": Coder(_to_two_bits, _from_two_bits),
    "sign": Coder(_to_signs, _from_signs),
    "topk": Coder(_to_largest, _from_largest),
    "adasum": Coder(_to_itself, _from_itself),
}
"""How the codes write and read whose bytes stand for themselves."""

ALONE = tuple(name for name in CODERS if name != "adasum")
"""The codes whose bytes stand for one gradient, whatever the others are."""
