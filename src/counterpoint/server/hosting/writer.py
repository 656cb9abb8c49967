"""A thread that writes: logs line by line and states as files, made durable together before anybody is told."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from counterpoint.errors import CheckpointError, CounterpointError
from counterpoint.server.actions import Save, Write
from counterpoint.server.holding import log_of
from counterpoint.server.hosting.folder import cut_before, log_path, part_path, sync_folder, write_all, write_pieces
from counterpoint.server.log import pieces

JOIN_S = 60.0


class Writer:
    """Writes in the order of the orders, and makes durable all that has come meanwhile in one go.

    Args:
        folder: of the process.
        on_durable: called from the writer's thread with the number of the last order that is durable now.
        on_failure: called from it with the error that ends it.
    """

    def __init__(
        self, folder: Path, on_durable: Callable[[int], None], on_failure: Callable[[CounterpointError], None]
    ) -> None:
        self._folder = folder
        self._on_durable, self._on_failure = on_durable, on_failure
        self._fresh = threading.Condition()
        self._orders: list[Write | Save] = []
        self._num_ordered = 0
        self._is_stopping = False
        self._files: dict[str, int] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._run, name="counterpoint writer", daemon=True)
        self._thread.start()

    def order(self, what: Write | Save) -> int:
        """It will be written after what was ordered before; returns its number, from 1."""
        with self._fresh:
            self._orders.append(what)
            self._num_ordered += 1
            self._fresh.notify()
            return self._num_ordered

    def close(self) -> None:
        """What was ordered is durable, and the thread has ended."""
        with self._fresh:
            self._is_stopping = True
            self._fresh.notify()
        self._thread.join(JOIN_S)
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()

    def _run(self) -> None:
        num_done = 0
        while True:
            with self._fresh:
                while not self._orders and not self._is_stopping:
                    self._fresh.wait()
                orders, self._orders = self._orders, []
            if not orders:
                return
            try:
                self._write(orders)
            except OSError as error:
                self._on_failure(
                    CheckpointError(f"cannot write in {self._folder}: {error.strerror}; free space, or give another")
                )
                return
            num_done += len(orders)
            self._on_durable(num_done)

    def _write(self, orders: list[Write | Save]) -> None:
        touched: set[int] = set()
        for order in orders:
            if isinstance(order, Write):
                fd = self._opened(order.log)
                write_all(fd, pieces(order.line))
                touched.add(fd)
            else:
                write_pieces(part_path(self._folder, order.cut, order.shard), pieces(order.state))
                self._go_on_after(order)
        for fd in touched:
            os.fdatasync(fd)

    def _go_on_after(self, save: Save) -> None:
        """What is saved stands in no log any more, if it stood in one."""
        log = log_of(save.shard)
        before = log_path(self._folder, log, cut_before(self._folder, log))
        if log not in self._files and not before.exists():
            return
        if (fd := self._files.pop(log, None)) is not None:
            os.close(fd)
        log_path(self._folder, log, save.cut).touch()
        sync_folder(self._folder)
        before.unlink(missing_ok=True)

    def _opened(self, log: str) -> int:
        fd = self._files.get(log)
        if fd is None:
            path = log_path(self._folder, log, cut_before(self._folder, log))
            fd = self._files[log] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            sync_folder(self._folder)
        return fd
