"""Consistency of parameter servers: which pushes count, when an update is due, and who may read.

Every key of a server has a :class:`ConsistencyTracker`: on the shards of an elastic job (:mod:`counterpoint.ps.shard`),
and in the server loop of the strategy ``server(n)`` (:mod:`counterpoint.runtime.comm.server_loop`)::

    push --check_push--> stale or invalid: ProtocolError, nothing changes
           |
           is_duplicate--> the slice has been counted: only the worker's clock advances
           |
           record--> asp, ssp: update now;  bsp: update when all slices of the step have been pushed
    pull --can_read--> asp: now;  ssp: once the slowest worker is near enough;  bsp: once the step's version is there

Nothing here has tensors, so that the simulator predicts with the same rules.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Literal, TypeAlias, assert_never, get_args

from msgspec import Struct

from counterpoint.errors import PlanError, ProtocolError

NO_SLICE = -1
"""In place of the index of a data slice: the push is applied, but a second push of its data would not be noticed."""


class Bsp(Struct, frozen=True, forbid_unknown_fields=True, tag=str.lower):
    """Bulk-synchronous: one update of a key sums a fixed number of data slices in slice order, from any worker."""

    slices_per_step: int

    def __post_init__(self) -> None:
        if self.slices_per_step < 1:
            raise PlanError(
                f"bsp with {self.slices_per_step} data slices per step has no updates; give slices_per_step=1 or more"
            )


class Ssp(Struct, frozen=True, forbid_unknown_fields=True, tag=str.lower):
    """Stale-synchronous: a worker's reads are at most ``staleness`` of its pushes ahead of the slowest worker's.

    Source:
        Ho et al., More effective distributed ML via a stale synchronous parallel parameter server, NIPS 2013.
    """

    staleness: int

    def __post_init__(self) -> None:
        if self.staleness < 0:
            raise PlanError(f"ssp with staleness {self.staleness}; give 0 or more")


class Asp(Struct, frozen=True, forbid_unknown_fields=True, tag=str.lower):
    """Asynchronous: every push is an update of its own, and no worker waits."""


Consistency: TypeAlias = Bsp | Ssp | Asp
ConsistencyName: TypeAlias = Literal["bsp", "ssp", "asp"]


def parse_consistency(name: str, *, staleness: int, slices_per_step: int) -> Consistency:
    """Return the consistency that the options of ``server(n)`` or of ``ElasticTrainer`` name.

    Args:
        name: the option ``consistency``.
        staleness: with ssp, by how many pushes a worker may be ahead of the slowest; 0 otherwise.
        slices_per_step: with bsp, how many pushes make an update.

    Raises:
        PlanError: there is no such consistency, or it has no bound.

    Example:
        >>> parse_consistency("ssp", staleness=2, slices_per_step=4)
        Ssp(staleness=2)
    """
    if name not in get_args(ConsistencyName):
        old = re.fullmatch(r"(bsp|ssp)\((\d+)\)", str(name))
        hint = ""
        if old is not None:
            number = "slices_per_step" if old[1] == "bsp" else "staleness"
            hint = f"; {name} is now written consistency={old[1]}, {number}={old[2]}"
        raise PlanError(f"there is no consistency={name}; give bsp, ssp or asp{hint}")
    if staleness < 0 or (staleness and name != "ssp"):
        raise PlanError(
            f"staleness={staleness} with consistency={name}: staleness is a bound of ssp, 0 or more; give "
            "consistency=ssp, staleness=1, for example"
        )
    if name == "bsp":
        return Bsp(slices_per_step)
    return Ssp(staleness) if name == "ssp" else Asp()


def allows_lead(staleness: int | None, num_pushes: int) -> bool:
    """Tell whether a worker may read, given by how many pushes it is ahead of the slowest one.

    Args:
        staleness: the bound of ssp; None for asp, which has none.
        num_pushes: by which the worker is ahead.
    """
    return staleness is None or num_pushes <= staleness


def find_step(consistency: Consistency, slice_index: int) -> tuple[int, int]:
    """Return the step of a data slice, and the one after it; 0 and 0 if there are no steps.

    Example:
        >>> find_step(Bsp(4), 9)
        (2, 3)
    """
    if not isinstance(consistency, Bsp):
        return 0, 0
    step = slice_index // consistency.slices_per_step
    return step, step + 1


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

    def __init__(self, bounds: Sequence[int] = ()) -> None:
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
    """Consistency state of one key: its version, the data slices counted, and the clocks of workers (ssp).

    A worker's clock is the number of its pushes to the key.

    Args:
        consistency: of the job.
        key: name, for errors.
        version: number of updates so far.
        applied_slices: data slices counted, as ``low, high`` of maximal ranges, ascending.
        clocks: of the workers in the clock.
        min_clocks: the minimum clock from a version on, as pairs ``(version, minimum)``, ascending.
    """

    def __init__(
        self,
        consistency: Consistency,
        key: str,
        *,
        version: int = 0,
        applied_slices: Sequence[int] = (),
        clocks: Mapping[str, int] | None = None,
        min_clocks: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.consistency, self.key = consistency, key
        self.version = version
        self.applied_slices = IntervalSet(applied_slices)
        self.clocks = dict(clocks or {})
        self.min_clocks = list(min_clocks) or [(0, 0)]

    @property
    def min_clock(self) -> int:
        """Minimum clock over the workers in the clock, or the last one if there is none."""
        return self.min_clocks[-1][1]

    def can_read(self, worker: str, min_version: int = 0) -> bool:
        """Tell whether a worker may read the key now, or has to wait."""
        if self.version < min_version:
            return False
        if not isinstance(self.consistency, Ssp):
            return True
        return allows_lead(self.consistency.staleness, self.clocks.get(worker, 0) - self.min_clock)

    def is_duplicate(self, slice_index: int) -> bool:
        """Tell whether a data slice has already been counted."""
        return slice_index in self.applied_slices

    def check_push(self, worker: str, read_version: int, slice_index: int = NO_SLICE) -> None:
        """Check that a push may be counted.

        Args:
            worker: sender of the push.
            read_version: version of the key from which the gradient was computed.
            slice_index: data slice of the gradient.

        Raises:
            ProtocolError: that version does not exist, or is staler than the consistency allows; or the push lacks what
                the consistency needs.
        """
        if read_version > self.version:
            raise ProtocolError(
                f"a gradient of {worker} computed at version {read_version}, where version {self.version} of "
                f"{self.key} is the newest"
            )
        match self.consistency:
            case Bsp():
                self._check_step(self.consistency, worker, read_version, slice_index)
            case Ssp():
                self._check_clock(self.consistency, worker, read_version)
            case Asp():
                pass
            case _:
                assert_never(self.consistency)

    def _check_step(self, bsp: Bsp, worker: str, read_version: int, slice_index: int) -> None:
        if slice_index == NO_SLICE:
            raise ProtocolError(f"a push of {worker} to {self.key} without a slice index, which bsp needs")
        step, _ = find_step(bsp, slice_index)
        if not self.is_duplicate(slice_index) and not read_version == step == self.version:
            raise ProtocolError(
                f"staleness: slice {slice_index} of step {step} of {self.key}, computed by {worker} from version "
                f"{read_version}, where {self.version} is the newest"
            )

    def _check_clock(self, ssp: Ssp, worker: str, read_version: int) -> None:
        if worker not in self.clocks:
            raise ProtocolError(f"a push of {worker} to {self.key}, but it has not joined the clock")
        clock, min_clock = self.clocks[worker], self._min_clock_at(read_version)
        if min_clock is None or not allows_lead(ssp.staleness, clock - min_clock):
            slowest = min(self.clocks, key=lambda other: self.clocks[other])
            seen = (
                "which is too old to check"
                if min_clock is None
                else f"when the slowest worker had pushed {min_clock} times"
            )
            raise ProtocolError(
                f"staleness: push {clock + 1} of {worker} to {self.key}, computed from version {read_version}, {seen}; "
                f"at least {clock - ssp.staleness} are required, and {slowest} has pushed {self.clocks[slowest]} times"
            )

    def _min_clock_at(self, version: int) -> int | None:
        """Return the minimum clock as of a version; None if that is no longer known."""
        position = bisect_right(self.min_clocks, (version, 1 << 63)) - 1
        return None if position < 0 else self.min_clocks[position][1]

    def record(self, worker: str, slice_index: int = NO_SLICE, *, is_counted: bool = True) -> bool:
        """Record a push; tell whether the key must be updated now.

        Args:
            worker: sender of the push.
            slice_index: data slice of the push.
            is_counted: whether it contributes to an update: False for a duplicate, and for a push without data.
        """
        if is_counted and slice_index != NO_SLICE:
            self.applied_slices.add(slice_index)
        is_due = is_counted and self.num_missing() == 0
        self.version += is_due
        if isinstance(self.consistency, Ssp):
            self.clocks[worker] += 1
            self._record_min_clock()
        return is_due

    def num_missing(self) -> int:
        """Return how many slices of the current step have not been pushed; 0 unless bsp."""
        if not isinstance(self.consistency, Bsp):
            return 0
        num_slices = self.consistency.slices_per_step
        low, high = self.version * num_slices, (self.version + 1) * num_slices
        ranges = list(pairwise(self.applied_slices.bounds))[::2]
        return num_slices - sum(max(0, min(high, stop) - max(low, start)) for start, stop in ranges)

    def join_clock(self, worker: str) -> None:
        """Include a worker in the clock, at the minimum."""
        if isinstance(self.consistency, Ssp):
            self.clocks[worker] = self.min_clock

    def leave_clock(self, workers: Iterable[str]) -> None:
        """Exclude workers from the clock; their order makes no difference."""
        for worker in workers:
            self.clocks.pop(worker, None)
        if self.clocks:
            self._record_min_clock()

    def restart_clocks(self) -> None:
        """Set all clocks to zero, so that the workers begin together."""
        self.clocks = dict.fromkeys(self.clocks, 0)
        self.min_clocks = [(self.version, 0)]

    def _record_min_clock(self) -> None:
        min_clock = min(self.clocks.values())
        if min_clock == self.min_clock:
            return
        if self.min_clocks[-1][0] == self.version:
            self.min_clocks.pop()
        self.min_clocks.append((self.version, min_clock))
        oldest = min_clock - (self.consistency.staleness if isinstance(self.consistency, Ssp) else 0)
        while len(self.min_clocks) > 1 and self.min_clocks[0][1] < oldest:
            self.min_clocks.pop(0)
