"""Which minibatches a task has, some of them known before it is their turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from counterpoint.server.working.portions import Minibatch, Portions


@dataclass(frozen=True, slots=True)
class Place:
    """A minibatch, and where in the run it stands.

    Args:
        portion: of the whole run.
        at: which minibatch of the portion.
        minibatch: its samples.
        is_last: whether its portion is complete with it.
    """

    portion: int
    at: int
    minibatch: Minibatch
    is_last: bool


class Reading:
    """The portions of a task, read while those before them are computed.

    Args:
        data: that is read.
        epoch: of the task.
        numbers: of its portions in the epoch.
        ahead: how many minibatches are known before the one that is computed is over.
    """

    def __init__(self, data: Portions, epoch: int, numbers: range, ahead: int) -> None:
        self._data, self._epoch, self._ahead = data, epoch, ahead
        self._unread = iter(numbers)
        self._read: deque[tuple[int, list[Place]]] = deque()
        self._known: deque[Place] = deque()

    def portions(self) -> Iterator[tuple[int, Sequence[Place]]]:
        """Yield each portion of the whole run, and its minibatches that have samples."""
        while self._read or self._read_one():
            portion, places = self._read.popleft()
            yield portion, places

    def ahead_of(self, place: Place) -> list[Place]:
        """Return the minibatches that come after one, which is the next that is computed; none of other tasks."""
        while self._known and self._known[0] is not place:
            self._known.popleft()
        while len(self._known) <= self._ahead and self._read_one():
            pass
        return list(self._known)[1 : 1 + self._ahead]

    def _read_one(self) -> bool:
        """Tell whether there was another portion to be read."""
        number = next(self._unread, None)
        if number is None:
            return False
        found = list(self._data.read(self._epoch, number))
        portion = self._epoch * self._data.num_portions + number
        places = [Place(portion, at, one, at + 1 == len(found)) for at, one in enumerate(found)]
        self._read.append((portion, places))
        self._known += places
        return True
