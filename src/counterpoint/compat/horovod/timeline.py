"""Start and end of each operation as a Chrome trace, for chrome://tracing and ui.perfetto.dev."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from counterpoint.file_writer import append_whole, encode_text, open_output, unwritable
from counterpoint.terminal_text import warn


class HorovodTimeline:
    """A trace file that grows by one line per operation; it can be read at any time.

    A file that cannot be written any more ends the timeline, with a warning, and not the training.

    Args:
        path: of the file, which is replaced.
        rank: that writes it.

    Raises:
        PlanError: it cannot be opened.
    """

    def __init__(self, path: str | Path, rank: int) -> None:
        self._rank = rank
        self._began = time.perf_counter()
        self._tracks: dict[str, int] = {}
        self._path = Path(path)
        try:
            self._descriptor: int | None = open_output(self._path)
        except OSError as error:
            raise unwritable(self._path, error) from None
        self._append("[\n")
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
        self._append("{}]\n")
        self._end()

    def _write(self, event: dict[str, object]) -> None:
        self._append(json.dumps({"pid": self._rank, **event}) + ",\n")

    def _append(self, text: str) -> None:
        if self._descriptor is None:
            return
        try:
            append_whole(self._descriptor, encode_text(text))
        except OSError as error:
            warn(
                f"the timeline {self._path} ends here: {error.strerror}; training continues",
                RuntimeWarning,
                stacklevel=3,
            )
            self._end()

    def _end(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
