"""Wire format of messages: a binary header, a label, tensor metadata, and raw little-endian tensors.

::

    offset 0            HEADER_BYTES (72)           + head bytes              + payload bytes
    | fixed header, CRC | label, tensor metadata, 0s | tensor 0, 0s, tensor 1, 0s, ... |

The fixed header has a CRC of its own, so that no length is used before it has been verified; it contains a second CRC
of everything after it. Every tensor starts at a multiple of ``ALIGNMENT``. Nothing is pickled. Messages to one peer are
numbered: a lost, repeated or foreign one raises an error.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import prod

import torch
from isal.isal_zlib import crc32
from torch import Tensor

from counterpoint.errors import PeerError
from counterpoint.fabric.fingerprint import message_fingerprint
from counterpoint.rpc.tensor_codec import (
    ALIGNMENT,
    MAX_PAYLOAD_BYTES,
    as_memoryview,
    damaged_frame_error,
    decode_tensor_meta,
    encode_tensor_meta,
    padded_size,
)
from counterpoint.tensor_bytes import as_bytes

MAGIC = b"CPNT"
VERSION = 1
MAX_HEAD_BYTES = 1 << 24
COALESCE_BELOW_BYTES = 1 << 14
"""A larger tensor becomes a part of its own: copying it would cost more than another write."""

# magic, version, kind, zero, job, generation, source, sequence, fingerprint,
# label bytes, tensors, head bytes (label and descriptions, padded), payload bytes, checksum of what follows
FIXED_HEADER = struct.Struct("<4sHBBQIIQ16sHHIQI")
CHECKSUM = struct.Struct("<I")
HEADER_BYTES = FIXED_HEADER.size + CHECKSUM.size
SOURCE_OFFSET = struct.calcsize("<4sHBBQI")
COMPARED_BYTES = struct.calcsize("<4sHBBQIIQ16s")


class FrameKind(IntEnum):
    """What a frame contains."""

    MESSAGE = 1
    OPERATION = 2
    VALUE = 3


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """Identity of a frame: kind, job, generation of its ranks, sender, sequence number, and content fingerprint."""

    kind: FrameKind
    job: int
    generation: int
    source: int
    sequence: int
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class Frame:
    """A verified frame; its tensors are views of the bytes that it was decoded from."""

    header: FrameHeader
    label: str
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class FixedHeader:
    """The verified fixed-size part of a frame."""

    header: FrameHeader
    label_bytes: int
    num_tensors: int
    head_bytes: int
    payload_bytes: int
    checksum: int

    @property
    def frame_bytes(self) -> int:
        """Length of the whole frame."""
        return HEADER_BYTES + self.head_bytes + self.payload_bytes


def encode(header: FrameHeader, label: str, tensors: Sequence[Tensor]) -> Tensor:
    """Return the frame as a flat uint8 tensor, a copy; raise a PeerError if a tensor cannot be sent."""
    return torch.cat(encode_parts(header, label, tensors))


def encode_into(buffer: memoryview, header: FrameHeader, label: str, tensors: Sequence[Tensor]) -> None:
    """Write the frame to the start of the buffer, which must be long enough."""
    offset = 0
    for part in _encode_parts(header, label, tensors):
        raw = part if isinstance(part, bytearray) else as_memoryview(part)
        buffer[offset : offset + len(raw)] = raw
        offset += len(raw)


def encode_parts(header: FrameHeader, label: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the frame as a list of flat uint8 tensors to be concatenated; a large tensor is not copied.

    Raises:
        PeerError: a tensor cannot be sent.
    """
    parts = _encode_parts(header, label, tensors)
    return [torch.frombuffer(part, dtype=torch.uint8) if isinstance(part, bytearray) else part for part in parts]


def _encode_parts(header: FrameHeader, label: str, tensors: Sequence[Tensor]) -> list[bytearray | Tensor]:
    """Return the parts of the frame, small ones as bytearrays."""
    head = encode_head(label, tensors)
    checksum, num_bytes = crc32(head), 0
    small, parts = bytearray(HEADER_BYTES) + head, list[bytearray | Tensor]()
    first = small
    for tensor in tensors:
        payload = as_bytes(tensor.cpu())
        raw, padding = as_memoryview(payload), bytes(padded_size(len(payload)) - len(payload))
        checksum, num_bytes = crc32(padding, crc32(raw, checksum)), num_bytes + padded_size(len(payload))
        if len(payload) < COALESCE_BELOW_BYTES:
            small += raw
        else:
            parts += [small, payload]
            small = bytearray()
        small += padding
    parts.append(small)
    FIXED_HEADER.pack_into(
        first, 0, MAGIC, VERSION, header.kind, 0, header.job, header.generation, header.source, header.sequence,
        header.fingerprint, len(label.encode()), len(tensors), len(head), num_bytes, checksum,
    )  # fmt: skip
    CHECKSUM.pack_into(first, FIXED_HEADER.size, crc32(memoryview(first)[: FIXED_HEADER.size]))
    return [part for part in parts if len(part)]


def encode_head(label: str, tensors: Sequence[Tensor]) -> bytes:
    """Return the label and the tensor metadata, padded to the alignment of the payload."""
    head = label.encode() + b"".join(map(encode_tensor_meta, tensors))
    return head + bytes(-(HEADER_BYTES + len(head)) % ALIGNMENT)


def all_headers_match(own: Tensor, rows: Tensor, sources: Sequence[int]) -> bool:
    """Compare each row's header with the own one, except for the source; a fast check without decoding."""
    own_header, row_bytes = own.numpy().tobytes()[:HEADER_BYTES], rows.numpy()
    return all(
        (row_header := row[:HEADER_BYTES].tobytes())[:SOURCE_OFFSET] == own_header[:SOURCE_OFFSET]
        and row_header[SOURCE_OFFSET + 4 : COMPARED_BYTES] == own_header[SOURCE_OFFSET + 4 : COMPARED_BYTES]
        and int.from_bytes(row_header[SOURCE_OFFSET : SOURCE_OFFSET + 4], "little") == source
        for row, source in zip(row_bytes, sources, strict=True)
    )


def read_header(start: Tensor) -> FixedHeader:
    """Return the verified fixed header; raise a ProtocolError if the bytes do not start a frame.

    Args:
        start: at least the first ``HEADER_BYTES`` of the frame.
    """
    raw = as_memoryview(start)
    if len(raw) < HEADER_BYTES:
        raise damaged_frame_error(f"{len(raw)} bytes are too few for a header of {HEADER_BYTES}")
    (magic, version, kind, zero, job, generation, source, sequence, print_, label_bytes, num_tensors, head_bytes,
     payload_bytes, checksum) = FIXED_HEADER.unpack_from(raw)  # fmt: skip
    if magic != MAGIC:
        raise damaged_frame_error(f"it starts with {magic!r} instead of {MAGIC!r}")
    if version != VERSION:
        raise damaged_frame_error(f"it has version {version}, and this rank reads version {VERSION}")
    (expected,) = CHECKSUM.unpack_from(raw, FIXED_HEADER.size)
    actual = crc32(raw[: FIXED_HEADER.size])
    if expected != actual:
        raise damaged_frame_error(f"the checksum of its header is {actual:#010x} instead of {expected:#010x}")
    if kind not in set(FrameKind) or zero:
        raise damaged_frame_error(f"its kind {kind}.{zero} does not exist")
    fits = label_bytes <= head_bytes <= MAX_HEAD_BYTES and payload_bytes <= MAX_PAYLOAD_BYTES
    if not fits or (HEADER_BYTES + head_bytes) % ALIGNMENT:
        raise damaged_frame_error(f"it announces {label_bytes} + {head_bytes} + {payload_bytes} bytes")
    stamp = FrameHeader(FrameKind(kind), job, generation, source, sequence, print_)
    return FixedHeader(stamp, label_bytes, num_tensors, head_bytes, payload_bytes, checksum)


def decode(frame: Tensor) -> Frame:
    """Return the frame, its tensors as views; raise a ProtocolError if any byte differs from what was sent."""
    prefix = read_header(frame)
    raw = as_memoryview(frame)
    if len(raw) != prefix.frame_bytes:
        raise damaged_frame_error(f"it has {len(raw)} bytes instead of the {prefix.frame_bytes} it announces")
    actual = crc32(raw[HEADER_BYTES:])
    if actual != prefix.checksum:
        raise damaged_frame_error(f"the checksum of its content is {actual:#010x} instead of {prefix.checksum:#010x}")
    start = HEADER_BYTES + prefix.head_bytes
    head = raw[HEADER_BYTES:start].tobytes()
    try:
        label = head[: prefix.label_bytes].decode()
    except UnicodeDecodeError as error:
        raise damaged_frame_error(f"its label {head[: prefix.label_bytes]!r} is not UTF-8") from error
    payload = frame[start:]
    tensors = [
        payload[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(shape)
        for dtype, shape, offset in decode_tensor_meta(
            head[prefix.label_bytes :], prefix.num_tensors, prefix.payload_bytes
        )
    ]
    return Frame(prefix.header, label, tuple(tensors))


class MessageSequencer:
    """Numbers the messages of one rank, and verifies the numbers of received ones.

    Args:
        rank: the own rank.
        job: the job's number.
        generation: of its ranks.
    """

    def __init__(self, rank: int, job: int, generation: int) -> None:
        self._rank = rank
        self._job = job
        self._generation = generation
        self._num_sent: defaultdict[int, int] = defaultdict(int)
        self._num_received: defaultdict[int, int] = defaultdict(int)

    def next_header(self, peer: int, label: str, tensors: Sequence[Tensor]) -> FrameHeader:
        """Return the header of the next message to the peer."""
        number = self._num_sent[peer]
        self._num_sent[peer] += 1
        fingerprint_ = message_fingerprint(label, tensors)
        return FrameHeader(FrameKind.MESSAGE, self._job, self._generation, self._rank, number, fingerprint_)

    def verify(self, peer: int, frame: Frame) -> None:
        """Check that the frame is the peer's next message.

        Raises:
            PeerError: it belongs to another job or generation, or a message is missing.
        """
        fingerprint_, number = message_fingerprint(frame.label, frame.tensors), self._num_received[peer]
        expected = FrameHeader(FrameKind.MESSAGE, self._job, self._generation, peer, number, fingerprint_)
        if frame.header != expected:
            raise PeerError(
                f"rank {self._rank} received {frame.header} for {frame.label} where {expected} should have come from "
                f"rank {peer}; messages come complete and in order, from ranks of one job: look for ranks of an "
                "earlier run"
            )
        self._num_received[peer] += 1
