"""Allocation of shared workers to several jobs, as a pure function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from counterpoint.errors import PlanError

UNLIMITED = 1 << 30


@dataclass(frozen=True, slots=True)
class JobDemand:
    """A job that needs workers.

    Args:
        job: its name.
        min_workers: the job does not start with fewer.
        max_workers: it cannot use more.
        weight: a job with twice the weight gets twice the workers.
    """

    job: str
    min_workers: int = 1
    max_workers: int = UNLIMITED
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not (self.job and 0 < self.min_workers <= self.max_workers and self.weight > 0):
            raise PlanError(f"{self} is invalid; give a name, 0 < min_workers <= max_workers, and a weight above 0")


@dataclass(frozen=True, slots=True)
class Reassignment:
    """A worker moves from one job to another.

    Args:
        worker: its name.
        source: job that it leaves; empty if it had none.
        target: job that it joins; empty if no job needs it.
    """

    worker: str
    source: str
    target: str


def fair_shares(demands: Sequence[JobDemand], num_workers: int) -> dict[str, int]:
    """Return the number of workers of each job.

    In order, the jobs get their minimum; then each remaining worker goes to the job with the fewest for its weight.

    Args:
        demands: of the jobs, oldest first.
        num_workers: available workers.

    Example:
        >>> fair_shares([JobDemand("first", max_workers=4), JobDemand("second", max_workers=4)], 6)
        {'first': 3, 'second': 3}
        >>> fair_shares([JobDemand("first", min_workers=4), JobDemand("second", min_workers=4)], 6)
        {'first': 6, 'second': 0}
    """
    shares = {demand.job: 0 for demand in demands}
    num_left = num_workers
    for demand in demands:
        if demand.min_workers <= num_left:
            shares[demand.job] = demand.min_workers
            num_left -= demand.min_workers
    for _ in range(num_left):
        below_maximum = [demand for demand in demands if 0 < shares[demand.job] < demand.max_workers]
        if not below_maximum:
            break
        shares[min(below_maximum, key=lambda demand: shares[demand.job] / demand.weight).job] += 1
    return shares


class WorkerAllocator:
    """Workers and their jobs; a change moves as few workers as possible.

    Args:
        workers: their names.

    Example:
        >>> allocator = WorkerAllocator(["w0", "w1"])
        >>> allocator.add_job(JobDemand("first"))
        [Reassignment(worker='w0', source='', target='first'), Reassignment(worker='w1', source='', target='first')]
        >>> allocator.add_job(JobDemand("second"))
        [Reassignment(worker='w1', source='first', target='second')]
        >>> allocator.remove_job("first")
        [Reassignment(worker='w0', source='first', target='second')]
    """

    def __init__(self, workers: Sequence[str] = ()) -> None:
        self.assignments = dict.fromkeys(workers, "")
        self._demands: list[JobDemand] = []

    @property
    def jobs(self) -> list[str]:
        """Running jobs, in order."""
        return [demand.job for demand in self._demands]

    def add_job(self, demand: JobDemand) -> list[Reassignment]:
        """Add a job; return the reassignments."""
        if demand.job in self.jobs:
            raise PlanError(f"job {demand.job} is already running; remove it first, or give another name")
        self._demands.append(demand)
        return self._rebalance()

    def remove_job(self, job: str) -> list[Reassignment]:
        """Remove a job; return the reassignments."""
        self._demands = [demand for demand in self._demands if demand.job != job]
        return self._rebalance()

    def add_worker(self, worker: str) -> list[Reassignment]:
        """Add a worker; return the reassignments."""
        self.assignments[worker] = ""
        return self._rebalance()

    def remove_worker(self, worker: str) -> list[Reassignment]:
        """Remove a worker; return the reassignments."""
        self.assignments.pop(worker, None)
        return self._rebalance()

    def _rebalance(self) -> list[Reassignment]:
        target_counts = fair_shares(self._demands, len(self.assignments))
        free = [worker for worker, job in self.assignments.items() if job not in target_counts]
        for job, count in target_counts.items():
            free += [worker for worker, current in self.assignments.items() if current == job][count:]
        moves = []
        for job, count in target_counts.items():
            for _ in range(
                count - sum(current == job for worker, current in self.assignments.items() if worker not in free)
            ):
                worker = free.pop(0)
                moves.append(Reassignment(worker, self.assignments[worker], job))
                self.assignments[worker] = job
        for worker in free:
            if self.assignments[worker]:
                moves.append(Reassignment(worker, self.assignments[worker], ""))
                self.assignments[worker] = ""
        return moves
