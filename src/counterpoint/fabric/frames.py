"""What travels: a fixed binary header in front of a label and raw little-endian tensors, checked before it is believed.

A frame is ``prefix | label | one description per tensor | payload``. The prefix has a checksum of its own, so that no
length is trusted before it has been verified; a second one covers all that follows. Nothing is ever unpickled.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import prod

import torch
from isal.isal_zlib import crc32
from torch import Tensor

from counterpoint.errors import PeerError, ProtocolError

MAGIC = b"CPNT"
VERSION = 1
ALIGNMENT = 16
MAX_DIMS = 16
MAX_HEAD_BYTES = 1 << 24
MAX_PAYLOAD_BYTES = 1 << 40
COPIED_BYTES = 1 << 14
"""From here on a copy costs more than one write more."""

# magic, version, kind, zero, job, generation, source, sequence, fingerprint,
# label bytes, tensors, head bytes (label and descriptions, padded), payload bytes, checksum of what follows
PREFIX = struct.Struct("<4sHBBQIIQ16sHHIQI")
CHECKSUM = struct.Struct("<I")
PREFIX_BYTES = PREFIX.size + CHECKSUM.size
LOOKS = struct.Struct("<BB")
SOURCE_AT = struct.calcsize("<4sHBBQI")
STAMP_BYTES = struct.calcsize("<4sHBBQIIQ16s")

CODES = {
    torch.float64: 1, torch.float32: 2, torch.bfloat16: 3, torch.float16: 4,
    torch.int64: 5, torch.int32: 6, torch.uint8: 7, torch.bool: 8,
}  # fmt: skip
DTYPES = {code: dtype for dtype, code in CODES.items()}


class Kind(IntEnum):
    """What a frame is about."""

    MESSAGE = 1
    OPERATION = 2
    VALUE = 3


@dataclass(frozen=True, slots=True)
class Stamp:
    """Where a frame belongs: the job, the generation of its ranks, the sender and its count, and what it is about."""

    kind: Kind
    job: int
    generation: int
    source: int
    sequence: int
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame that has been read and verified; its tensors are views of the bytes it was read from."""

    stamp: Stamp
    label: str
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Prefix:
    """The verified fixed part of a frame."""

    stamp: Stamp
    label_bytes: int
    num_tensors: int
    head_bytes: int
    payload_bytes: int
    checksum: int

    @property
    def frame_bytes(self) -> int:
        """Length of the whole frame."""
        return PREFIX_BYTES + self.head_bytes + self.payload_bytes


def encode(stamp: Stamp, label: str, tensors: Sequence[Tensor]) -> Tensor:
    """Return the frame as a flat uint8 tensor, with a copy of the tensors; a PeerError where one cannot travel."""
    return torch.cat(pieces_of(stamp, label, tensors))


def encode_into(room: memoryview, stamp: Stamp, label: str, tensors: Sequence[Tensor]) -> None:
    """The first bytes of the room, which is long enough, are the frame; the rest is as it was."""
    at = 0
    for part in _parts(stamp, label, tensors):
        raw = part if isinstance(part, bytearray) else raw_bytes(part)
        room[at : at + len(raw)] = raw
        at += len(raw)


def pieces_of(stamp: Stamp, label: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the frame as flat uint8 tensors, one after the other; a large tensor is not copied.

    Raises:
        PeerError: a tensor cannot travel.
    """
    parts = _parts(stamp, label, tensors)
    return [torch.frombuffer(part, dtype=torch.uint8) if isinstance(part, bytearray) else part for part in parts]


def _parts(stamp: Stamp, label: str, tensors: Sequence[Tensor]) -> list[bytearray | Tensor]:
    """Return what :func:`pieces_of` does, the small ones as bytes."""
    head = head_of(label, tensors)
    checksum, num_bytes = crc32(head), 0
    small, parts = bytearray(PREFIX_BYTES) + head, list[bytearray | Tensor]()
    first = small
    for tensor in tensors:
        payload = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        raw, padding = raw_bytes(payload), bytes(padded(len(payload)) - len(payload))
        checksum, num_bytes = crc32(padding, crc32(raw, checksum)), num_bytes + padded(len(payload))
        if len(payload) < COPIED_BYTES:
            small += raw
        else:
            parts += [small, payload]
            small = bytearray()
        small += padding
    parts.append(small)
    PREFIX.pack_into(
        first, 0, MAGIC, VERSION, stamp.kind, 0, stamp.job, stamp.generation, stamp.source, stamp.sequence,
        stamp.fingerprint, len(label.encode()), len(tensors), len(head), num_bytes, checksum,
    )  # fmt: skip
    CHECKSUM.pack_into(first, PREFIX.size, crc32(memoryview(first)[: PREFIX.size]))
    return [part for part in parts if len(part)]


def head_of(label: str, tensors: Sequence[Tensor]) -> bytes:
    """Return the label and what the tensors look like, padded so that a payload can follow."""
    head = label.encode() + b"".join(map(described, tensors))
    return head + bytes(-(PREFIX_BYTES + len(head)) % ALIGNMENT)


def payload_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the length of the tensors' payload."""
    return sum(padded(tensor.numel() * tensor.element_size()) for tensor in tensors)


def all_match(own: Tensor, rows: Tensor, sources: Sequence[int]) -> bool:
    """Whether each row begins with the own frame's stamp, but of another source: a quick look, without decoding."""
    mine, theirs = own.numpy().tobytes()[:PREFIX_BYTES], rows.numpy()
    return all(
        (found := row[:PREFIX_BYTES].tobytes())[:SOURCE_AT] == mine[:SOURCE_AT]
        and found[SOURCE_AT + 4 : STAMP_BYTES] == mine[SOURCE_AT + 4 : STAMP_BYTES]
        and int.from_bytes(found[SOURCE_AT : SOURCE_AT + 4], "little") == source
        for row, source in zip(theirs, sources, strict=True)
    )


def raw_bytes(room: Tensor) -> memoryview:
    """Return the memory of a flat uint8 tensor."""
    return memoryview(room.numpy())  # type: ignore[arg-type]  # an array is a buffer; numpy says so from Python 3.12 on


def padded(num_bytes: int) -> int:
    """Return the room that so many bytes take in a payload."""
    return num_bytes + -num_bytes % ALIGNMENT


def described(tensor: Tensor) -> bytes:
    """Return dtype and shape as they travel.

    Raises:
        PeerError: they cannot.
    """
    code = CODES.get(tensor.dtype)
    if code is None or tensor.dim() > MAX_DIMS:
        raise PeerError(
            f"a tensor of {tensor.dtype} with {tensor.dim()} dims cannot be sent; "
            f"{', '.join(str(dtype) for dtype in CODES)} with at most {MAX_DIMS} dims can: convert it first"
        )
    return LOOKS.pack(code, tensor.dim()) + struct.pack(f"<{tensor.dim()}Q", *tensor.shape)


def read_prefix(start: Tensor) -> Prefix:
    """Return the fixed part of a frame, verified; a PeerError says what was found where these bytes begin none.

    Args:
        start: at least the first ``PREFIX_BYTES`` of it.
    """
    raw = raw_bytes(start)
    if len(raw) < PREFIX_BYTES:
        raise damaged(f"{len(raw)} bytes are too few for a header of {PREFIX_BYTES}")
    (magic, version, kind, zero, job, generation, source, sequence, print_, label_bytes, num_tensors, head_bytes,
     payload_bytes, checksum) = PREFIX.unpack_from(raw)  # fmt: skip
    if magic != MAGIC:
        raise damaged(f"it starts with {magic!r} instead of {MAGIC!r}")
    if version != VERSION:
        raise damaged(f"it has version {version}, and this rank reads version {VERSION}")
    (written,) = CHECKSUM.unpack_from(raw, PREFIX.size)
    found = crc32(raw[: PREFIX.size])
    if written != found:
        raise damaged(f"the checksum of its header is {found:#010x} instead of {written:#010x}")
    if kind not in set(Kind) or zero:
        raise damaged(f"it is of kind {kind}.{zero}, which does not exist")
    fits = label_bytes <= head_bytes <= MAX_HEAD_BYTES and payload_bytes <= MAX_PAYLOAD_BYTES
    if not fits or (PREFIX_BYTES + head_bytes) % ALIGNMENT:
        raise damaged(f"it announces {label_bytes} + {head_bytes} + {payload_bytes} bytes")
    stamp = Stamp(Kind(kind), job, generation, source, sequence, print_)
    return Prefix(stamp, label_bytes, num_tensors, head_bytes, payload_bytes, checksum)


def decode(frame: Tensor) -> Frame:
    """Return what the frame says, its tensors in its own memory; a PeerError where a byte is not as it was written."""
    prefix = read_prefix(frame)
    raw = raw_bytes(frame)
    if len(raw) != prefix.frame_bytes:
        raise damaged(f"it has {len(raw)} bytes instead of the {prefix.frame_bytes} it announces")
    found = crc32(raw[PREFIX_BYTES:])
    if found != prefix.checksum:
        raise damaged(f"the checksum of its content is {found:#010x} instead of {prefix.checksum:#010x}")
    start = PREFIX_BYTES + prefix.head_bytes
    head = raw[PREFIX_BYTES:start].tobytes()
    try:
        label = head[: prefix.label_bytes].decode()
    except UnicodeDecodeError as error:
        raise damaged(f"its label {head[: prefix.label_bytes]!r} is not UTF-8") from error
    tensors: list[Tensor] = []
    for dtype, shape in read_looks(head[prefix.label_bytes :], prefix.num_tensors):
        size = prod(shape) * dtype.itemsize
        if start + padded(size) > len(raw):
            raise damaged(f"tensor {len(tensors)}, {dtype} {shape}, ends behind its payload")
        tensors.append(frame[start : start + size].view(dtype).view(shape))
        start += padded(size)
    if start != len(raw):
        raise damaged(f"its tensors take {len(raw) - start} bytes less than its payload")
    return Frame(prefix.stamp, label, tuple(tensors))


def read_looks(head: bytes, num_tensors: int) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtype and shape of each tensor that the head describes."""
    looks: list[tuple[torch.dtype, tuple[int, ...]]] = []
    at = 0
    for index in range(num_tensors):
        if at + LOOKS.size > len(head):
            raise damaged(f"its head ends before tensor {index} of {num_tensors}")
        code, num_dims = LOOKS.unpack_from(head, at)
        at += LOOKS.size
        if code not in DTYPES or num_dims > MAX_DIMS or at + 8 * num_dims > len(head):
            raise damaged(f"tensor {index} is described by dtype {code} and {num_dims} dims")
        shape = struct.unpack_from(f"<{num_dims}Q", head, at)
        if 0 in shape and prod(filter(None, shape)) > MAX_PAYLOAD_BYTES:  # no payload is too short for it
            raise damaged(f"tensor {index} is described by shape {shape}")
        looks.append((DTYPES[code], shape))
        at += 8 * num_dims
    if len(head) - at >= ALIGNMENT or any(head[at:]):
        raise damaged(f"its head has {len(head) - at} bytes too many")
    return looks


def damaged(found: str) -> ProtocolError:
    """Return the error for bytes that are no frame of ours."""
    return ProtocolError(
        f"damaged frame: {found}; a frame is believed only when every byte is as it was sent: look for another program "
        "on this connection, for another version of counterpoint, or for a bad link"
    )
