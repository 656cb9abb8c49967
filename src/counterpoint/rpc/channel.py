"""One side of a connection without its socket: a state machine from bytes to messages and back.

Data flow::

    on_bytes -> handshake -> FrameReader: records -> frames -> messages
    messages -> FrameWriter: frames -> records -> pending_buffers -> on_sent
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from counterpoint.errors import PeerError, ProtocolError
from counterpoint.rpc.buffers import (
    MIN_SHARED_BYTES,
    PeerBuffers,
    ReceiveBuffer,
    ReceiveBufferPool,
    SharedBuffer,
    SharedBuffers,
)
from counterpoint.rpc.frame import (
    CLOSE,
    HEADER,
    MESSAGE,
    SHM_OFFER,
    SHM_PAYLOAD,
    SHM_RELEASE,
    RpcFrameHeader,
    RpcLimits,
    RpcMessage,
    close_frame,
    decode_body,
    decode_header,
    encode_frame,
    int_fields,
    malformed_frame,
)
from counterpoint.rpc.handshake import Handshake, HandshakeStep, SecureSession
from counterpoint.rpc.records import RECORD_BYTES, SMALL_BYTES, RecordReader, RecordWriter
from counterpoint.rpc.tensor_codec import payload_bytes

MAX_RECORDS_PER_SEND = 16  # records per send call, if they are small or were not copied


class RpcChannel:
    """State machine of one side of a connection, without effects.

    Args:
        handshake: of this side, not started.
        limits: of this side.
        pool: allocates memory for tensors.
        shared: shared buffers of both sides; None if they share no memory.
    """

    def __init__(
        self, handshake: Handshake, limits: RpcLimits, pool: ReceiveBufferPool, shared: SharedBuffers | None = None
    ) -> None:
        self._handshake = handshake
        self._limits = limits
        self._pool = pool
        self._shared = shared
        self._is_closing = False
        self._reader: FrameReader | None = None
        self._writer: FrameWriter | None = None
        self._waiting: list[list[memoryview]] = []  # frames enqueued before the handshake is complete
        self._waiting_bytes = 0
        self._handshake_out: list[memoryview] = []  # bytes of the handshake to be sent
        self._handshake_in = bytearray()
        self._handshake_missing = memoryview(b"")
        self._start_handshake_step(next(handshake))

    @property
    def is_open(self) -> bool:
        """Whether the handshake is complete, so that the peer is authenticated."""
        return self._reader is not None

    @property
    def is_closed_by_peer(self) -> bool:
        """Whether the peer has sent a close frame."""
        return self._reader is not None and self._reader.is_closed_by_peer

    @property
    def is_within_frame(self) -> bool:
        """Whether a frame, or the handshake, has begun and not ended."""
        return self._reader is None or self._reader.is_within_frame

    @property
    def unsent_bytes(self) -> int:
        """Bytes that wait to be sent."""
        return self._waiting_bytes + (self._writer.unsent_bytes if self._writer else 0)

    def enqueue(self, message: RpcMessage) -> None:
        """Append a message; raise PeerError if it cannot be encoded."""
        if self._writer is not None:
            self._enqueue_releases()  # before the message, so that the reply may use the buffer
        buffer = self._acquire_shared_buffer(message)
        if buffer is None:
            self._enqueue_frame(encode_frame(message, self._limits))
            return
        try:
            self._enqueue_frame(encode_frame(message, self._limits, SHM_PAYLOAD, buffer.number))
        except PeerError:
            buffer.is_free = True
            raise
        buffer.write(message.tensors)

    def _acquire_shared_buffer(self, message: RpcMessage) -> SharedBuffer | None:
        """Return a free shared buffer for a large message; if there is none, offer one for the next message."""
        num_bytes = payload_bytes(message.tensors)
        if self._shared is None or self._writer is None or num_bytes < MIN_SHARED_BYTES:
            return None
        buffer = self._shared.own.acquire(num_bytes)
        if buffer is None and (offered := self._shared.own.create(num_bytes)) is not None:
            fields = {"fd": offered.mapping.fd, "number": offered.number, "bytes": offered.num_bytes}
            self._enqueue_frame(encode_frame(RpcMessage("offer", fields), self._limits, SHM_OFFER))
        return buffer

    def enqueue_close(self) -> None:
        """Append a close frame, after which nothing may be sent."""
        self._enqueue_frame(close_frame())
        self._is_closing = True

    def _enqueue_frame(self, chunks: list[memoryview]) -> None:
        if self._writer is not None:
            self._writer.enqueue(chunks)
        else:
            self._waiting.append(chunks)
            self._waiting_bytes += sum(map(len, chunks))

    def pending_buffers(self) -> Sequence[memoryview]:
        """Return the buffers to send next."""
        if self._handshake_out or self._writer is None:
            return self._handshake_out
        self._enqueue_releases()
        return self._writer.pending_buffers()

    @property
    def has_releases(self) -> bool:
        """Whether there are shared buffers to release, which the peer should learn."""
        return self._shared is not None and self._shared.peer.has_released

    def _enqueue_releases(self) -> None:
        if self._shared is not None and not self._is_closing:
            for number in self._shared.peer.take_released():
                self._enqueue_frame(encode_frame(RpcMessage("back", {"number": number}), self._limits, SHM_RELEASE))

    def on_sent(self, num_bytes: int) -> None:
        """Remove bytes that have been sent from the pending buffers."""
        if not self._handshake_out and self._writer is not None:
            self._writer.on_sent(num_bytes)
            return
        while num_bytes:
            num_done = min(num_bytes, len(self._handshake_out[0]))
            num_bytes -= num_done
            self._handshake_out[0] = self._handshake_out[0][num_done:]
            if not self._handshake_out[0]:
                del self._handshake_out[0]

    def receive_buffers(self) -> Sequence[memoryview]:
        """Return the buffers to fill with the next bytes."""
        return (self._handshake_missing,) if self._reader is None else self._reader.receive_buffers()

    def on_bytes(self, num_bytes: int) -> RpcMessage | None:
        """Process received bytes; return the message that they complete, if any.

        Raises:
            ProtocolError: they are invalid; the channel must not be used any more, except to send what is pending.
        """
        if self._reader is not None:
            message = self._reader.on_bytes(num_bytes)
            if self._reader.control_frames:
                self._on_control_frame(*self._reader.control_frames.pop())
            return message
        self._handshake_missing = self._handshake_missing[num_bytes:]
        if not self._handshake_missing:
            self._continue_handshake()
        return None

    def _on_control_frame(self, frame_type: int, control: RpcMessage) -> None:
        """Process an offer or a release of a shared buffer; raise ProtocolError if it is invalid."""
        if self._shared is None:
            return
        if frame_type == SHM_RELEASE:
            self._shared.own.release(*int_fields(control, "number"))
            return
        fd, number, num_bytes = int_fields(control, "fd", "number", "bytes")
        if self._shared.peer.open(fd, number, num_bytes):
            self._enqueue_frame(encode_frame(RpcMessage("back", {"number": number}), self._limits, SHM_RELEASE))

    def close(self) -> None:
        """Release the shared buffers; received tensors stay valid."""
        if self._shared is not None:
            self._shared.own.close()

    def on_eof(self) -> None:
        """Raise ProtocolError if the connection ended within a frame."""
        if self._reader is not None:
            self._reader.on_eof()

    def _continue_handshake(self) -> None:
        """Resume the handshake with the bytes that it waited for."""
        try:
            step = self._handshake.send(bytes(self._handshake_in))
            self._start_handshake_step(step)
            if not step.num_bytes:
                self._continue_handshake()
        except StopIteration as stop:
            self._start_session(stop.value)

    def _start_handshake_step(self, step: HandshakeStep) -> None:
        if step.send:
            self._handshake_out.append(memoryview(step.send))
        self._handshake_in = bytearray(step.num_bytes)
        self._handshake_missing = memoryview(self._handshake_in)

    def _start_session(self, session: SecureSession) -> None:
        self._reader = FrameReader(
            session.reader, self._limits, self._pool, self._shared.peer if self._shared else None
        )
        self._writer = FrameWriter(session.writer, session.final_bytes)
        for chunks in self._waiting:
            self._writer.enqueue(chunks)
        self._waiting, self._waiting_bytes = [], 0


class FrameWriter:
    """Encode frames as records, for one direction of a connection; a record is encoded just before it is sent."""

    def __init__(self, writer: RecordWriter, first: bytes = b"") -> None:
        self._writer = writer
        self._frames: deque[Iterator[memoryview]] = deque()
        self._sealed: list[memoryview] = [memoryview(first)] if first else []
        self.unsent_bytes = 0
        self._in_flight_bytes = 0

    def enqueue(self, chunks: Sequence[memoryview]) -> None:
        """Append a frame.

        Args:
            chunks: its header and body; must not change until sent.
        """
        self.unsent_bytes += sum(map(len, chunks))
        self._frames.append(_split_records(chunks))

    def pending_buffers(self) -> Sequence[memoryview]:
        """Return the buffers to send next; empty if everything has been sent."""
        if not self._sealed:
            self.unsent_bytes -= self._in_flight_bytes
            self._in_flight_bytes = 0
            self._seal_records()
        return self._sealed

    def _seal_records(self) -> None:
        """Encode some records: small ones, or up to the first that occupies the scratch memory of the next."""
        for _ in range(MAX_RECORDS_PER_SEND):
            record = self._next_record()
            if record is None:
                return
            self._sealed += self._writer.seal(record)
            self._in_flight_bytes += len(record)
            if self._writer.uses_scratch and len(record) > SMALL_BYTES:
                return

    def _next_record(self) -> memoryview | None:
        while self._frames:
            record = next(self._frames[0], None)
            if record is not None:
                return record
            self._frames.popleft()
        return None

    def on_sent(self, num_bytes: int) -> None:
        """Remove bytes that have been sent from the pending buffers."""
        while num_bytes:
            num_done = min(num_bytes, len(self._sealed[0]))
            num_bytes -= num_done
            self._sealed[0] = self._sealed[0][num_done:]
            if not self._sealed[0]:
                del self._sealed[0]


def _split_records(chunks: Sequence[memoryview]) -> Iterator[memoryview]:
    """Yield the header, then the body in full records and a last one; contiguous data is not copied."""
    head, *rest = chunks
    yield head
    record = bytearray()
    for chunk in rest:
        while chunk:
            if not record and len(chunk) >= RECORD_BYTES:
                yield chunk[:RECORD_BYTES]
                chunk = chunk[RECORD_BYTES:]
                continue
            space = RECORD_BYTES - len(record)
            record += chunk[:space]
            chunk = chunk[space:]
            if len(record) == RECORD_BYTES:
                yield memoryview(record)
                record = bytearray()
    if record:
        yield memoryview(record)


class FrameReader:
    """Decode records into messages, for one direction of a connection.

    Args:
        reader: record decoder of the session.
        limits: of this side.
        pool: allocates memory for bodies.
        peer_buffers: shared buffers in which payloads may be.
    """

    def __init__(
        self, reader: RecordReader, limits: RpcLimits, pool: ReceiveBufferPool, peer_buffers: PeerBuffers | None = None
    ) -> None:
        self._reader = reader
        self._limits = limits
        self._pool = pool
        self._raw_header = memoryview(bytearray(HEADER.size))
        self._header: RpcFrameHeader | None = None
        self._buffer = ReceiveBuffer(bytearray(), 0)
        self._num_decoded = 0  # bytes of the body
        self._to_fill = list(reader.receive(self._raw_header))
        self._has_begun = False
        self._peer_buffers = peer_buffers
        self.control_frames: list[tuple[int, RpcMessage]] = []  # frames about shared buffers, with their type
        self.is_closed_by_peer = False

    @property
    def is_within_frame(self) -> bool:
        """Whether a frame has begun and not ended."""
        return self._has_begun

    def receive_buffers(self) -> Sequence[memoryview]:
        """Return the buffers to fill with the next bytes."""
        return self._to_fill

    def on_bytes(self, num_bytes: int) -> RpcMessage | None:
        """Process received bytes; return the message that they complete, if any.

        Args:
            num_bytes: number of bytes in the receive buffers, at most their size.

        Raises:
            ProtocolError: a record fails verification, or the frame is malformed.
        """
        self._has_begun = self._has_begun or num_bytes > 0
        while num_bytes:
            filled = min(num_bytes, len(self._to_fill[0]))
            num_bytes -= filled
            self._to_fill[0] = self._to_fill[0][filled:]
            if not self._to_fill[0]:
                del self._to_fill[0]
        return None if self._to_fill else self._on_record()

    def _on_record(self) -> RpcMessage | None:
        self._reader.open()
        if self._header is None:
            head = decode_header(self._raw_header, self._limits)
            if head.frame_type == CLOSE:
                self._has_begun, self.is_closed_by_peer = False, True
                return None
            self._header, self._num_decoded = head, 0
            self._buffer = self._pool.allocate(head.body_bytes)
        else:
            self._num_decoded = min(self._num_decoded + RECORD_BYTES, self._header.body_bytes)
        if self._num_decoded < self._header.body_bytes:
            end = min(self._num_decoded + RECORD_BYTES, self._header.body_bytes)
            self._to_fill = list(self._reader.receive(self._buffer.memory[self._num_decoded : end]))
            return None
        return self._on_frame(self._header)

    def _on_frame(self, head: RpcFrameHeader) -> RpcMessage | None:
        """Decode a complete frame, and prepare for the next one."""
        buffer, self._buffer, self._header, self._has_begun = self._buffer, ReceiveBuffer(bytearray(), 0), None, False
        message = decode_body(head, buffer, self._peer_buffers)
        self._to_fill = list(self._reader.receive(self._raw_header))
        if head.frame_type in {MESSAGE, SHM_PAYLOAD}:
            return message
        if self._peer_buffers is None:
            raise malformed_frame(f"{message.kind!r} is about shared buffers, which this connection does not have")
        self.control_frames.append((head.frame_type, message))
        return None

    def on_eof(self) -> None:
        """Raise ProtocolError if the connection ended within a frame."""
        if self._has_begun:
            raise ProtocolError(
                "the connection ended within a frame, which was dropped; check why the peer ended, or for an "
                "intermediary"
            )
