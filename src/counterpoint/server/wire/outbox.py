"""Records out of frames: what to send next; a record is sealed when its turn has come, and no sooner."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from counterpoint.server.wire.records import RECORD_BYTES, SMALL_BYTES, Sealer

BATCH = 16  # records that are sent at once, if they are small or stay where they are


class Outbox:
    """Sends one direction of a connection.

    Args:
        sealer: of the session.
        first: what is to be sent before any record.
    """

    def __init__(self, sealer: Sealer, first: bytes = b"") -> None:
        self._sealer = sealer
        self._frames: deque[Iterator[memoryview]] = deque()
        self._sealed: list[memoryview] = [memoryview(first)] if first else []
        self.unsent_bytes = 0
        self._under_way_bytes = 0

    def put(self, pieces: Sequence[memoryview]) -> None:
        """A frame will be sent after those before it.

        Args:
            pieces: its head and what stands behind it; they must not change before they have been sent.
        """
        self.unsent_bytes += sum(map(len, pieces))
        self._frames.append(_records(pieces))

    def pending(self) -> Sequence[memoryview]:
        """Return what to send next; nothing if everything has been sent."""
        if not self._sealed:
            self.unsent_bytes -= self._under_way_bytes
            self._under_way_bytes = 0
            self._seal_some()
        return self._sealed

    def _seal_some(self) -> None:
        """Some records are ready to be sent: small ones, or up to the first that is in the way of the next."""
        for _ in range(BATCH):
            record = self._next()
            if record is None:
                return
            self._sealed += self._sealer.seal(record)
            self._under_way_bytes += len(record)
            if self._sealer.has_stage and len(record) > SMALL_BYTES:
                return

    def _next(self) -> memoryview | None:
        while self._frames:
            record = next(self._frames[0], None)
            if record is not None:
                return record
            self._frames.popleft()
        return None

    def sent(self, num_bytes: int) -> None:
        """So many bytes of what is pending have been sent."""
        while num_bytes:
            gone = min(num_bytes, len(self._sealed[0]))
            num_bytes -= gone
            self._sealed[0] = self._sealed[0][gone:]
            if not self._sealed[0]:
                del self._sealed[0]


def _records(pieces: Sequence[memoryview]) -> Iterator[memoryview]:
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
