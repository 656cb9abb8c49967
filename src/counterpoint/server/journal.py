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
