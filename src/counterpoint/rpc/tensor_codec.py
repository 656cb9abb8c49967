"""Tensors as bytes: dtype and shape of each, and a payload in which every tensor starts at an aligned offset."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from counterpoint.errors import PeerError, ProtocolError

ALIGNMENT = 16
MAX_DIMS = 16
MAX_PAYLOAD_BYTES = 1 << 40
TENSOR_META = struct.Struct("<BB")
DTYPE_CODES = {
    torch.float64: 1, torch.float32: 2, torch.bfloat16: 3, torch.float16: 4,
    torch.int64: 5, torch.int32: 6, torch.uint8: 7, torch.bool: 8,
}  # fmt: skip
DTYPES_BY_CODE = {code: dtype for dtype, code in DTYPE_CODES.items()}


def as_memoryview(buffer: Tensor) -> memoryview:
    """Return the memory of a flat uint8 tensor."""
    return memoryview(buffer.numpy())  # type: ignore[arg-type]  # an array is a buffer; numpy says so from Python 3.12 on


def padded_size(num_bytes: int) -> int:
    """Return the size rounded up to the alignment."""
    return num_bytes + -num_bytes % ALIGNMENT


def encode_tensor_meta(tensor: Tensor) -> bytes:
    """Return the encoded dtype and shape.

    Raises:
        PeerError: the dtype cannot be sent, there are too many dims, or the tensor is not in host memory.
    """
    code = dtype_code(tensor)
    if not tensor.is_cpu:
        raise PeerError(f"a tensor on {tensor.device} cannot be sent from host memory; move it with .cpu()")
    return TENSOR_META.pack(code, tensor.dim()) + struct.pack(f"<{tensor.dim()}Q", *tensor.shape)


def dtype_code(tensor: Tensor) -> int:
    """Return the code of the tensor's dtype.

    Raises:
        PeerError: the dtype cannot be sent, or there are too many dims.
    """
    code = DTYPE_CODES.get(tensor.dtype)
    if code is None or tensor.dim() > MAX_DIMS:
        raise PeerError(
            f"a tensor of {tensor.dtype} with {tensor.dim()} dims cannot be sent; "
            f"{', '.join(str(dtype) for dtype in DTYPE_CODES)} with at most {MAX_DIMS} dims can: convert it first"
        )
    return code


def payload_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the length of the tensors' payload."""
    return sum(padded_size(tensor.numel() * tensor.element_size()) for tensor in tensors)


def decode_tensor_meta(
    head: bytes, num_tensors: int, payload_bytes: int
) -> list[tuple[torch.dtype, tuple[int, ...], int]]:
    """Return the dtype, the shape and the offset in the payload of each tensor; together they fill the payload."""
    tensors: list[tuple[torch.dtype, tuple[int, ...], int]] = []
    offset = start = 0
    for index in range(num_tensors):
        if offset + TENSOR_META.size > len(head):
            raise damaged_frame_error(f"its head ends before tensor {index} of {num_tensors}")
        code, num_dims = TENSOR_META.unpack_from(head, offset)
        offset += TENSOR_META.size
        if code not in DTYPES_BY_CODE or num_dims > MAX_DIMS or offset + 8 * num_dims > len(head):
            raise damaged_frame_error(f"tensor {index} is described by dtype {code} and {num_dims} dims")
        shape = struct.unpack_from(f"<{num_dims}Q", head, offset)
        if 0 in shape and prod(filter(None, shape)) > MAX_PAYLOAD_BYTES:  # no payload is too short for it
            raise damaged_frame_error(f"tensor {index} is described by shape {shape}")
        dtype = DTYPES_BY_CODE[code]
        tensors.append((dtype, shape, start))
        offset, start = offset + 8 * num_dims, start + padded_size(prod(shape) * dtype.itemsize)
        if start > payload_bytes:
            raise damaged_frame_error(f"tensor {index}, {dtype} {shape}, extends beyond the payload")
    if len(head) - offset >= ALIGNMENT or any(head[offset:]):
        raise damaged_frame_error(f"its head has {len(head) - offset} bytes too many")
    if start != payload_bytes:
        raise damaged_frame_error(f"its tensors take {payload_bytes - start} bytes less than its payload")
    return tensors


def damaged_frame_error(found: str) -> ProtocolError:
    """Return the error for bytes that are not a valid frame."""
    return ProtocolError(
        f"damaged frame: {found}; every byte must be as it was sent: look for another program on this connection, "
        "another version of counterpoint, or a bad link"
    )
