"""Records out of frames: what to send next; a record is sealed when its turn has come, and no sooner.

Frames out of records: what to fill next, and the letters that are complete; no sockets in here.

One side of a connection without its socket: bytes in, bytes and letters out, from the greeting to the goodbye.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from counterpoint.errors import PeerError, ProtocolError
from counterpoint.fabric.frames import payload_bytes
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

MAX_RECORDS_PER_SEND = 16  # records that are sent at once, if they are small or stay where they are


class FrameWriter:
    """Sends one direction of a connection.

    Args:
        sealer: of the session.
        first: what is to be sent before any record.
    """

    def __init__(self, writer: RecordWriter, first: bytes = b"") -> None:
        self._writer = writer
        self._frames: deque[Iterator[memoryview]] = deque()
        self._sealed: list[memoryview] = [memoryview(first)] if first else []
        self.unsent_bytes = 0
        self._in_flight_bytes = 0

    def enqueue(self, chunks: Sequence[memoryview]) -> None:
        """A frame will be sent after those before it.

        Args:
            pieces: its head and what stands behind it; they must not change before they have been sent.
        """
        self.unsent_bytes += sum(map(len, chunks))
        self._frames.append(_split_records(chunks))

    def pending_buffers(self) -> Sequence[memoryview]:
        """Return what to send next; nothing if everything has been sent."""
        if not self._sealed:
            self.unsent_bytes -= self._in_flight_bytes
            self._in_flight_bytes = 0
            self._seal_records()
        return self._sealed

    def _seal_records(self) -> None:
        """Some records are ready to be sent: small ones, or up to the first that is in the way of the next."""
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
        """So many bytes of what is pending have been sent."""
        while num_bytes:
            gone = min(num_bytes, len(self._sealed[0]))
            num_bytes -= gone
            self._sealed[0] = self._sealed[0][gone:]
            if not self._sealed[0]:
                del self._sealed[0]


def _split_records(pieces: Sequence[memoryview]) -> Iterator[memoryview]:
    """Yield the head, and then the rest in full records and a last one; what lies in one piece is not copied."""
    head, *rest = pieces
    yield head
    gathered = bytearray()
    for piece in rest:
        while piece:
            if not gathered and len(piece) >= RECORD_BYTES:
                yield piece[:RECORD_BYTES]
                piece = piece[RECORD_BYTES:]
                continue
            space = RECORD_BYTES - len(gathered)
            gathered += piece[:space]
            piece = piece[space:]
            if len(gathered) == RECORD_BYTES:
                yield memoryview(gathered)
                gathered = bytearray()
    if gathered:
        yield memoryview(gathered)


class FrameReader:
    """Receives one direction of a connection.

    Args:
        opener: of the session.
        limits: of this side.
        rooms: where tensors will be.
        borrowing: shelves of the other side where they may be as well.
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
        self.control_frames: list[tuple[int, RpcMessage]] = []  # frames that are about shelves, with their sort
        self.is_closed_by_peer = False

    @property
    def is_within_frame(self) -> bool:
        """A frame has begun and not ended."""
        return self._has_begun

    def receive_buffers(self) -> Sequence[memoryview]:
        """Return what to fill with the next bytes that come."""
        return self._to_fill

    def on_bytes(self, num_bytes: int) -> RpcMessage | None:
        """So many bytes have been filled in; return the letter that they complete, if they do.

        Args:
            num_bytes: at most what is wanted.

        Raises:
            ProtocolError: they are not what the peer sealed, or no frame.
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
        """A record is complete."""
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
        """A frame is complete, and the next one is waited for."""
        room, self._buffer, self._header, self._has_begun = self._buffer, ReceiveBuffer(bytearray(), 0), None, False
        letter = decode_body(head, room, self._peer_buffers)
        self._to_fill = list(self._reader.receive(self._raw_header))
        if head.frame_type in {MESSAGE, SHM_PAYLOAD}:
            return letter
        if self._peer_buffers is None:
            raise malformed_frame(f"{letter.kind!r} is about shelves, which a connection of this kind has not")
        self.control_frames.append((head.frame_type, letter))
        return None

    def on_eof(self) -> None:
        """Nothing more comes.

        Raises:
            ProtocolError: a frame is not complete.
        """
        if self._has_begun:
            raise ProtocolError(
                "the connection ended within a frame, nothing of which was believed: look at why the peer ended, or "
                "for somebody in between"
            )


class RpcChannel:
    """A state machine without effects.

    Args:
        greeting: of this side, not begun.
        limits: of this side.
        rooms: where tensors will be.
        shared: what the sides lend each other; None where they share no memory.
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
        self._waiting: list[list[memoryview]] = []  # frames, until it is known how to seal them
        self._waiting_bytes = 0
        self._handshake_out: list[memoryview] = []  # of the greeting, to be sent
        self._handshake_in = bytearray()
        self._handshake_missing = memoryview(b"")
        self._start_handshake_step(next(handshake))

    @property
    def is_open(self) -> bool:
        """The greeting is over: the other side has the key."""
        return self._reader is not None

    @property
    def is_closed_by_peer(self) -> bool:
        """The other side has said goodbye."""
        return self._reader is not None and self._reader.is_closed_by_peer

    @property
    def is_within_frame(self) -> bool:
        """A frame, or a greeting, has begun and not ended."""
        return self._reader is None or self._reader.is_within_frame

    @property
    def unsent_bytes(self) -> int:
        """How much waits for the other side to take it."""
        return self._waiting_bytes + (self._writer.unsent_bytes if self._writer else 0)

    def enqueue(self, message: RpcMessage) -> None:
        """The letter will be sent after those before it; a PeerError where it cannot travel."""
        if self._writer is not None:
            self._enqueue_releases()  # before a question, so that the answer may lie there
        shelf = self._acquire_shared_buffer(message)
        if shelf is None:
            self._enqueue_frame(encode_frame(message, self._limits))
            return
        try:
            self._enqueue_frame(encode_frame(message, self._limits, SHM_PAYLOAD, shelf.number))
        except PeerError:
            shelf.is_free = True
            raise
        shelf.write(message.tensors)

    def _acquire_shared_buffer(self, letter: RpcMessage) -> SharedBuffer | None:
        """Return a shelf that is free, if the letter is large; where none is, one is offered for the next."""
        num_bytes = payload_bytes(letter.tensors)
        if self._shared is None or self._writer is None or num_bytes < MIN_SHARED_BYTES:
            return None
        shelf = self._shared.own.acquire(num_bytes)
        if shelf is None and (made := self._shared.own.create(num_bytes)) is not None:
            fields = {"fd": made.mapping.fd, "number": made.number, "bytes": made.num_bytes}
            self._enqueue_frame(encode_frame(RpcMessage("offer", fields), self._limits, SHM_OFFER))
        return shelf

    def enqueue_close(self) -> None:
        """Nothing will be sent after what has been put before."""
        self._enqueue_frame(close_frame())
        self._is_closing = True

    def _enqueue_frame(self, pieces: list[memoryview]) -> None:
        if self._writer is not None:
            self._writer.enqueue(pieces)
        else:
            self._waiting.append(pieces)
            self._waiting_bytes += sum(map(len, pieces))

    def pending_buffers(self) -> Sequence[memoryview]:
        """Return what to send next."""
        if self._handshake_out or self._writer is None:
            return self._handshake_out
        self._enqueue_releases()
        return self._writer.pending_buffers()

    @property
    def has_releases(self) -> bool:
        """Shelves of the other side are not needed here any more, which it should hear."""
        return self._shared is not None and self._shared.peer.has_released

    def _enqueue_releases(self) -> None:
        if self._shared is not None and not self._is_closing:
            for number in self._shared.peer.take_released():
                self._enqueue_frame(encode_frame(RpcMessage("back", {"number": number}), self._limits, SHM_RELEASE))

    def on_sent(self, num_bytes: int) -> None:
        """So many bytes of what is pending have been sent."""
        if not self._handshake_out and self._writer is not None:
            self._writer.on_sent(num_bytes)
            return
        while num_bytes:
            gone = min(num_bytes, len(self._handshake_out[0]))
            num_bytes -= gone
            self._handshake_out[0] = self._handshake_out[0][gone:]
            if not self._handshake_out[0]:
                del self._handshake_out[0]

    def receive_buffers(self) -> Sequence[memoryview]:
        """Return what to fill with the next bytes that come."""
        return (self._handshake_missing,) if self._reader is None else self._reader.receive_buffers()

    def on_bytes(self, num_bytes: int) -> RpcMessage | None:
        """So many bytes have been filled in; return the letter that they complete, if they do.

        Raises:
            ProtocolError: they are not what may come; the channel must not be used any more, but may still have
                something pending.
        """
        if self._reader is not None:
            letter = self._reader.on_bytes(num_bytes)
            if self._reader.control_frames:
                self._on_control_frame(*self._reader.control_frames.pop())
            return letter
        self._handshake_missing = self._handshake_missing[num_bytes:]
        if not self._handshake_missing:
            self._continue_handshake()
        return None

    def _on_control_frame(self, sort: int, note: RpcMessage) -> None:
        """A shelf has been offered or given back; a ProtocolError where it cannot be."""
        if self._shared is None:
            return
        if sort == SHM_RELEASE:
            self._shared.own.release(*int_fields(note, "number"))
            return
        fd, number, num_bytes = int_fields(note, "fd", "number", "bytes")
        if self._shared.peer.open(fd, number, num_bytes):
            self._enqueue_frame(encode_frame(RpcMessage("back", {"number": number}), self._limits, SHM_RELEASE))

    def close(self) -> None:
        """The channel is not used any more; tensors that came over it stay."""
        if self._shared is not None:
            self._shared.own.close()

    def on_eof(self) -> None:
        """Nothing more comes; a ProtocolError where a frame is not complete."""
        if self._reader is not None:
            self._reader.on_eof()

    def _continue_handshake(self) -> None:
        """The greeting has what it waited for."""
        try:
            turn = self._handshake.send(bytes(self._handshake_in))
            self._start_handshake_step(turn)
            if not turn.num_bytes:
                self._continue_handshake()
        except StopIteration as over:
            self._start_session(over.value)

    def _start_handshake_step(self, turn: HandshakeStep) -> None:
        if turn.send:
            self._handshake_out.append(memoryview(turn.send))
        self._handshake_in = bytearray(turn.num_bytes)
        self._handshake_missing = memoryview(self._handshake_in)

    def _start_session(self, session: SecureSession) -> None:
        self._reader = FrameReader(
            session.reader, self._limits, self._pool, self._shared.peer if self._shared else None
        )
        self._writer = FrameWriter(session.writer, session.final_bytes)
        for pieces in self._waiting:
            self._writer.enqueue(pieces)
        self._waiting, self._waiting_bytes = [], 0
