"""A disk that tears: what has not become durable when its machine dies is there in part, or not at all."""

from __future__ import annotations

from random import Random


class Disk:
    """Logs by name, as bytes."""

    def __init__(self) -> None:
        self._durable: dict[str, bytearray] = {}
        self._under_way: list[tuple[float, str, bytes]] = []

    def append(self, log: str, raw: bytes, durable_at: float) -> None:
        """The bytes are on their way, and durable at that time."""
        self._under_way.append((durable_at, log, raw))

    def settle(self, now: float) -> None:
        """What is due by now is durable."""
        while self._under_way and self._under_way[0][0] <= now:
            _, log, raw = self._under_way.pop(0)
            self._durable.setdefault(log, bytearray()).extend(raw)

    def crash(self, now: float, random: Random) -> None:
        """Of what was on its way, a beginning of any length is there, the last part of it perhaps as zeros."""
        self.settle(now)
        if self._under_way:
            _, log, _ = self._under_way[0]
            raw = b"".join(raw for _, name, raw in self._under_way if name == log)
            kept = raw[: random.randrange(len(raw) + 1)]
            if kept and random.random() < 0.3:
                zeros = random.randrange(len(kept))
                kept = kept[: len(kept) - zeros] + bytes(zeros)
            self._durable.setdefault(log, bytearray()).extend(kept)
        self._under_way.clear()

    def read(self, log: str) -> bytes:
        """Return what is durable."""
        return bytes(self._durable.get(log, b""))

    def truncate(self, log: str, num_bytes: int) -> None:
        """Only the first bytes of a log are left."""
        del self._durable.setdefault(log, bytearray())[num_bytes:]
