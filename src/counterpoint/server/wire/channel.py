"""One side of a connection without its socket: bytes in, bytes and letters out, from the greeting to the goodbye."""

from __future__ import annotations

from collections.abc import Sequence

from counterpoint.errors import PeerError
from counterpoint.fabric.frames import payload_bytes
from counterpoint.server.wire.greeting import Greeting, Session, Turn
from counterpoint.server.wire.inbox import Inbox
from counterpoint.server.wire.letter import BACK, LAID, OFFER, Letter, frame_of, goodbye, numbers
from counterpoint.server.wire.limits import Limits
from counterpoint.server.wire.outbox import Outbox
from counterpoint.server.wire.rooms import Rooms
from counterpoint.server.wire.shelves import SHARED_BYTES, Shared, Shelf


class Channel:
    """A state machine without effects.

    Args:
        greeting: of this side, not begun.
        limits: of this side.
        rooms: where tensors will be.
        shared: what the sides lend each other; None where they share no memory.
    """

    def __init__(self, greeting: Greeting, limits: Limits, rooms: Rooms, shared: Shared | None = None) -> None:
        self._greeting = greeting
        self._limits = limits
        self._rooms = rooms
        self._shared = shared
        self._is_leaving = False
        self._inbox: Inbox | None = None
        self._outbox: Outbox | None = None
        self._waiting: list[list[memoryview]] = []  # frames, until it is known how to seal them
        self._waiting_bytes = 0
        self._words: list[memoryview] = []  # of the greeting, to be sent
        self._heard = bytearray()
        self._missing = memoryview(b"")
        self._take_turn(next(greeting))

    @property
    def is_open(self) -> bool:
        """The greeting is over: the other side has the key."""
        return self._inbox is not None

    @property
    def is_over(self) -> bool:
        """The other side has said goodbye."""
        return self._inbox is not None and self._inbox.is_over

    @property
    def is_within_frame(self) -> bool:
        """A frame, or a greeting, has begun and not ended."""
        return self._inbox is None or self._inbox.is_within_frame

    @property
    def unsent_bytes(self) -> int:
        """How much waits for the other side to take it."""
        return self._waiting_bytes + (self._outbox.unsent_bytes if self._outbox else 0)

    def put(self, letter: Letter) -> None:
        """The letter will be sent after those before it; a PeerError where it cannot travel."""
        if self._outbox is not None:
            self._give_back()  # before a question, so that the answer may lie there
        shelf = self._shelf_for(letter)
        if shelf is None:
            self._put(frame_of(letter, self._limits))
            return
        try:
            self._put(frame_of(letter, self._limits, LAID, shelf.number))
        except PeerError:
            shelf.is_free = True
            raise
        shelf.lay_down(letter.tensors)

    def _shelf_for(self, letter: Letter) -> Shelf | None:
        """Return a shelf that is free, if the letter is large; where none is, one is offered for the next."""
        num_bytes = payload_bytes(letter.tensors)
        if self._shared is None or self._outbox is None or num_bytes < SHARED_BYTES:
            return None
        shelf = self._shared.lending.take(num_bytes)
        if shelf is None and (made := self._shared.lending.make(num_bytes)) is not None:
            fields = {"fd": made.mapping.fd, "number": made.number, "bytes": made.num_bytes}
            self._put(frame_of(Letter("offer", fields), self._limits, OFFER))
        return shelf

    def put_goodbye(self) -> None:
        """Nothing will be sent after what has been put before."""
        self._put(goodbye())
        self._is_leaving = True

    def _put(self, pieces: list[memoryview]) -> None:
        if self._outbox is not None:
            self._outbox.put(pieces)
        else:
            self._waiting.append(pieces)
            self._waiting_bytes += sum(map(len, pieces))

    def pending(self) -> Sequence[memoryview]:
        """Return what to send next."""
        if self._words or self._outbox is None:
            return self._words
        self._give_back()
        return self._outbox.pending()

    @property
    def has_returned(self) -> bool:
        """Shelves of the other side are not needed here any more, which it should hear."""
        return self._shared is not None and self._shared.borrowing.has_returned

    def _give_back(self) -> None:
        if self._shared is not None and not self._is_leaving:
            for number in self._shared.borrowing.returned():
                self._put(frame_of(Letter("back", {"number": number}), self._limits, BACK))

    def sent(self, num_bytes: int) -> None:
        """So many bytes of what is pending have been sent."""
        if not self._words and self._outbox is not None:
            self._outbox.sent(num_bytes)
            return
        while num_bytes:
            gone = min(num_bytes, len(self._words[0]))
            num_bytes -= gone
            self._words[0] = self._words[0][gone:]
            if not self._words[0]:
                del self._words[0]

    def wanted(self) -> Sequence[memoryview]:
        """Return what to fill with the next bytes that come."""
        return (self._missing,) if self._inbox is None else self._inbox.wanted()

    def took(self, num_bytes: int) -> Letter | None:
        """So many bytes have been filled in; return the letter that they complete, if they do.

        Raises:
            ProtocolError: they are not what may come; the channel must not be used any more, but may still have
                something pending.
        """
        if self._inbox is not None:
            letter = self._inbox.took(num_bytes)
            if self._inbox.notes:
                self._heed(*self._inbox.notes.pop())
            return letter
        self._missing = self._missing[num_bytes:]
        if not self._missing:
            self._advance()
        return None

    def _heed(self, sort: int, note: Letter) -> None:
        """A shelf has been offered or given back; a ProtocolError where it cannot be."""
        if self._shared is None:
            return
        if sort == BACK:
            self._shared.lending.take_back(*numbers(note, "number"))
            return
        fd, number, num_bytes = numbers(note, "fd", "number", "bytes")
        if self._shared.borrowing.find(fd, number, num_bytes):
            self._put(frame_of(Letter("back", {"number": number}), self._limits, BACK))

    def close(self) -> None:
        """The channel is not used any more; tensors that came over it stay."""
        if self._shared is not None:
            self._shared.lending.close()

    def end(self) -> None:
        """Nothing more comes; a ProtocolError where a frame is not complete."""
        if self._inbox is not None:
            self._inbox.end()

    def _advance(self) -> None:
        """The greeting has what it waited for."""
        try:
            turn = self._greeting.send(bytes(self._heard))
            self._take_turn(turn)
            if not turn.num_bytes:
                self._advance()
        except StopIteration as over:
            self._begin(over.value)

    def _take_turn(self, turn: Turn) -> None:
        if turn.send:
            self._words.append(memoryview(turn.send))
        self._heard = bytearray(turn.num_bytes)
        self._missing = memoryview(self._heard)

    def _begin(self, session: Session) -> None:
        self._inbox = Inbox(session.opener, self._limits, self._rooms, self._shared.borrowing if self._shared else None)
        self._outbox = Outbox(session.sealer, session.last)
        for pieces in self._waiting:
            self._outbox.put(pieces)
        self._waiting, self._waiting_bytes = [], 0
