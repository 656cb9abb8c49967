"""When each operation was started and finished, as a Chrome trace: chrome://tracing and ui.perfetto.dev show it."""

from __future__ import annotations

import json
import time
from pathlib import Path


class HorovodTimeline:
    """A file that grows by one line per operation; it can be read at any time.

    Args:
        path: of the file, which is replaced.
        rank: who writes it.
    """

    def __init__(self, path: str | Path, rank: int) -> None:
        self._rank = rank
        self._began = time.perf_counter()
        self._tracks: dict[str, int] = {}
        self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 - it is closed by `close`
        self._file.write("[\n")
        self._write({"name": "process_name", "ph": "M", "args": {"name": f"rank {rank}"}})

    def now_us(self) -> float:
        """Return the time since the timeline was started."""
        return (time.perf_counter() - self._began) * 1e6

    def record(self, tensor: str, phase: str, since_us: float) -> None:
        """The tensor was in this phase from then until now; every tensor has a track of its own."""
        if tensor not in self._tracks:
            self._tracks[tensor] = len(self._tracks) + 1
            self._write({"name": "thread_name", "ph": "M", "tid": self._tracks[tensor], "args": {"name": tensor}})
        track = self._tracks[tensor]
        until_us = self.now_us()
        self._write({"name": phase, "ph": "X", "tid": track, "ts": since_us, "dur": until_us - since_us})

    def close(self) -> None:
        """The file is complete."""
        self._file.write("{}]\n")
        self._file.close()

    def _write(self, event: dict[str, object]) -> None:
        self._file.write(json.dumps({"pid": self._rank, **event}) + ",\n")
        self._file.flush()
