"""What ranks write, as whole lines that say who wrote them."""

from __future__ import annotations

import os
import selectors
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

READ_BYTES = 65536
LINE_MAX_BYTES = 65536

Stream = Literal["out", "err"]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a rank's output, without its end."""

    rank: int
    stream: Stream
    text: str


OnLine = Callable[[Line], None]


def write_prefixed(line: Line) -> None:
    """The line stands on our own output or error stream, behind ``[rank N]``."""
    stream = sys.stdout if line.stream == "out" else sys.stderr
    encoding = stream.encoding or "utf-8"
    text = line.text.encode(encoding, "backslashreplace").decode(encoding)
    stream.write(f"[rank {line.rank}] {text}\n")
    stream.flush()


class LineReader:
    """Reads the pipes of all ranks without waiting for any one; owns the descriptors and closes them.

    Not a frozen value: it holds the part of a line that has arrived.
    """

    def __init__(self, on_line: OnLine) -> None:
        self._on_line = on_line
        self._selector = selectors.DefaultSelector()
        self._parts: dict[int, tuple[int, Stream, bytearray]] = {}

    def add(self, descriptor: int, rank: int, stream: Stream) -> None:
        """From now on ``pump`` passes on what is written to this pipe."""
        os.set_blocking(descriptor, False)
        self._selector.register(descriptor, selectors.EVENT_READ)
        self._parts[descriptor] = (rank, stream, bytearray())

    def pump(self, wait_s: float) -> bool:
        """Pass on the lines that arrive within ``wait_s``; return whether anything did."""
        ready = self._selector.select(wait_s)
        for key, _ in ready:
            self._read(key.fd)
        return bool(ready)

    def finish(self, rank: int) -> None:
        """What the ended rank has left in its pipes is passed on, and they are closed, whoever else holds them."""
        for descriptor in [fd for fd, (owner, _, _) in self._parts.items() if owner == rank]:
            while descriptor in self._parts and self._read(descriptor):
                pass
            self._end(descriptor)

    def close(self) -> None:
        """Everything is closed; what was not passed on yet is lost."""
        for descriptor in list(self._parts):
            self._selector.unregister(descriptor)
            os.close(descriptor)
        self._parts.clear()
        self._selector.close()

    def _read(self, descriptor: int) -> bool:
        """Pass on what is there; return whether there may be more."""
        try:
            data = os.read(descriptor, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._end(descriptor)
            return False
        rank, stream, part = self._parts[descriptor]
        *whole, rest = (bytes(part) + data).split(b"\n")
        if len(rest) > LINE_MAX_BYTES:
            whole, rest = [*whole, rest], b""
        part[:] = rest
        for text in whole:
            self._on_line(Line(rank, stream, text.decode(errors="replace").rstrip("\r")))
        return True

    def _end(self, descriptor: int) -> None:
        if descriptor not in self._parts:
            return
        rank, stream, part = self._parts.pop(descriptor)
        self._selector.unregister(descriptor)
        os.close(descriptor)
        if part:
            self._on_line(Line(rank, stream, part.decode(errors="replace")))
