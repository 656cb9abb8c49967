"""Messages as letters of the wire, and back; small ones that leave together are one letter.

A shard's state, which may be larger than a letter, is as many of them as it takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from counterpoint.errors import ProtocolError
from counterpoint.fabric.frames import payload_bytes
from counterpoint.ps.message_codec import JsonValue, PsMessage, decode_message, encode_message, malformed_message
from counterpoint.ps.messages import Ack, InstallSnapshot, PullReply, PullRequest, PushReply, PushRequest
from counterpoint.ps.write_ahead_log import decode_one, encode_chunks
from counterpoint.rpc.frame import RpcMessage, int_fields

BATCH_KIND: Final = "bundle"
BATCH_BYTES: Final = 1 << 19
MAX_BATCH_MESSAGES: Final = 64
BATCHED_TYPES: Final = (PushRequest, PullRequest, PushReply, PullReply, Ack)
CHUNK_KIND: Final = "piece"
CHUNK_BYTES: Final = 1 << 26
MAX_CHUNKED_BYTES: Final = 1 << 42
CHUNKED_TYPES: Final = {"installsnapshot": InstallSnapshot}


def to_rpc_messages(message: PsMessage, chunk_bytes: int = CHUNK_BYTES) -> Iterator[RpcMessage]:
    """Yield a message as it travels: one letter, or for a state as many as it takes.

    Args:
        message: what is said; its tensors are not copied.
        piece_bytes: the most that a letter of a state holds.
    """
    if not isinstance(message, InstallSnapshot):
        yield RpcMessage(*encode_message(message))
        return
    flat = encode_chunks(message)
    whole, at = sum(map(len, flat)), 0
    for piece in flat:
        for part in torch.split(piece, chunk_bytes):
            yield RpcMessage(CHUNK_KIND, {"whole": whole, "at": at}, (part,))
            at += len(part)


class MessageBatch:
    """Messages that are going to leave over one connection, in their order."""

    def __init__(self) -> None:
        self._encoded: list[tuple[str, dict[str, JsonValue], list[Tensor]]] = []
        self._num_bytes = 0

    def add(self, message: PsMessage) -> bool:
        """The message is the last of the bundle; tell whether there may be more."""
        part = encode_message(message)
        self._encoded.append(part)
        self._num_bytes += payload_bytes(part[2])
        return self._num_bytes < BATCH_BYTES and len(self._encoded) < MAX_BATCH_MESSAGES

    def drain(self) -> Iterator[RpcMessage]:
        """Yield what is in the bundle, which has nothing then: one letter, but large messages travel alone."""
        parts, self._encoded, self._num_bytes = self._encoded, [], 0
        if parts and payload_bytes(parts[-1][2]) >= BATCH_BYTES:
            yield from _pack_batch(parts[:-1])
            parts = parts[-1:]
        yield from _pack_batch(parts)


def _pack_batch(parts: list[tuple[str, dict[str, JsonValue], list[Tensor]]]) -> Iterator[RpcMessage]:
    if len(parts) == 1:
        yield RpcMessage(*parts[0])
    elif parts:
        said = [[kind, fields, len(tensors)] for kind, fields, tensors in parts]
        yield RpcMessage(BATCH_KIND, {"messages": said}, [tensor for _, _, tensors in parts for tensor in tensors])


def unpack_batch(letter: RpcMessage) -> list[PsMessage]:
    """Return the messages of a bundle.

    Raises:
        ProtocolError: it is none.
    """
    found: list[PsMessage] = []
    said, at = letter.fields.get("messages"), 0
    if len(letter.fields) != 1 or not isinstance(said, list) or not said:
        raise malformed_message("a bundle of nothing")
    for part in said:
        match part:
            case [str(kind), dict(fields), int(count)] if type(count) is int and 0 <= count <= len(letter.tensors) - at:
                found.append(decode_message(kind, fields, letter.tensors[at : at + count]))
                at += count
            case _:
                raise malformed_message("a bundle of what is no message")
    if at != len(letter.tensors):
        raise malformed_message(f"a bundle with {len(letter.tensors)} tensors, of which its messages have {at}")
    return found


class MessageAssembler:
    """The letters of one connection as messages."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None
        self._num_received = 0

    def feed(self, letter: RpcMessage) -> list[PsMessage]:
        """Return the messages that a letter is, or completes.

        Raises:
            ProtocolError: it is none, or not the next piece.
        """
        if letter.kind == BATCH_KIND:
            return unpack_batch(letter)
        if letter.kind != CHUNK_KIND:
            return [decode_message(letter.kind, dict(letter.fields), letter.tensors)]
        (part,) = letter.tensors if len(letter.tensors) == 1 else (None,)
        whole, at = int_fields(RpcMessage(CHUNK_KIND, letter.fields), "whole", "at")
        if at == 0 and 0 < whole <= MAX_CHUNKED_BYTES:
            self._buffer, self._num_received = _allocate_buffer(whole), 0
        room, end = self._buffer, at + (0 if part is None else len(part))
        fits = room is not None and at == self._num_received and whole == len(room) and end <= whole
        if part is None or room is None or not fits or part.dtype != torch.uint8 or part.dim() != 1:
            raise ProtocolError(
                f"a piece of a state at {at} of {whole} bytes, where {self._num_received} had come; look at what the other "
                "side runs"
            )
        room[at:end].copy_(part)
        self._num_received = end
        if end < whole:
            return []
        self._buffer, self._num_received = None, 0
        message: PsMessage = decode_one(CHUNKED_TYPES, room)
        return [message]


def _allocate_buffer(num_bytes: int) -> Tensor:
    """Return memory for a state; a ProtocolError where there is none."""
    try:
        return torch.empty(num_bytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise ProtocolError(f"a state of {num_bytes} bytes came, for which there is no memory here") from error
