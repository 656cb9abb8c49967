"""A thread that writes: logs line by line and states as files, made durable together before anybody is told.

Journals on disk: what every server noted of its shards, and the journals put together from all of them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from counterpoint.errors import CheckpointError, CounterpointError
from counterpoint.ps.actions import AppendJournal, AppendLog, SaveSnapshot
from counterpoint.ps.message_codec import PsMessage
from counterpoint.ps.messages import JournalEntry
from counterpoint.ps.process.disk_layout import (
    log_path,
    log_segments,
    read_records,
    snapshot_path,
    sync_folder,
    write_all,
    write_chunks,
)
from counterpoint.ps.replication import shard_log_name
from counterpoint.ps.server import JournalTracker, ServerNode, fill_gaps
from counterpoint.ps.write_ahead_log import JournalRecord, encode_chunks

THREAD_JOIN_S = 60.0


class WalWriter:
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
        self._changed = threading.Condition()
        self._queue: list[AppendLog | SaveSnapshot] = []
        self._num_enqueued = self._num_done = 0
        self._is_stopping = False
        self._is_healthy = True
        self._files: dict[str, int] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._run, name="counterpoint writer", daemon=True)
        self._thread.start()

    def enqueue(self, request: AppendLog | SaveSnapshot) -> int:
        """It will be written after what was ordered before; returns its number, from 1."""
        with self._changed:
            self._queue.append(request)
            self._num_enqueued += 1
            self._changed.notify()
            return self._num_enqueued

    def flush(self) -> None:
        """What was ordered before is durable, or the writer has failed and said so."""
        with self._changed:
            num_orders = self._num_enqueued
            self._changed.wait_for(lambda: self._num_done >= num_orders or not self._is_healthy, THREAD_JOIN_S)

    def close(self) -> None:
        """What was ordered is durable, and the thread has ended."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        self._thread.join(THREAD_JOIN_S)
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._is_stopping:
                    self._changed.wait()
                orders, self._queue = self._queue, []
            if not orders:
                return
            try:
                self._write(orders)
            except OSError as error:
                with self._changed:
                    self._is_healthy = False
                    self._changed.notify_all()
                self._on_failure(
                    CheckpointError(f"cannot write in {self._folder}: {error.strerror}; free space, or give another")
                )
                return
            with self._changed:
                self._num_done += len(orders)
                self._changed.notify_all()
            orders.clear()  # a shard that is saved need not be kept as it was any longer
            self._on_durable(self._num_done)

    def _write(self, orders: list[AppendLog | SaveSnapshot]) -> None:
        touched: set[str] = set()
        for order in orders:
            if isinstance(order, AppendLog):
                write_all(self._open_log(order.log), encode_chunks(order.record))
                touched.add(order.log)
            else:
                self._save_snapshot(order)
        for log in touched & self._files.keys():  # what stood in others is saved
            os.fdatasync(self._files[log])

    def _save_snapshot(self, save: SaveSnapshot) -> None:
        """The shard is saved; what it has counted stands in no log any more, if it stood in one."""
        log, base = shard_log_name(save.shard), (save.snapshot, save.state.position)
        before = [path for path in self._segment_paths(log) if path.exists()]
        if before:
            log_path(self._folder, log, base).touch()
            sync_folder(self._folder)
        write_chunks(snapshot_path(self._folder, save.snapshot, save.shard), encode_chunks(save.state))
        if log_path(self._folder, log, base) in before:
            return
        if (fd := self._files.pop(log, None)) is not None:
            os.close(fd)
        for path in before:
            path.unlink()

    def _segment_paths(self, log: str) -> list[Path]:
        """Return where logs with this name may be, the one that is written to first."""
        return [log_path(self._folder, log, base) for base in (*log_segments(self._folder, log), None)]

    def _open_log(self, log: str) -> int:
        fd = self._files.get(log)
        if fd is None:
            path = self._segment_paths(log)[0]
            fd = self._files[log] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            sync_folder(self._folder)
        return fd


def journal_folder(folder: Path) -> Path:
    """Return where the journals of a job's folder are."""
    return folder / "journals"


def read_journals(folder: Path, num_shards: int) -> dict[int, list[JournalEntry]]:
    """Return the journal of each shard, as far as it has no gap; see :func:`counterpoint.ps.shard.replay`.

    Args:
        folder: of the job.
        num_shards: of the job.
    """
    found: dict[int, dict[int, JournalEntry]] = {shard: {} for shard in range(num_shards)}
    handed_on: list[JournalRecord] = []
    for path in sorted(journal_folder(folder).glob("*.log")):
        for line in read_records(path)[0]:
            if line.handed_on:
                handed_on.append(line)
            else:
                found[line.shard].setdefault(line.position, line.entry)
    handed_on.sort(key=lambda line: line.transfer_generation)
    for shard, entries in found.items():
        fill_gaps(entries, {line.position: line.entry for line in handed_on if line.shard == shard})
    return {shard: _contiguous_prefix(entries) for shard, entries in found.items()}


def _contiguous_prefix(entries: Mapping[int, JournalEntry]) -> list[JournalEntry]:
    first = min(entries, default=0)
    last = next((at for at in range(first, first + len(entries)) if at not in entries), first + len(entries))
    return [entries[at] for at in range(first, last)]


class JournalWriter:
    """What the lives of one server note.

    Args:
        writer: in the folder of the journals.
    """

    def __init__(self, writer: WalWriter) -> None:
        self._writer = writer
        self._node: ServerNode | None = None
        self._tracker = JournalTracker()

    def start_incarnation(self, node: ServerNode) -> None:
        """Another life begins."""
        self._node, self._tracker = node, JournalTracker()

    def before_message(self, message: PsMessage | None) -> None:
        """The server is about to take in a message."""
        if self._node is not None:
            self._tracker.before_message(self._node, message)

    def append(self, note: AppendJournal) -> None:
        """The server has noted an entry."""
        self._write(note.shard, self._tracker.add(note))

    def after_message(self) -> None:
        """The server has taken in a message, and may lead now what it did not lead before."""
        if self._node is not None:
            for shard, entries in self._tracker.take_promoted(self._node.shard_replicas).items():
                self._write(shard, entries)
            for shard, entries in self._tracker.take_transferred(self._node).items():
                self._write(shard, entries, transfer_generation=self._node.generation)

    def _write(self, shard: int, entries: Mapping[int, JournalEntry], *, transfer_generation: int = 0) -> None:
        if self._node is None:
            return
        log = f"{self._node.name}-{self._node.membership.join_request.token}"
        for position, entry in entries.items():
            self._writer.enqueue(AppendLog(log, JournalRecord(shard, position, entry, transfer_generation)))

    def flush(self) -> None:
        """What was noted so far is on the disk."""
        self._writer.flush()

    def close(self) -> None:
        """What was noted is on the disk."""
        self._writer.close()
