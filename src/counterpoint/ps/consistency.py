"""What a key has counted: which portions of data, whose pushes, and whether what was read was new enough."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import pairwise
from typing import assert_never

from counterpoint.ps.job_config import Asp, Bsp, Consistency, Ssp
from counterpoint.ps.messages import NO_SLICE, KeyProgress, PushRequest, WorkerClock
from counterpoint.ps.update_rules import invalid_request


class IntervalSet:
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


class ConsistencyTracker:
    """The counts of one key.

    Args:
        mode: how pushes are counted.
        counts: what has been counted so far.
    """

    def __init__(self, mode: Consistency, progress: KeyProgress | None = None) -> None:
        progress = progress or KeyProgress(0)
        self.mode = mode
        self.version = progress.version
        self.applied_slices = IntervalSet(progress.applied_slices)
        self.clocks = {clock.worker: clock.count for clock in progress.clocks}
        self.min_clock_history = list(zip(progress.min_clocks[::2], progress.min_clocks[1::2], strict=True)) or [(0, 0)]

    @property
    def progress(self) -> KeyProgress:
        """All of it, as a value."""
        clocks = tuple(WorkerClock(worker, count) for worker, count in self.clocks.items())
        floors = tuple(number for pair in self.min_clock_history for number in pair)
        return KeyProgress(self.version, tuple(self.applied_slices.bounds), clocks, floors)

    @property
    def min_clock(self) -> int:
        """The slowest clock of those that are in, or were in last."""
        return self.min_clock_history[-1][1]

    def can_read(self, worker: str, min_version: int) -> bool:
        """Tell whether a worker may have the key now, or has to wait."""
        if self.version < min_version:
            return False
        match self.mode:
            case Bsp() | Asp():
                return True
            case Ssp():
                return self.min_clock >= self.clocks.get(worker, 0) - self.mode.staleness
            case _:
                assert_never(self.mode)

    def is_duplicate(self, worker: str, push: PushRequest) -> bool:
        """Tell whether the data of a push has been counted.

        Raises:
            ProtocolError: the push must not be counted: it says that it read what does not exist, or it was computed
                from something older than the mode allows.
        """
        if push.read_version > self.version:
            newest = f"where version {self.version} of {push.key} is the newest"
            raise invalid_request(f"a gradient of {worker} at version {push.read_version}, {newest}")
        is_known = push.slice_index != NO_SLICE and push.slice_index in self.applied_slices
        match self.mode:
            case Bsp():
                self._check_step(self.mode, worker, push, is_duplicate=is_known)
            case Ssp():
                self._check_clock(self.mode, worker, push)
            case Asp():
                pass
            case _:
                assert_never(self.mode)
        return is_known

    def _check_step(self, mode: Bsp, worker: str, push: PushRequest, *, is_duplicate: bool) -> None:
        if push.slice_index == NO_SLICE:
            raise invalid_request(f"a push of {worker} to {push.key} without its portion, which bsp counts by")
        step = push.slice_index // mode.slices_per_step
        if not is_duplicate and not push.read_version == step == self.version:
            found = f"portion {push.slice_index} of step {step} of {push.key}, computed by {worker} from version {push.read_version}"
            raise invalid_request(f"staleness: {found}, where {self.version} is the newest")

    def _check_clock(self, mode: Ssp, worker: str, push: PushRequest) -> None:
        if worker not in self.clocks:
            raise invalid_request(f"a push of {worker} to {push.key}, who has not entered")
        clock, floor = self.clocks[worker], self._min_clock_at(push.read_version)
        if floor is None or floor < clock - mode.staleness:
            found = f"push {clock + 1} of {worker} to {push.key}, computed from version {push.read_version}"
            had = "which is long past" if floor is None else f"to which all workers had pushed {floor} times"
            raise invalid_request(f"staleness: {found}, {had}; it must be {clock - mode.staleness} times at least")

    def _min_clock_at(self, version: int) -> int | None:
        """Return the slowest clock as of a version; None where that is no longer known."""
        place = bisect_right(self.min_clock_history, (version, 1 << 63)) - 1
        return None if place < 0 else self.min_clock_history[place][1]

    def record(self, worker: str, push: PushRequest, *, is_duplicate: bool) -> bool:
        """The push is counted; tell whether the key has an update to make now.

        Args:
            worker: whose push it is.
            push: what was pushed.
            is_known: what :meth:`is_known` said.
        """
        if push.slice_index != NO_SLICE and not is_duplicate:
            self.applied_slices.add(push.slice_index)
        is_due = not is_duplicate
        if isinstance(self.mode, Bsp):
            is_due = is_due and self.num_missing() == 0
        self.version += is_due
        if isinstance(self.mode, Ssp):
            self.clocks[worker] += 1
            self._record_min_clock()
        return is_due

    def num_missing(self) -> int:
        """Return how many portions of the step that is under way have not been pushed; 0 where there are no steps."""
        if not isinstance(self.mode, Bsp):
            return 0
        low, high = (self.version * self.mode.slices_per_step, (self.version + 1) * self.mode.slices_per_step)
        runs = list(pairwise(self.applied_slices.bounds))[::2]
        return high - low - sum(max(0, min(high, stop) - max(low, start)) for start, stop in runs)

    def join_clock(self, worker: str) -> None:
        """From now on the worker is waited for; its clock is the slowest."""
        if isinstance(self.mode, Ssp):
            self.clocks[worker] = self.min_clock

    def leave_clock(self, workers: Iterable[str]) -> None:
        """The workers are no longer waited for; in which order they are named makes no difference."""
        for worker in workers:
            self.clocks.pop(worker, None)
        if self.clocks:
            self._record_min_clock()

    def _record_min_clock(self) -> None:
        floor = min(self.clocks.values())
        if floor == self.min_clock:
            return
        if self.min_clock_history[-1][0] == self.version:
            self.min_clock_history.pop()
        self.min_clock_history.append((self.version, floor))
        oldest = floor - (self.mode.staleness if isinstance(self.mode, Ssp) else 0)
        while len(self.min_clock_history) > 1 and self.min_clock_history[0][1] < oldest:
            self.min_clock_history.pop(0)
