"""Consistency tracking of one key: counted data slices, worker clocks, and staleness checks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import pairwise
from typing import assert_never

from counterpoint.ps.job_config import Asp, Bsp, Consistency, Ssp
from counterpoint.ps.messages import NO_SLICE, KeyProgress, PushRequest, WorkerClock
from counterpoint.ps.update_rules import invalid_request


class IntervalSet:
    """Set of nearly consecutive integers, stored as maximal ranges.

    Args:
        bounds: ``low, high`` of each range, ascending.

    Example:
        >>> slices = IntervalSet((0, 3))
        >>> slices.add(4)
        >>> 4 in slices, 3 in slices, slices.bounds
        (True, False, [0, 3, 4, 5])
    """

    def __init__(self, bounds: tuple[int, ...] = ()) -> None:
        self.bounds = list(bounds)

    def __contains__(self, number: int) -> bool:
        return bisect_right(self.bounds, number) % 2 == 1

    def add(self, number: int) -> None:
        """Add a number that is not in the set."""
        position = bisect_right(self.bounds, number)
        extends_left = position > 0 and self.bounds[position - 1] == number
        extends_right = position < len(self.bounds) and self.bounds[position] == number + 1
        if extends_left and extends_right:
            del self.bounds[position - 1 : position + 1]
        elif extends_left:
            self.bounds[position - 1] = number + 1
        elif extends_right:
            self.bounds[position] = number
        else:
            self.bounds[position:position] = [number, number + 1]


class ConsistencyTracker:
    """Consistency state of one key.

    Args:
        mode: consistency model.
        progress: state to resume from.
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
        """The state as an immutable value."""
        clocks = tuple(WorkerClock(worker, count) for worker, count in self.clocks.items())
        floors = tuple(number for pair in self.min_clock_history for number in pair)
        return KeyProgress(self.version, tuple(self.applied_slices.bounds), clocks, floors)

    @property
    def min_clock(self) -> int:
        """Minimum clock over the workers in the clock, or the last one if there is none."""
        return self.min_clock_history[-1][1]

    def can_read(self, worker: str, min_version: int) -> bool:
        """Tell whether a worker may read the key now, or has to wait."""
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
        """Tell whether the data slice of a push has already been counted.

        Raises:
            ProtocolError: the push must not be counted: its read version does not exist, or is staler than the mode
                allows.
        """
        if push.read_version > self.version:
            newest = f"where version {self.version} of {push.key} is the newest"
            raise invalid_request(f"a gradient of {worker} computed at version {push.read_version}, {newest}")
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
            raise invalid_request(f"a push of {worker} to {push.key} without a slice index, which bsp needs")
        step = push.slice_index // mode.slices_per_step
        if not is_duplicate and not push.read_version == step == self.version:
            push_text = (
                f"slice {push.slice_index} of step {step} of {push.key}, computed by {worker} "
                f"from version {push.read_version}"
            )
            raise invalid_request(f"staleness: {push_text}, where {self.version} is the newest")

    def _check_clock(self, mode: Ssp, worker: str, push: PushRequest) -> None:
        if worker not in self.clocks:
            raise invalid_request(f"a push of {worker} to {push.key}, but it has not joined the clock")
        clock, min_clock = self.clocks[worker], self._min_clock_at(push.read_version)
        if min_clock is None or min_clock < clock - mode.staleness:
            push_text = f"push {clock + 1} of {worker} to {push.key}, computed from version {push.read_version}"
            seen = (
                "which is too old to check"
                if min_clock is None
                else f"when the slowest worker had pushed {min_clock} times"
            )
            raise invalid_request(f"staleness: {push_text}, {seen}; at least {clock - mode.staleness} are required")

    def _min_clock_at(self, version: int) -> int | None:
        """Return the minimum clock as of a version; None if that is no longer known."""
        position = bisect_right(self.min_clock_history, (version, 1 << 63)) - 1
        return None if position < 0 else self.min_clock_history[position][1]

    def record(self, worker: str, push: PushRequest, *, is_duplicate: bool) -> bool:
        """Count a push; tell whether the key must be updated now.

        Args:
            worker: sender of the push.
            push: the push.
            is_duplicate: result of :meth:`is_duplicate`.
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
        """Return how many slices of the current step have not been pushed; 0 unless bsp."""
        if not isinstance(self.mode, Bsp):
            return 0
        low, high = (self.version * self.mode.slices_per_step, (self.version + 1) * self.mode.slices_per_step)
        ranges = list(pairwise(self.applied_slices.bounds))[::2]
        return high - low - sum(max(0, min(high, stop) - max(low, start)) for start, stop in ranges)

    def join_clock(self, worker: str) -> None:
        """Include a worker in the clock, at the minimum."""
        if isinstance(self.mode, Ssp):
            self.clocks[worker] = self.min_clock

    def leave_clock(self, workers: Iterable[str]) -> None:
        """Exclude workers from the clock; their order makes no difference."""
        for worker in workers:
            self.clocks.pop(worker, None)
        if self.clocks:
            self._record_min_clock()

    def _record_min_clock(self) -> None:
        min_clock = min(self.clocks.values())
        if min_clock == self.min_clock:
            return
        if self.min_clock_history[-1][0] == self.version:
            self.min_clock_history.pop()
        self.min_clock_history.append((self.version, min_clock))
        oldest = min_clock - (self.mode.staleness if isinstance(self.mode, Ssp) else 0)
        while len(self.min_clock_history) > 1 and self.min_clock_history[0][1] < oldest:
            self.min_clock_history.pop(0)
