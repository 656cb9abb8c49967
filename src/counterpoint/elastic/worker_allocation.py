"""Which worker is at which job, when several jobs share workers: decided here, without effects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from counterpoint.errors import PlanError

UNLIMITED = 1 << 30


@dataclass(frozen=True, slots=True)
class JobDemand:
    """A job that wants workers.

    Args:
        job: its name.
        least: with fewer it does not begin, but waits for others to end.
        most: more than so many it cannot use.
        weight: of two jobs the one with twice the weight has twice the workers.
    """

    job: str
    min_workers: int = 1
    max_workers: int = UNLIMITED
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not (self.job and 0 < self.min_workers <= self.max_workers and self.weight > 0):
            raise PlanError(f"{self} cannot be meant; give a name, 0 < least <= most, and a weight above 0")


@dataclass(frozen=True, slots=True)
class Reassignment:
    """A worker goes from one job to another.

    Args:
        worker: its name.
        source: the job that it leaves; empty where it had none.
        target: the job that it joins; empty where nobody wants it.
    """

    worker: str
    source: str
    target: str


def fair_shares(demands: Sequence[JobDemand], num_workers: int) -> dict[str, int]:
    """Return how many workers each job has.

    In their order the jobs get the least that they want; then one worker after the other goes to the job that has the
    fewest for its weight.

    Args:
        wants: of the jobs, those that came first before the others.
        num_workers: to be shared out.

    Example:
        >>> shares([Want("first", most=4), Want("second", most=4)], 6)
        {'first': 3, 'second': 3}
        >>> shares([Want("first", least=4), Want("second", least=4)], 6)
        {'first': 6, 'second': 0}
    """
    found = {want.job: 0 for want in demands}
    left = num_workers
    for want in demands:
        if want.min_workers <= left:
            found[want.job] = want.min_workers
            left -= want.min_workers
    for _ in range(left):
        hungry = [want for want in demands if 0 < found[want.job] < want.max_workers]
        if not hungry:
            break
        found[min(hungry, key=lambda want: found[want.job] / want.weight).job] += 1
    return found


class WorkerAllocator:
    """Workers, and the jobs that they are at; a change moves no more of them than it has to.

    Args:
        workers: their names.

    Example:
        >>> pool = Pool(["w0", "w1"])
        >>> pool.begin(Want("first"))
        [Move(worker='w0', source='', target='first'), Move(worker='w1', source='', target='first')]
        >>> pool.begin(Want("second"))
        [Move(worker='w1', source='first', target='second')]
        >>> pool.end("first")
        [Move(worker='w0', source='first', target='second')]
    """

    def __init__(self, workers: Sequence[str] = ()) -> None:
        self.assignments = dict.fromkeys(workers, "")
        self._demands: list[JobDemand] = []

    @property
    def jobs(self) -> list[str]:
        """The jobs that have begun and not ended, in their order."""
        return [want.job for want in self._demands]

    def add_job(self, demand: JobDemand) -> list[Reassignment]:
        """A job wants workers from now on; returns who goes where."""
        if demand.job in self.jobs:
            raise PlanError(f"job {demand.job} has begun already; end it first, or give another name")
        self._demands.append(demand)
        return self._rebalance()

    def remove_job(self, job: str) -> list[Reassignment]:
        """A job wants no workers any more; returns who goes where."""
        self._demands = [want for want in self._demands if want.job != job]
        return self._rebalance()

    def add_worker(self, worker: str) -> list[Reassignment]:
        """There is one worker more; returns who goes where."""
        self.assignments[worker] = ""
        return self._rebalance()

    def remove_worker(self, worker: str) -> list[Reassignment]:
        """A worker is taken away; returns who goes where."""
        self.assignments.pop(worker, None)
        return self._rebalance()

    def _rebalance(self) -> list[Reassignment]:
        wanted = fair_shares(self._demands, len(self.assignments))
        free = [worker for worker, job in self.assignments.items() if job not in wanted]
        for job, count in wanted.items():
            free += [worker for worker, own in self.assignments.items() if own == job][count:]
        moves = []
        for job, count in wanted.items():
            for _ in range(count - sum(own == job for worker, own in self.assignments.items() if worker not in free)):
                worker = free.pop(0)
                moves.append(Reassignment(worker, self.assignments[worker], job))
                self.assignments[worker] = job
        for worker in free:
            if self.assignments[worker]:
                moves.append(Reassignment(worker, self.assignments[worker], ""))
                self.assignments[worker] = ""
        return moves
