"""Frames out of records: what to fill next, and the letters that are complete; no sockets in here."""

from __future__ import annotations

from collections.abc import Sequence

from counterpoint.errors import ProtocolError
from counterpoint.server.wire.letter import GOODBYE, HEAD, LAID, LETTER, Head, Letter, malformed, read_head, read_letter
from counterpoint.server.wire.limits import Limits
from counterpoint.server.wire.records import RECORD_BYTES, Opener
from counterpoint.server.wire.rooms import Room, Rooms
from counterpoint.server.wire.shelves import Borrowing


class Inbox:
    """Receives one direction of a connection.

    Args:
        opener: of the session.
        limits: of this side.
        rooms: where tensors will be.
        borrowing: shelves of the other side where they may be as well.
    """

    def __init__(self, opener: Opener, limits: Limits, rooms: Rooms, borrowing: Borrowing | None = None) -> None:
        self._opener = opener
        self._limits = limits
        self._rooms = rooms
        self._raw_head = memoryview(bytearray(HEAD.size))
        self._head: Head | None = None
        self._room = Room(bytearray(), 0)
        self._num_opened = 0  # bytes of the body
        self._wanted = list(opener.receive(self._raw_head))
        self._is_begun = False
        self._borrowing = borrowing
        self.notes: list[tuple[int, Letter]] = []  # frames that are about shelves, with their sort
        self.is_over = False

    @property
    def is_within_frame(self) -> bool:
        """A frame has begun and not ended."""
        return self._is_begun

    def wanted(self) -> Sequence[memoryview]:
        """Return what to fill with the next bytes that come."""
        return self._wanted

    def took(self, num_bytes: int) -> Letter | None:
        """So many bytes have been filled in; return the letter that they complete, if they do.

        Args:
            num_bytes: at most what is wanted.

        Raises:
            ProtocolError: they are not what the peer sealed, or no frame.
        """
        self._is_begun = self._is_begun or num_bytes > 0
        while num_bytes:
            filled = min(num_bytes, len(self._wanted[0]))
            num_bytes -= filled
            self._wanted[0] = self._wanted[0][filled:]
            if not self._wanted[0]:
                del self._wanted[0]
        return None if self._wanted else self._opened()

    def _opened(self) -> Letter | None:
        """A record is complete."""
        self._opener.open()
        if self._head is None:
            head = read_head(self._raw_head, self._limits)
            if head.sort == GOODBYE:
                self._is_begun, self.is_over = False, True
                return None
            self._head, self._num_opened = head, 0
            self._room = self._rooms.take(head.body_bytes)
        else:
            self._num_opened = min(self._num_opened + RECORD_BYTES, self._head.body_bytes)
        if self._num_opened < self._head.body_bytes:
            end = min(self._num_opened + RECORD_BYTES, self._head.body_bytes)
            self._wanted = list(self._opener.receive(self._room.memory[self._num_opened : end]))
            return None
        return self._completed(self._head)

    def _completed(self, head: Head) -> Letter | None:
        """A frame is complete, and the next one is waited for."""
        room, self._room, self._head, self._is_begun = self._room, Room(bytearray(), 0), None, False
        letter = read_letter(head, room, self._borrowing)
        self._wanted = list(self._opener.receive(self._raw_head))
        if head.sort in {LETTER, LAID}:
            return letter
        if self._borrowing is None:
            raise malformed(f"{letter.kind!r} is about shelves, which a connection of this kind has not")
        self.notes.append((head.sort, letter))
        return None

    def end(self) -> None:
        """Nothing more comes.

        Raises:
            ProtocolError: a frame is not complete.
        """
        if self._is_begun:
            raise ProtocolError(
                "the connection ended within a frame, nothing of which was believed: look at why the peer ended, or "
                "for somebody in between"
            )
