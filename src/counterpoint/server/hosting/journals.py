"""Journals on disk: what every server noted of its shards, and the journals put together from all of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from counterpoint.server.actions import Note, Write
from counterpoint.server.form import Message
from counterpoint.server.hosting.folder import lines_of
from counterpoint.server.hosting.writer import Writer
from counterpoint.server.journal import Notes, fill
from counterpoint.server.lines import Noted
from counterpoint.server.node import Node
from counterpoint.server.states import Entry


def journals_in(folder: Path) -> Path:
    """Return where the journals of a job's folder are."""
    return folder / "journals"


def read_journals(folder: Path, num_shards: int) -> dict[int, list[Entry]]:
    """Return the journal of each shard, as far as it has no gap; see :func:`counterpoint.server.shard.replay`.

    Args:
        folder: of the job.
        num_shards: of the job.
    """
    found: dict[int, dict[int, Entry]] = {shard: {} for shard in range(num_shards)}
    handed_on: list[Noted] = []
    for path in sorted(journals_in(folder).glob("*.log")):
        for line in lines_of(path)[0]:
            if line.handed_on:
                handed_on.append(line)
            else:
                found[line.shard].setdefault(line.position, line.entry)
    handed_on.sort(key=lambda line: line.handed_on)
    for shard, entries in found.items():
        fill(entries, {line.position: line.entry for line in handed_on if line.shard == shard})
    return {shard: _without_gap(entries) for shard, entries in found.items()}


def _without_gap(entries: Mapping[int, Entry]) -> list[Entry]:
    first = min(entries, default=0)
    last = next((at for at in range(first, first + len(entries)) if at not in entries), first + len(entries))
    return [entries[at] for at in range(first, last)]


class Journal:
    """What the lives of one server note.

    Args:
        writer: in the folder of the journals.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._node: Node | None = None
        self._notes = Notes()

    def begin(self, node: Node) -> None:
        """Another life begins."""
        self._node, self._notes = node, Notes()

    def before(self, message: Message | None) -> None:
        """The server is about to take in a message."""
        if self._node is not None:
            self._notes.before(self._node, message)

    def note(self, note: Note) -> None:
        """The server has noted an entry."""
        self._write(note.shard, self._notes.note(note))

    def after(self) -> None:
        """The server has taken in a message, and may lead now what it did not lead before."""
        if self._node is not None:
            for shard, entries in self._notes.promoted(self._node.holdings).items():
                self._write(shard, entries)
            for shard, entries in self._notes.handed_on(self._node).items():
                self._write(shard, entries, handed_on=self._node.generation)

    def _write(self, shard: int, entries: Mapping[int, Entry], *, handed_on: int = 0) -> None:
        if self._node is None:
            return
        log = f"{self._node.name}-{self._node.presence.hello.token}"
        for position, entry in entries.items():
            self._writer.order(Write(log, Noted(shard, position, entry, handed_on)))

    def settle(self) -> None:
        """What was noted so far is on the disk."""
        self._writer.settle()

    def close(self) -> None:
        """What was noted is on the disk."""
        self._writer.close()
