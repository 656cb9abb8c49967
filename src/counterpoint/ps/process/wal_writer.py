"""Writer thread for logs and snapshots (group commit), and the journal files that servers keep for replay."""

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
LOG_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # no link, no pipe


class WalWriter:
    """Write log records and snapshots in order, from a thread; one sync makes all that is queued durable.

    Args:
        folder: of the process.
        on_durable: called from the thread with the number of the last durable request.
        on_failure: called from the thread with the error that ends it.
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
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_failure(folder, error) from error
        self._thread = threading.Thread(target=self._run, name="counterpoint writer", daemon=True)
        self._thread.start()

    def enqueue(self, request: AppendLog | SaveSnapshot) -> int:
        """Queue a record or snapshot; return its number, from 1."""
        with self._changed:
            self._queue.append(request)
            self._num_enqueued += 1
            self._changed.notify()
            return self._num_enqueued

    def flush(self) -> None:
        """Wait until everything queued so far is durable, or the writer has failed."""
        with self._changed:
            num_orders = self._num_enqueued
            self._changed.wait_for(lambda: self._num_done >= num_orders or not self._is_healthy, THREAD_JOIN_S)

    def close(self) -> None:
        """Write everything queued, and end the thread."""
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
                self._on_failure(write_failure(self._folder, error))
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
        for log in touched & self._files.keys():  # logs that a snapshot has replaced need no sync
            os.fdatasync(self._files[log])

    def _save_snapshot(self, request: SaveSnapshot) -> None:
        """Save a shard, start a new log segment, and remove the segments before it."""
        log, base = shard_log_name(request.shard), (request.snapshot, request.state.position)
        segments = [path for path in self._segment_paths(log) if path.exists()]
        if segments:
            log_path(self._folder, log, base).touch()
            sync_folder(self._folder)
        write_chunks(snapshot_path(self._folder, request.snapshot, request.shard), encode_chunks(request.state))
        if log_path(self._folder, log, base) in segments:
            return
        if (fd := self._files.pop(log, None)) is not None:
            os.close(fd)
        for path in segments:
            path.unlink()

    def _segment_paths(self, log: str) -> list[Path]:
        """Return the possible segments of a log, the current one first."""
        return [log_path(self._folder, log, base) for base in (*log_segments(self._folder, log), None)]

    def _open_log(self, log: str) -> int:
        fd = self._files.get(log)
        if fd is None:
            path = self._segment_paths(log)[0]
            fd = self._files[log] = os.open(path, LOG_FLAGS, 0o644)
            sync_folder(self._folder)
        return fd


def write_failure(folder: Path, error: OSError) -> CheckpointError:
    """Return the error for a folder of logs that cannot be written."""
    return CheckpointError(f"cannot write to {folder}: {error.strerror}; free space, or use another folder")


def journal_folder(folder: Path) -> Path:
    """Return the folder of a job's journals."""
    return folder / "journals"


def read_journals(folder: Path, num_shards: int) -> dict[int, list[JournalEntry]]:
    """Return the journal of each shard up to its first gap; see :func:`counterpoint.ps.shard.replay_journal`.

    Args:
        folder: of the job.
        num_shards: of the job.
    """
    journals: dict[int, dict[int, JournalEntry]] = {shard: {} for shard in range(num_shards)}
    transferred: list[JournalRecord] = []
    for path in sorted(journal_folder(folder).glob("*.log")):
        for record in read_records(path)[0]:
            if record.transfer_generation:
                transferred.append(record)
            else:
                journals[record.shard].setdefault(record.position, record.entry)
    transferred.sort(key=lambda record: record.transfer_generation)
    for shard, entries in journals.items():
        fill_gaps(entries, {record.position: record.entry for record in transferred if record.shard == shard})
    return {shard: _contiguous_prefix(entries) for shard, entries in journals.items()}


def _contiguous_prefix(entries: Mapping[int, JournalEntry]) -> list[JournalEntry]:
    first = min(entries, default=0)
    last = next(
        (position for position in range(first, first + len(entries)) if position not in entries), first + len(entries)
    )
    return [entries[position] for position in range(first, last)]


class JournalWriter:
    """Write the journal entries that the incarnations of one server see.

    Args:
        writer: in the folder of the journals.
    """

    def __init__(self, writer: WalWriter) -> None:
        self._writer = writer
        self._node: ServerNode | None = None
        self._tracker = JournalTracker()

    def start_incarnation(self, node: ServerNode) -> None:
        """Start a new incarnation."""
        self._node, self._tracker = node, JournalTracker()

    def before_message(self, message: PsMessage | None) -> None:
        """Note that the server is about to process a message."""
        if self._node is not None:
            self._tracker.before_message(self._node, message)

    def append(self, note: AppendJournal) -> None:
        """Record an entry."""
        self._write(note.shard, self._tracker.add(note))

    def after_message(self) -> None:
        """Record entries that are committed because the server became the primary of a shard."""
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
        """Wait until all recorded entries are durable."""
        self._writer.flush()

    def close(self) -> None:
        """Write all recorded entries, and end the writer."""
        self._writer.close()
