"""What has become part of the shards' journals, put together from what each of their keepers notes."""

from __future__ import annotations

from collections.abc import Mapping

from counterpoint.server.actions import Note
from counterpoint.server.form import Message
from counterpoint.server.holding import Backed, Primary
from counterpoint.server.node import Node
from counterpoint.server.states import Entry, Install


class Notes:
    """What one life of a server has noted: certain entries, and those that are so only if it comes to lead."""

    def __init__(self) -> None:
        self._uncertain: dict[int, dict[int, Entry]] = {}
        self._handed_on: dict[int, int] = {}

    def before(self, node: Node, message: Message | None) -> None:
        """A message is about to be taken in: the state of a shard makes nought of what was noted of it."""
        if isinstance(message, Install):
            held = node.holdings.get(message.shard)
            if isinstance(held, Backed) and not held.is_installed:
                self._uncertain.pop(message.shard, None)

    def note(self, note: Note) -> dict[int, Entry]:
        """Return the entries that are certain now, by position."""
        if note.is_certain:
            return {note.position: note.entry}
        self._uncertain.setdefault(note.shard, {})[note.position] = note.entry
        return {}

    def promoted(self, holdings: Mapping[int, Primary | Backed]) -> dict[int, dict[int, Entry]]:
        """Return the entries, by shard and position, that are certain because this life leads now."""
        leading = [
            shard
            for shard, held in holdings.items()
            if shard in self._uncertain and isinstance(held, Primary) and held.keepers.is_complete
        ]
        return {shard: self._uncertain.pop(shard) for shard in leading}

    def handed_on(self, node: Node) -> dict[int, dict[int, Entry]]:
        """Return the entries, by shard and position, that this life hands on to a new backup; once in a generation.

        The backup gets a state that has them, and will never see them by themselves. If this life dies before it hears
        that the backup is complete, they are certain, and nobody else can say what they were.
        """
        found = {}
        for shard, held in node.holdings.items():
            is_leading = isinstance(held, Primary) and not held.keepers.is_complete
            if is_leading and shard in self._uncertain and self._handed_on.get(shard) != node.generation:
                self._handed_on[shard] = node.generation
                found[shard] = self._uncertain[shard].copy()
        return found


def fill(journal: dict[int, Entry], handed_on: Mapping[int, Entry]) -> None:
    """Positions before the newest entry that nobody was certain of have what was handed on there.

    Args:
        journal: certain entries by position.
        handed_on: what was handed on last, by position; an entry that another one has replaced is not certain.
    """
    newest = max(journal, default=0)
    for position, entry in handed_on.items():
        if position < newest:
            journal.setdefault(position, entry)
