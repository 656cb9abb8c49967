"""Which worker is at which job, when several jobs share workers: decided here, without effects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from counterpoint.errors import PlanError

MANY = 1 << 30


@dataclass(frozen=True, slots=True)
class Want:
    """A job that wants workers.

    Args:
        job: its name.
        least: with fewer it does not begin, but waits for others to end.
        most: more than so many it cannot use.
        weight: of two jobs the one with twice the weight has twice the workers.
    """

    job: str
    least: int = 1
    most: int = MANY
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not (self.job and 0 < self.least <= self.most and self.weight > 0):
            raise PlanError(f"{self} cannot be meant; give a name, 0 < least <= most, and a weight above 0")


@dataclass(frozen=True, slots=True)
class Move:
    """A worker goes from one job to another.

    Args:
        worker: its name.
        source: the job that it leaves; empty where it had none.
        target: the job that it joins; empty where nobody wants it.
    """

    worker: str
    source: str
    target: str


def shares(wants: Sequence[Want], num_workers: int) -> dict[str, int]:
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
    found = {want.job: 0 for want in wants}
    left = num_workers
    for want in wants:
        if want.least <= left:
            found[want.job] = want.least
            left -= want.least
    for _ in range(left):
        hungry = [want for want in wants if 0 < found[want.job] < want.most]
        if not hungry:
            break
        found[min(hungry, key=lambda want: found[want.job] / want.weight).job] += 1
    return found


class Pool:
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
        self.at = dict.fromkeys(workers, "")
        self._wants: list[Want] = []

    @property
    def jobs(self) -> list[str]:
        """The jobs that have begun and not ended, in their order."""
        return [want.job for want in self._wants]

    def begin(self, want: Want) -> list[Move]:
        """A job wants workers from now on; returns who goes where."""
        if want.job in self.jobs:
            raise PlanError(f"job {want.job} has begun already; end it first, or give another name")
        self._wants.append(want)
        return self._settle()

    def end(self, job: str) -> list[Move]:
        """A job wants no workers any more; returns who goes where."""
        self._wants = [want for want in self._wants if want.job != job]
        return self._settle()

    def enter(self, worker: str) -> list[Move]:
        """There is one worker more; returns who goes where."""
        self.at[worker] = ""
        return self._settle()

    def leave(self, worker: str) -> list[Move]:
        """A worker is taken away; returns who goes where."""
        self.at.pop(worker, None)
        return self._settle()

    def _settle(self) -> list[Move]:
        wanted = shares(self._wants, len(self.at))
        free = [worker for worker, job in self.at.items() if job not in wanted]
        for job, count in wanted.items():
            free += [worker for worker, own in self.at.items() if own == job][count:]
        moves = []
        for job, count in wanted.items():
            for _ in range(count - sum(own == job for worker, own in self.at.items() if worker not in free)):
                worker = free.pop(0)
                moves.append(Move(worker, self.at[worker], job))
                self.at[worker] = job
        for worker in free:
            if self.at[worker]:
                moves.append(Move(worker, self.at[worker], ""))
                self.at[worker] = ""
        return moves
