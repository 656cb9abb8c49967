"""Start and end of each operation as a Chrome trace, for chrome://tracing and ui.perfetto.dev."""

from __future__ import annotations

import json
import time
from pathlib import Path


class HorovodTimeline:
    """A trace file that grows by one line per operation; it can be read at any time.

    Args:
        path: of the file, which is replaced.
        rank: that writes it.
    """

    def __init__(self, path: str | Path, rank: int) -> None:
        self._rank = rank
        self._began = time.perf_counter()
        self._tracks: dict[str, int] = {}
        self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 - it is closed by `close`
        self._file.write("[\n")
        self._write({"name": "process_name", "ph": "M", "args": {"name": f"rank {rank}"}})

    def now_us(self) -> float:
        """Return the time since the start of the timeline."""
        return (time.perf_counter() - self._began) * 1e6

    def record(self, tensor: str, phase: str, since_us: float) -> None:
        """Record that the tensor was in this phase since ``since_us``; every tensor has its own track."""
        if tensor not in self._tracks:
            self._tracks[tensor] = len(self._tracks) + 1
            self._write({"name": "thread_name", "ph": "M", "tid": self._tracks[tensor], "args": {"name": tensor}})
        track = self._tracks[tensor]
        until_us = self.now_us()
        self._write({"name": phase, "ph": "X", "tid": track, "ts": since_us, "dur": until_us - since_us})

    def close(self) -> None:
        """Complete the file."""
        self._file.write("{}]\n")
        self._file.close()

    def _write(self, event: dict[str, object]) -> None:
        self._file.write(json.dumps({"pid": self._rank, **event}) + ",\n")
        self._file.flush()
