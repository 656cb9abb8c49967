"""How much a peer may ask for: in bytes, in time, in number.

A letter as bytes and back: a kind, fields that JSON can hold, and tensors; nothing in it can become code.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final, NoReturn, TypeAlias

import torch
from torch import Tensor

from counterpoint.errors import PeerError, ProtocolError
from counterpoint.fabric.frames import (
    ALIGNMENT,
    as_memoryview,
    decode_tensor_meta,
    encode_tensor_meta,
    padded_size,
    payload_bytes,
)
from counterpoint.rpc.buffers import PeerBuffers, ReceiveBuffer


@dataclass(frozen=True, slots=True)
class RpcLimits:
    """What one side of a connection puts up with.

    Args:
        text_bytes: of a letter's kind and fields, and of what its tensors look like.
        payload_bytes: of a letter's tensors.
        unsent_bytes: a server does not read from a connection with more of them, and a client asks nothing more.
        connections: how many a server has at a time.
        strangers: how many of them may not have proved yet that they have the key; the oldest goes first.
        greeting_s: the longest that a greeting may last.
        patience_s: the longest that a peer may take no byte, or none of a frame that has begun may come.
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
HEADER = struct.Struct("<4sBBHIIQ")  # magic, version, sort, tensors, bytes of text, of text and looks, of the payload
MESSAGE: Final = 1
CLOSE: Final = 2
SHM_PAYLOAD: Final = 3  # a letter whose tensors are on a shelf, which its text names
SHM_OFFER: Final = 4  # of a shelf
SHM_RELEASE: Final = 5  # a shelf that the other side has found, or needs no more
FRAME_TYPES: Final = {MESSAGE, CLOSE, SHM_PAYLOAD, SHM_OFFER, SHM_RELEASE}
MAX_KIND: Final = 64
MAX_TENSORS: Final = (1 << 16) - 1

JsonValue: TypeAlias = Any
"""None, a bool, an int, a float, a string, or a list or a mapping of these."""


@dataclass(frozen=True, slots=True, eq=False)
class RpcMessage:
    """What one process tells another.

    Args:
        kind: what it is about, in a word.
        fields: what JSON can hold.
        tensors: a sent one must stay as it is until it has left; a received one is the receiver's to keep.
    """

    kind: str
    fields: Mapping[str, JsonValue] = field(default_factory=dict)
    tensors: Sequence[Tensor] = ()


@dataclass(frozen=True, slots=True)
class RpcFrameHeader:
    """How long the parts of a frame are, within the limits."""

    frame_type: int
    num_tensors: int
    text_bytes: int
    front_bytes: int
    payload_bytes: int

    @property
    def body_bytes(self) -> int:
        """Length of what follows the head."""
        return self.front_bytes if self.frame_type == SHM_PAYLOAD else self.front_bytes + self.payload_bytes


def encode_frame(
    message: RpcMessage, limits: RpcLimits, frame_type: int = MESSAGE, shared_buffer: int | None = None
) -> list[memoryview]:
    """Return the frame in pieces: its head, and then what stands behind it; tensors are not copied.

    Args:
        letter: to be sent.
        limits: of this side.
        sort: of the frame.
        shelf: where its tensors are; None where they travel with it.

    Raises:
        PeerError: the letter cannot travel.
    """
    text, looks = encode_text(message, shared_buffer), b"".join(map(encode_tensor_meta, message.tensors))
    front = text + looks + bytes(-(len(text) + len(looks)) % ALIGNMENT)
    num_bytes = payload_bytes(message.tensors)
    if len(front) > limits.text_bytes or num_bytes > limits.payload_bytes or len(message.tensors) > MAX_TENSORS:
        raise PeerError(
            f"{message.kind[:MAX_KIND]!r} with {len(message.tensors)} tensors has {len(front)} + {num_bytes} bytes; "
            f"a letter has at most {MAX_TENSORS} tensors and {limits.text_bytes} + {limits.payload_bytes} bytes: send "
            "it in parts"
        )
    head = HEADER.pack(MAGIC, VERSION, frame_type, len(message.tensors), len(text), len(front), num_bytes)
    return [
        memoryview(head),
        memoryview(front),
        *(() if shared_buffer is not None else payload_chunks(message.tensors)),
    ]


def payload_chunks(tensors: Sequence[Tensor]) -> Iterator[memoryview]:
    """Yield the bytes of the tensors, each padded."""
    for tensor in tensors:
        raw = as_memoryview(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8))
        if len(raw):
            yield raw
        if padding := padded_size(len(raw)) - len(raw):
            yield memoryview(bytes(padding))


def close_frame() -> list[memoryview]:
    """Return the frame after which none follows."""
    return [memoryview(HEADER.pack(MAGIC, VERSION, CLOSE, 0, 0, 0, 0))]


def encode_text(message: RpcMessage, shared_buffer: int | None = None) -> bytes:
    """Return kind and fields, and the shelf if there is one, as text.

    Raises:
        PeerError: they are not what JSON can hold.
    """
    said = [message.kind, message.fields] if shared_buffer is None else [message.kind, message.fields, shared_buffer]
    if not 0 < len(message.kind) <= MAX_KIND:
        raise PeerError(
            f"a letter of kind {message.kind[:MAX_KIND]!r} cannot travel: a kind has 1 to {MAX_KIND} letters"
        )
    try:
        text = _JSON_ENCODER.encode(said)
    except (TypeError, ValueError, RecursionError) as error:
        raise PeerError(
            f"the fields of {message.kind[:MAX_KIND]!r} cannot travel: {error}; "
            "numbers (no nan), texts, lists and mappings can"
        ) from error
    return text.encode()


def decode_header(raw: memoryview, limits: RpcLimits) -> RpcFrameHeader:
    """Return the lengths of a frame.

    Raises:
        ProtocolError: it is none, or it is beyond the limits.
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
        raise malformed_frame("it says goodbye and goes on")
    return RpcFrameHeader(sort, num_tensors, text_bytes, front_bytes, num_bytes)


def decode_body(header: RpcFrameHeader, buffer: ReceiveBuffer, peer_buffers: PeerBuffers | None) -> RpcMessage:
    """Return what a frame says, its tensors in the room or on a shelf.

    Args:
        head: of the frame.
        room: with its body.
        borrowing: the shelves of the other side; None where there are none.

    Raises:
        ProtocolError: it contradicts itself.
    """
    front = bytes(buffer.memory[: header.front_bytes])
    kind, fields, shelf = decode_text(front[: header.text_bytes])
    if (header.frame_type == SHM_PAYLOAD) != (shelf is not None) or (shelf is not None and peer_buffers is None):
        raise malformed_frame("its tensors are neither in it nor on a shelf")
    start = header.front_bytes
    if shelf is not None and peer_buffers is not None:
        buffer, start = ReceiveBuffer(peer_buffers.view(shelf, header.payload_bytes), header.payload_bytes), 0
    end = start + header.payload_bytes
    tensors: list[Tensor] = []
    for dtype, shape in decode_tensor_meta(front[header.text_bytes :], header.num_tensors):
        size = prod(shape) * dtype.itemsize
        if start + padded_size(size) > end:
            raise malformed_frame(f"tensor {len(tensors)}, {dtype} {shape}, ends behind its payload")
        tensors.append(decode_tensor(buffer, dtype, shape, start))
        start += padded_size(size)
    if start != end:
        raise malformed_frame(f"its tensors take {end - start} bytes less than its payload")
    return RpcMessage(kind, fields, tuple(tensors))


def decode_tensor(buffer: ReceiveBuffer, dtype: torch.dtype, shape: tuple[int, ...], start: int) -> Tensor:
    """Return a tensor in the room.

    Raises:
        ProtocolError: it holds what its dtype does not.
    """
    tensor = buffer.tensor(dtype, shape, start)
    if dtype == torch.bool and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
        raise malformed_frame(f"a tensor of {dtype} {shape} is neither true nor false")
    return tensor


def decode_text(text: bytes) -> tuple[str, dict[str, JsonValue], int | None]:
    """Return kind, fields and the number of a shelf, if there is one.

    Raises:
        ProtocolError: the text is not as :func:`written` writes it.
    """
    try:
        found = _JSON_DECODER.decode(text.decode())
    except (ValueError, RecursionError) as error:  # of UTF-8 and of numbers, too
        raise malformed_frame(f"its text is no JSON ({ascii(str(error))[:80]})") from error
    match found:
        case [str(kind), dict(fields)] if 0 < len(kind) <= MAX_KIND:
            return kind, fields, None
        case [str(kind), dict(fields), int(shelf)] if 0 < len(kind) <= MAX_KIND and shelf is not True:
            return kind, fields, int(shelf)
        case _:
            raise malformed_frame("its text is not a kind and fields")


def int_fields(message: RpcMessage, *names: str) -> list[int]:
    """Return these fields, and there are no others.

    Raises:
        ProtocolError: they are not numbers, or not these.
    """
    found = [value for name in names if type(value := message.fields.get(name)) is int]
    if len(message.fields) != len(names) or message.tensors or len(found) != len(names):
        raise malformed_frame(f"{message.kind!r} is not about {', '.join(names)}")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _reject_duplicates(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name comes twice")
    return found


_JSON_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
_JSON_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_reject_duplicates)


def malformed_frame(problem: str) -> ProtocolError:
    """Return the error for what is no frame of ours, though it came from a peer of ours."""
    return ProtocolError(
        f"a malformed frame: {problem}; it was not looked at further and changed nothing: look for another version of "
        "counterpoint at the other end"
    )
