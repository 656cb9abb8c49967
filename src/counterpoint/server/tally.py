"""What a key has counted: which portions of data, whose pushes, and whether what was read was new enough."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import pairwise
from typing import assert_never

from counterpoint.server.choices import unmeant
from counterpoint.server.job import Asp, Bsp, Consistency, Ssp
from counterpoint.server.messages import NO_PORTION, Push
from counterpoint.server.states import Clock, Counts


class Runs:
    """A set of numbers that come nearly in order, as runs without a gap.

    Args:
        bounds: ``low, high`` of each run, in order.

    Example:
        >>> runs = Runs((0, 3))
        >>> runs.add(4)
        >>> 4 in runs, 3 in runs, runs.bounds
        (True, False, [0, 3, 4, 5])
    """

    def __init__(self, bounds: tuple[int, ...] = ()) -> None:
        self.bounds = list(bounds)

    def __contains__(self, number: int) -> bool:
        return bisect_right(self.bounds, number) % 2 == 1

    def add(self, number: int) -> None:
        """The number is in the set, in which it was not."""
        place = bisect_right(self.bounds, number)
        follows = place > 0 and self.bounds[place - 1] == number
        leads = place < len(self.bounds) and self.bounds[place] == number + 1
        if follows and leads:
            del self.bounds[place - 1 : place + 1]
        elif follows:
            self.bounds[place - 1] = number + 1
        elif leads:
            self.bounds[place] = number
        else:
            self.bounds[place:place] = [number, number + 1]


class Tally:
    """The counts of one key.

    Args:
        mode: how pushes are counted.
        counts: what has been counted so far.
    """

    def __init__(self, mode: Consistency, counts: Counts | None = None) -> None:
        counts = counts or Counts(0)
        self.mode = mode
        self.version = counts.version
        self.portions = Runs(counts.portions)
        self.clocks = {clock.worker: clock.count for clock in counts.clocks}
        self.floors = list(zip(counts.floors[::2], counts.floors[1::2], strict=True)) or [(0, 0)]

    @property
    def counts(self) -> Counts:
        """All of it, as a value."""
        clocks = tuple(Clock(worker, count) for worker, count in self.clocks.items())
        floors = tuple(number for pair in self.floors for number in pair)
        return Counts(self.version, tuple(self.portions.bounds), clocks, floors)

    @property
    def floor(self) -> int:
        """The slowest clock of those that are in, or were in last."""
        return self.floors[-1][1]

    def may_read(self, worker: str, least: int) -> bool:
        """Tell whether a worker may have the key now, or has to wait."""
        if self.version < least:
            return False
        match self.mode:
            case Bsp() | Asp():
                return True
            case Ssp():
                return self.floor >= self.clocks.get(worker, 0) - self.mode.staleness
            case _:
                assert_never(self.mode)

    def is_known(self, worker: str, push: Push) -> bool:
        """Tell whether the data of a push has been counted.

        Raises:
            ProtocolError: the push must not be counted: it says that it read what does not exist, or it was computed
                from something older than the mode allows.
        """
        if push.read > self.version:
            newest = f"where version {self.version} of {push.key} is the newest"
            raise unmeant(f"a gradient of {worker} at version {push.read}, {newest}")
        is_known = push.portion != NO_PORTION and push.portion in self.portions
        match self.mode:
            case Bsp():
                self._check_step(self.mode, worker, push, is_known=is_known)
            case Ssp():
                self._check_clock(self.mode, worker, push)
            case Asp():
                pass
            case _:
                assert_never(self.mode)
        return is_known

    def _check_step(self, mode: Bsp, worker: str, push: Push, *, is_known: bool) -> None:
        if push.portion == NO_PORTION:
            raise unmeant(f"a push of {worker} to {push.key} without its portion, which bsp counts by")
        step = push.portion // mode.portions
        if not is_known and not push.read == step == self.version:
            found = (
                f"portion {push.portion} of step {step} of {push.key}, computed by {worker} from version {push.read}"
            )
            raise unmeant(f"staleness: {found}, where {self.version} is the newest")

    def _check_clock(self, mode: Ssp, worker: str, push: Push) -> None:
        if worker not in self.clocks:
            raise unmeant(f"a push of {worker} to {push.key}, who has not entered")
        clock, floor = self.clocks[worker], self._floor_at(push.read)
        if floor is None or floor < clock - mode.staleness:
            found = f"push {clock + 1} of {worker} to {push.key}, computed from version {push.read}"
            had = "which is long past" if floor is None else f"to which all workers had pushed {floor} times"
            raise unmeant(f"staleness: {found}, {had}; it must be {clock - mode.staleness} times at least")

    def _floor_at(self, version: int) -> int | None:
        """Return the slowest clock as of a version; None where that is no longer known."""
        place = bisect_right(self.floors, (version, 1 << 63)) - 1
        return None if place < 0 else self.floors[place][1]

    def count(self, worker: str, push: Push, *, is_known: bool) -> bool:
        """The push is counted; tell whether the key has an update to make now.

        Args:
            worker: whose push it is.
            push: what was pushed.
            is_known: what :meth:`is_known` said.
        """
        if push.portion != NO_PORTION and not is_known:
            self.portions.add(push.portion)
        is_due = not is_known
        if isinstance(self.mode, Bsp):
            is_due = is_due and self.lacks() == 0
        self.version += is_due
        if isinstance(self.mode, Ssp):
            self.clocks[worker] += 1
            self._note_floor()
        return is_due

    def lacks(self) -> int:
        """Return how many portions of the step that is under way have not been pushed; 0 where there are no steps."""
        if not isinstance(self.mode, Bsp):
            return 0
        low, high = (self.version * self.mode.portions, (self.version + 1) * self.mode.portions)
        runs = list(pairwise(self.portions.bounds))[::2]
        return high - low - sum(max(0, min(high, stop) - max(low, start)) for start, stop in runs)

    def enter(self, worker: str) -> None:
        """From now on the worker is waited for; its clock is the slowest."""
        if isinstance(self.mode, Ssp):
            self.clocks[worker] = self.floor

    def rest(self, workers: Iterable[str]) -> None:
        """The workers are no longer waited for; in which order they are named makes no difference."""
        for worker in workers:
            self.clocks.pop(worker, None)
        if self.clocks:
            self._note_floor()

    def _note_floor(self) -> None:
        floor = min(self.clocks.values())
        if floor == self.floor:
            return
        if self.floors[-1][0] == self.version:
            self.floors.pop()
        self.floors.append((self.version, floor))
        oldest = floor - (self.mode.staleness if isinstance(self.mode, Ssp) else 0)
        while len(self.floors) > 1 and self.floors[0][1] < oldest:
            self.floors.pop(0)
