"""Frames: a message (kind, JSON fields and tensors) as bytes and back. Decoding never executes code.

Layout::

    header (fixed size) | text: [kind, fields(, shared buffer)] | tensor metadata | padding | tensors, each padded
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from counterpoint.errors import PeerError, ProtocolError
from counterpoint.json_reader import JsonValue, parse_json
from counterpoint.rpc.buffers import PeerBuffers, ReceiveBuffer
from counterpoint.rpc.tensor_codec import (
    ALIGNMENT,
    as_memoryview,
    decode_tensor_meta,
    encode_tensor_meta,
    padded_size,
    payload_bytes,
)
from counterpoint.tensor_bytes import as_bytes
from counterpoint.value_codec import format_json


@dataclass(frozen=True, slots=True)
class RpcLimits:
    """Resource limits of one side of a connection.

    Args:
        text_bytes: of a message's kind, fields and tensor metadata.
        payload_bytes: of a message's tensors.
        unsent_bytes: a server stops reading from a connection with more unsent data, and a client stops sending
            requests.
        max_connections: of a server.
        max_unauthenticated: connections that may be in the handshake; the oldest is dropped first.
        handshake_s: longest duration of a handshake.
        idle_timeout_s: longest time in which a peer receives no byte, or sends none of a frame that has begun.
    """

    text_bytes: int = 1 << 20
    payload_bytes: int = 1 << 32
    unsent_bytes: int = 1 << 26
    max_connections: int = 1024
    max_unauthenticated: int = 64
    handshake_s: float = 5.0
    idle_timeout_s: float = 30.0


DEFAULT_LIMITS = RpcLimits()


MAGIC: Final = b"CPWL"
VERSION: Final = 1
HEADER = struct.Struct(
    "<4sBBHIIQ"
)  # magic, version, frame type, tensors, bytes of text, of text and metadata, of the payload
MESSAGE: Final = 1
CLOSE: Final = 2
SHM_PAYLOAD: Final = 3  # a message whose tensors are in the shared buffer that its text names
SHM_OFFER: Final = 4  # of a shared buffer
SHM_RELEASE: Final = 5  # of a shared buffer that the peer has mapped, or no longer needs
FRAME_TYPES: Final = {MESSAGE, CLOSE, SHM_PAYLOAD, SHM_OFFER, SHM_RELEASE}
MAX_KIND: Final = 64
MAX_TENSORS: Final = (1 << 16) - 1


@dataclass(frozen=True, slots=True, eq=False)
class RpcMessage:
    """A message between two processes.

    Args:
        kind: message type.
        fields: JSON values.
        tensors: must not change until sent; received ones are owned by the receiver.
    """

    kind: str
    fields: Mapping[str, JsonValue] = field(default_factory=dict)
    tensors: Sequence[Tensor] = ()


@dataclass(frozen=True, slots=True)
class RpcFrameHeader:
    """Lengths of the parts of a frame, within the limits."""

    frame_type: int
    num_tensors: int
    text_bytes: int
    front_bytes: int
    payload_bytes: int

    @property
    def body_bytes(self) -> int:
        """Length of what follows the header on the socket."""
        return self.front_bytes if self.frame_type == SHM_PAYLOAD else self.front_bytes + self.payload_bytes


def encode_frame(
    message: RpcMessage, limits: RpcLimits, frame_type: int = MESSAGE, shared_buffer: int | None = None
) -> list[memoryview]:
    """Return the frame as a list of buffers: header, then body; tensors are not copied.

    Args:
        message: to be sent.
        limits: of this side.
        frame_type: of the frame.
        shared_buffer: number of the shared buffer with its tensors; None if they are part of the frame.

    Raises:
        PeerError: the message exceeds the limits or cannot be encoded.
    """
    text, metadata = encode_text(message, shared_buffer), b"".join(map(encode_tensor_meta, message.tensors))
    front_part = text + metadata + bytes(-(len(text) + len(metadata)) % ALIGNMENT)
    num_bytes = payload_bytes(message.tensors)
    if len(front_part) > limits.text_bytes or num_bytes > limits.payload_bytes or len(message.tensors) > MAX_TENSORS:
        raise PeerError(
            f"{message.kind[:MAX_KIND]!r} with {len(message.tensors)} tensors has {len(front_part)} + {num_bytes} "
            "bytes; "
            f"the limit is {MAX_TENSORS} tensors and {limits.text_bytes} + {limits.payload_bytes} bytes; send it in "
            "parts"
        )
    head = HEADER.pack(MAGIC, VERSION, frame_type, len(message.tensors), len(text), len(front_part), num_bytes)
    return [
        memoryview(head),
        memoryview(front_part),
        *(() if shared_buffer is not None else payload_chunks(message.tensors)),
    ]


def payload_chunks(tensors: Sequence[Tensor]) -> Iterator[memoryview]:
    """Yield the bytes of the tensors, each padded."""
    for tensor in tensors:
        raw = as_memoryview(as_bytes(tensor.cpu()))
        if len(raw):
            yield raw
        if padding := padded_size(len(raw)) - len(raw):
            yield memoryview(bytes(padding))


def close_frame() -> list[memoryview]:
    """Return the frame that ends a connection."""
    return [memoryview(HEADER.pack(MAGIC, VERSION, CLOSE, 0, 0, 0, 0))]


def encode_text(message: RpcMessage, shared_buffer: int | None = None) -> bytes:
    """Return kind and fields, and the shared buffer's number if there is one, as JSON.

    Raises:
        PeerError: they cannot be encoded.
    """
    content = [message.kind, message.fields] if shared_buffer is None else [message.kind, message.fields, shared_buffer]
    if not 0 < len(message.kind) <= MAX_KIND:
        raise PeerError(
            f"a message of kind {message.kind[:MAX_KIND]!r} cannot be sent: a kind has 1 to {MAX_KIND} characters"
        )
    try:
        text = format_json(content)
    except (TypeError, ValueError) as error:
        raise PeerError(
            f"the fields of {message.kind[:MAX_KIND]!r} cannot be encoded as JSON: {error}; "
            "use finite numbers, strings, lists and mappings"
        ) from error
    return text.encode()


def decode_header(raw: memoryview, limits: RpcLimits) -> RpcFrameHeader:
    """Return the lengths of a frame.

    Raises:
        ProtocolError: it is not a frame, or exceeds the limits.
    """
    magic, version, sort, num_tensors, text_bytes, front_bytes, num_bytes = HEADER.unpack(raw)
    if magic != MAGIC or version != VERSION or sort not in FRAME_TYPES:
        raise malformed_frame(f"it begins with {magic!r}, version {version}, sort {sort}")
    fits = text_bytes <= front_bytes <= limits.text_bytes and num_bytes <= limits.payload_bytes
    if not fits or front_bytes % ALIGNMENT or num_bytes % ALIGNMENT:
        raise malformed_frame(
            f"it announces {text_bytes} of {front_bytes} and {num_bytes} bytes, where {limits.text_bytes} and "
            f"{limits.payload_bytes} are allowed"
        )
    if sort == CLOSE and any((num_tensors, text_bytes, front_bytes, num_bytes)):
        raise malformed_frame("a close frame with content")
    return RpcFrameHeader(sort, num_tensors, text_bytes, front_bytes, num_bytes)


def decode_body(header: RpcFrameHeader, buffer: ReceiveBuffer, peer_buffers: PeerBuffers | None) -> RpcMessage:
    """Return the message of a frame; its tensors are views of the buffer or of a shared buffer.

    Args:
        header: of the frame.
        buffer: with its body.
        peer_buffers: shared buffers of the peer; None if there are none.

    Raises:
        ProtocolError: it is inconsistent.
    """
    front_part = bytes(buffer.memory[: header.front_bytes])
    kind, fields, shared_buffer = decode_text(front_part[: header.text_bytes])
    if (header.frame_type == SHM_PAYLOAD) != (shared_buffer is not None) or (
        shared_buffer is not None and peer_buffers is None
    ):
        raise malformed_frame("its frame type and its shared buffer do not match")
    start = header.front_bytes
    if shared_buffer is not None and peer_buffers is not None:
        buffer, start = ReceiveBuffer(peer_buffers.view(shared_buffer, header.payload_bytes), header.payload_bytes), 0
    metadata = decode_tensor_meta(front_part[header.text_bytes :], header.num_tensors, header.payload_bytes)
    tensors = [decode_tensor(buffer, dtype, shape, start + offset) for dtype, shape, offset in metadata]
    return RpcMessage(kind, fields, tuple(tensors))


def decode_tensor(buffer: ReceiveBuffer, dtype: torch.dtype, shape: tuple[int, ...], start: int) -> Tensor:
    """Return a tensor view of the buffer.

    Raises:
        ProtocolError: it has values that its dtype does not allow.
    """
    tensor = buffer.tensor(dtype, shape, start)
    if dtype == torch.bool and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
        raise malformed_frame(f"a tensor of {dtype} {shape} is neither true nor false")
    return tensor


def decode_text(text: bytes) -> tuple[str, dict[str, JsonValue], int | None]:
    """Return kind, fields, and the shared buffer's number or None.

    Raises:
        ProtocolError: the text is not what :func:`encode_text` writes.
    """
    try:
        content = parse_json(text)
    except ValueError as error:
        raise malformed_frame(f"its text is not JSON ({ascii(str(error))[:80]})") from error
    match content:
        case [str(kind), dict(fields)] if 0 < len(kind) <= MAX_KIND:
            return kind, fields, None
        case [str(kind), dict(fields), int(shared_buffer)] if 0 < len(kind) <= MAX_KIND and shared_buffer is not True:
            return kind, fields, int(shared_buffer)
        case _:
            raise malformed_frame("its text is not a list of kind and fields")


def int_fields(message: RpcMessage, *names: str) -> list[int]:
    """Return the values of these integer fields, which must be the only ones.

    Raises:
        ProtocolError: they are not.
    """
    values = [value for name in names if type(value := message.fields.get(name)) is int]
    if len(message.fields) != len(names) or message.tensors or len(values) != len(names):
        raise malformed_frame(f"{message.kind!r} does not have exactly the integer fields {', '.join(names)}")
    return values


def malformed_frame(problem: str) -> ProtocolError:
    """Return the error for bytes that are not a valid frame, although the peer is authenticated."""
    return ProtocolError(
        f"a malformed frame: {problem}; it was dropped and no state changed; check that the peer runs the same version "
        "of counterpoint"
    )
