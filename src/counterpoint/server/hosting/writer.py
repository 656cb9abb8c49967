"""A thread that writes: logs line by line and states as files, made durable together before anybody is told."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from counterpoint.errors import CheckpointError, CounterpointError
from counterpoint.server.actions import Save, Write
from counterpoint.server.holding import log_of
from counterpoint.server.hosting.folder import (
    bases_of,
    log_path,
    part_path,
    sync_folder,
    write_all,
    write_pieces,
)
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
        self._num_ordered = self._num_done = 0
        self._is_stopping = False
        self._is_able = True
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

    def settle(self) -> None:
        """What was ordered before is durable, or the writer has failed and said so."""
        with self._fresh:
            num_orders = self._num_ordered
            self._fresh.wait_for(lambda: self._num_done >= num_orders or not self._is_able, JOIN_S)

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
                with self._fresh:
                    self._is_able = False
                    self._fresh.notify_all()
                self._on_failure(
                    CheckpointError(f"cannot write in {self._folder}: {error.strerror}; free space, or give another")
                )
                return
            with self._fresh:
                self._num_done += len(orders)
                self._fresh.notify_all()
            orders.clear()  # a shard that is saved need not be kept as it was any longer
            self._on_durable(self._num_done)

    def _write(self, orders: list[Write | Save]) -> None:
        touched: set[str] = set()
        for order in orders:
            if isinstance(order, Write):
                write_all(self._opened(order.log), pieces(order.line))
                touched.add(order.log)
            else:
                self._save(order)
        for log in touched & self._files.keys():  # what stood in others is saved
            os.fdatasync(self._files[log])

    def _save(self, save: Save) -> None:
        """The shard is saved; what it has counted stands in no log any more, if it stood in one."""
        log, base = log_of(save.shard), (save.cut, save.state.position)
        before = [path for path in self._logs(log) if path.exists()]
        if before:
            log_path(self._folder, log, base).touch()
            sync_folder(self._folder)
        write_pieces(part_path(self._folder, save.cut, save.shard), pieces(save.state))
        if log_path(self._folder, log, base) in before:
            return
        if (fd := self._files.pop(log, None)) is not None:
            os.close(fd)
        for path in before:
            path.unlink()

    def _logs(self, log: str) -> list[Path]:
        """Return where logs with this name may be, the one that is written to first."""
        return [log_path(self._folder, log, base) for base in (*bases_of(self._folder, log), None)]

    def _opened(self, log: str) -> int:
        fd = self._files.get(log)
        if fd is None:
            path = self._logs(log)[0]
            fd = self._files[log] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            sync_folder(self._folder)
        return fd
