"""Conversion between protocol messages and RPC messages: batching of small ones, chunking of shard states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from counterpoint.errors import ProtocolError
from counterpoint.json_reader import JsonValue
from counterpoint.ps.message_codec import PsMessage, decode_message, encode_message, malformed_message
from counterpoint.ps.messages import Ack, InstallSnapshot, PullReply, PullRequest, PushReply, PushRequest
from counterpoint.ps.write_ahead_log import decode_one, encode_chunks
from counterpoint.rpc.frame import RpcMessage, int_fields
from counterpoint.rpc.tensor_codec import payload_bytes

BATCH_KIND: Final = "batch"
BATCH_BYTES: Final = 1 << 19
MAX_BATCH_MESSAGES: Final = 64
BATCHED_TYPES: Final = (PushRequest, PullRequest, PushReply, PullReply, Ack)
CHUNK_KIND: Final = "chunk"
CHUNK_BYTES: Final = 1 << 26
MAX_CHUNKED_BYTES: Final = 1 << 42
CHUNKED_TYPES: Final = {"installsnapshot": InstallSnapshot}


def to_rpc_messages(message: PsMessage, chunk_bytes: int = CHUNK_BYTES) -> Iterator[RpcMessage]:
    """Yield a message as RPC messages: one, or for a shard state as many chunks as it takes.

    Args:
        message: to be sent; its tensors are not copied.
        chunk_bytes: largest chunk of a state.
    """
    if not isinstance(message, InstallSnapshot):
        yield RpcMessage(*encode_message(message))
        return
    chunks = encode_chunks(message)
    total_bytes, offset = sum(map(len, chunks)), 0
    for chunk in chunks:
        for part in torch.split(chunk, chunk_bytes):
            yield RpcMessage(CHUNK_KIND, {"whole": total_bytes, "at": offset}, (part,))
            offset += len(part)


class MessageBatch:
    """Messages that are about to be sent on one connection, in order."""

    def __init__(self) -> None:
        self._encoded: list[tuple[str, dict[str, JsonValue], list[Tensor]]] = []
        self._num_bytes = 0

    def add(self, message: PsMessage) -> bool:
        """Append a message; tell whether the batch may grow further."""
        part = encode_message(message)
        self._encoded.append(part)
        self._num_bytes += payload_bytes(part[2])
        return self._num_bytes < BATCH_BYTES and len(self._encoded) < MAX_BATCH_MESSAGES

    def drain(self) -> Iterator[RpcMessage]:
        """Yield the batch as RPC messages and empty it; large messages are sent separately."""
        parts, self._encoded, self._num_bytes = self._encoded, [], 0
        if parts and payload_bytes(parts[-1][2]) >= BATCH_BYTES:
            yield from _pack_batch(parts[:-1])
            parts = parts[-1:]
        yield from _pack_batch(parts)


def _pack_batch(parts: list[tuple[str, dict[str, JsonValue], list[Tensor]]]) -> Iterator[RpcMessage]:
    if len(parts) == 1:
        yield RpcMessage(*parts[0])
    elif parts:
        entries = [[kind, fields, len(tensors)] for kind, fields, tensors in parts]
        yield RpcMessage(BATCH_KIND, {"messages": entries}, [tensor for _, _, tensors in parts for tensor in tensors])


def unpack_batch(rpc_message: RpcMessage) -> list[PsMessage]:
    """Return the messages of a batch.

    Raises:
        ProtocolError: it is malformed.
    """
    messages: list[PsMessage] = []
    entries, num_taken = rpc_message.fields.get("messages"), 0
    if len(rpc_message.fields) != 1 or not isinstance(entries, list) or not entries:
        raise malformed_message("an empty batch")
    for entry in entries:
        match entry:
            case [str(kind), dict(fields), int(count)] if (
                type(count) is int and 0 <= count <= len(rpc_message.tensors) - num_taken
            ):
                messages.append(decode_message(kind, fields, rpc_message.tensors[num_taken : num_taken + count]))
                num_taken += count
            case _:
                raise malformed_message("a batch with an invalid entry")
    if num_taken != len(rpc_message.tensors):
        raise malformed_message(
            f"a batch with {len(rpc_message.tensors)} tensors, of which its messages use {num_taken}"
        )
    return messages


class MessageAssembler:
    """Reassemble the messages of one connection."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None
        self._num_received = 0

    def feed(self, rpc_message: RpcMessage) -> list[PsMessage]:
        """Return the messages that an RPC message contains or completes.

        Raises:
            ProtocolError: it is malformed, or not the next chunk.
        """
        if rpc_message.kind == BATCH_KIND:
            return unpack_batch(rpc_message)
        if rpc_message.kind != CHUNK_KIND:
            return [decode_message(rpc_message.kind, dict(rpc_message.fields), rpc_message.tensors)]
        if [(tensor.dtype, tensor.dim()) for tensor in rpc_message.tensors] != [(torch.uint8, 1)]:
            raise malformed_message("a chunk of a state that is not one tensor of bytes")
        (chunk,) = rpc_message.tensors
        total_bytes, offset = int_fields(RpcMessage(CHUNK_KIND, rpc_message.fields), "whole", "at")
        if offset == 0 and 0 < total_bytes <= MAX_CHUNKED_BYTES:
            self._buffer, self._num_received = _allocate_buffer(total_bytes), 0
        buffer, end = self._buffer, offset + len(chunk)
        fits = buffer is not None and offset == self._num_received and total_bytes == len(buffer) and end <= total_bytes
        if buffer is None or not fits:
            raise ProtocolError(
                f"a chunk of a state at {offset} of {total_bytes} bytes, but {self._num_received} bytes were received; "
                "check that both sides run the same version"
            )
        buffer[offset:end].copy_(chunk)
        self._num_received = end
        if end < total_bytes:
            return []
        self._buffer, self._num_received = None, 0
        message: PsMessage = decode_one(CHUNKED_TYPES, buffer)
        return [message]


def _allocate_buffer(num_bytes: int) -> Tensor:
    """Return memory for a state; raise ProtocolError if there is none."""
    try:
        return torch.empty(num_bytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise ProtocolError(f"a state of {num_bytes} bytes arrived, but there is not enough memory for it") from error
