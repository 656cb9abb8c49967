"""What was seen of a simulated run: journals, answers, owners; and what about it cannot be."""

from __future__ import annotations

from dataclasses import dataclass, field

from counterpoint.server.messages import Members, Pulled, Pushed
from counterpoint.server.states import Entry, ShardState


def name_of(entry: Entry) -> tuple[object, ...]:
    """Return what tells an entry from every other."""
    if isinstance(entry, Members):
        return ("members", entry.generation)
    return (entry.origin.member, entry.origin.incarnation, entry.origin.sequence)


@dataclass(slots=True)
class History:
    """A run as an onlooker sees it who knows everything.

    Attributes:
        journals: for each shard, its entries by position.
        acknowledged: pushes of which a worker has been told that they are counted, by shard and name.
        owners: for each shard and generation, the lives of servers that answered as the first.
        cuts: for each cut and shard, what was saved, and what the queue had done by then.
        violations: what cannot be.
    """

    journals: dict[int, dict[int, Entry]] = field(default_factory=dict)
    acknowledged: dict[tuple[int, tuple[object, ...]], Pushed] = field(default_factory=dict)
    owners: dict[tuple[int, int], set[tuple[str, int]]] = field(default_factory=dict)
    cuts: dict[tuple[int, int], ShardState] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    _uncertain: dict[tuple[str, int, int], dict[int, Entry]] = field(default_factory=dict)

    def note(self, shard: int, position: int, entry: Entry) -> None:
        """This is the entry of the journal with this position."""
        known = self.journals.setdefault(shard, {}).setdefault(position, entry)
        if name_of(known) != name_of(entry):
            self.violations.append(
                f"entry {position} of shard {shard} is {name_of(known)} and {name_of(entry)}: two servers went on apart"
            )

    def note_uncertain(self, life: tuple[str, int], shard: int, position: int, entry: Entry) -> None:
        """A backup has this entry."""
        self._uncertain.setdefault((*life, shard), {})[position] = entry

    def promote(self, life: tuple[str, int], shard: int) -> None:
        """The backup is the first now, and what it has is the journal."""
        found = self._uncertain.pop((*life, shard), None)
        if found:
            for position, entry in found.items():
                self.note(shard, position, entry)

    def inherit(self, life: tuple[str, int], shard: int, source: tuple[str, int], position: int) -> None:
        """The backup has been given its primary's state as of a position, and what is uncertain in that."""
        found = self._uncertain.get((*source, shard), {})
        self._uncertain[*life, shard] = {at: entry for at, entry in found.items() if at < position}

    def uncertain(self, life: tuple[str, int], shard: int) -> dict[int, Entry]:
        """Return what this life has of the shard and is not certain of."""
        return self._uncertain.get((*life, shard), {})

    def answer(self, life: tuple[str, int], shard: int, generation: int) -> None:
        """A server answers as the first keeper of a shard, in a generation."""
        owners = self.owners.setdefault((shard, generation), set())
        owners.add(life)
        if len(owners) == 2:
            self.violations.append(f"shard {shard} has two owners in generation {generation}: {sorted(owners)}")

    def acknowledge(self, worker: tuple[str, int], answer: Pushed | Pulled) -> None:
        """A worker has been told that its push is counted."""
        if isinstance(answer, Pushed):
            self.acknowledged[answer.shard, (*worker, answer.sequence)] = answer
