"""Worker processes of this host that elastic jobs share: they go from one job to another as jobs begin and end."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from time import monotonic
from typing import TypeAlias

from counterpoint.elastic.worker_allocation import JobDemand, Reassignment, WorkerAllocator
from counterpoint.errors import LaunchError

ShouldStop: TypeAlias = Callable[[], bool]
JobFunction: TypeAlias = Callable[[str, str, ShouldStop], bool]
"""From a job's name, the worker's and what tells it to go to whether all data of the job is counted."""

GRACE_S = 10.0
MAX_DEATHS = 3


@dataclass(slots=True)
class PooledWorker:
    """One worker process.

    Attributes:
        process: which.
        pipe: our end of its pipe.
        num_deaths: how often it has ended without being told to.
        orders: the jobs that it was told to go to and may still be at, by the number of the order.
        num_orders: of all so far.
    """

    process: BaseProcess
    pipe: Connection
    num_deaths: int = 0
    assignments: dict[int, str] = field(default_factory=dict)
    num_assignments: int = 0


class WorkerPool:
    """Worker processes, and the jobs that they are at; close it.

    A worker that is wanted elsewhere finishes its minibatch, gives its task back, and joins the other job; the process
    stays, so nothing is imported or started again. One that dies is started again: ``worker-0.1`` after ``worker-0``.

    Args:
        num_workers: processes.
        work: works for a job; its function stands at the top of a file, for every process imports it.

    Raises:
        LaunchError: a process cannot be started.
    """

    def __init__(self, num_workers: int, job_function: JobFunction) -> None:
        self._work = job_function
        self._pool = WorkerAllocator()
        self._workers: dict[str, PooledWorker] = {}
        self._complete: list[str] = []
        try:
            for index in range(num_workers):
                name = f"worker-{index}"
                self._workers[name] = PooledWorker(*self._start(name))
                self._pool.add_worker(name)
        except BaseException:
            self.close()
            raise

    def _start(self, name: str) -> tuple[BaseProcess, Connection]:
        context = multiprocessing.get_context("forkserver")
        ours, theirs = context.Pipe()
        process = context.Process(target=worker_main, args=(self._work, name, theirs), name=name, daemon=True)
        try:
            process.start()
        except Exception as error:
            ours.close()
            raise LaunchError(
                f"{name} could not be started: {type(error).__name__}: {error}; what a pool does is a function at the "
                "top of a file"
            ) from error
        finally:
            theirs.close()
        return process, ours

    @property
    def current_jobs(self) -> dict[str, str]:
        """The job of each worker; empty where it has none."""
        return dict(self._pool.assignments)

    def add_job(self, demand: JobDemand) -> list[Reassignment]:
        """A job gets workers from now on; returns who goes where."""
        return self._assign_all(self._pool.add_job(demand))

    def remove_job(self, job: str) -> list[Reassignment]:
        """A job gets no workers any more, whether it is complete or not; returns who goes where."""
        return self._assign_all(self._pool.remove_job(job))

    def _assign_all(self, moves: Iterable[Reassignment]) -> list[Reassignment]:
        ordered = list(moves)
        for move in ordered:
            self._assign(move.worker, move.target)
        return ordered

    def _assign(self, worker: str, job: str) -> None:
        hand = self._workers[worker]
        hand.assignments[hand.num_assignments] = job
        with suppress(OSError):  # if it has died, that is seen when it is next listened to
            hand.pipe.send((hand.num_assignments, job))
        hand.num_assignments += 1

    def wait(self, timeout_s: float) -> str:
        """Return the job that is complete next; its workers have gone to the others, and none is at it any more.

        So its servers may be stopped now.

        Args:
            deadline_s: the longest that this lasts.

        Raises:
            LaunchError: no job has begun, none is complete in time, or a worker dies again and again.
        """
        end_s = monotonic() + timeout_s
        while self._pool.jobs or self._complete:
            for job in self._complete:
                if not any(job in hand.assignments.values() for hand in self._workers.values()):
                    self._complete.remove(job)
                    return job
            sources = {hand.pipe: name for name, hand in self._workers.items()}
            found = wait(list(sources), max(0.0, end_s - monotonic()))
            if not found:
                raise self._timeout_error(timeout_s)
            for pipe in found:
                assert isinstance(pipe, Connection)
                self._receive(sources[pipe])
        raise LaunchError("no job has begun that could be complete; call begin(Want(...)) first")

    def _timeout_error(self, timeout_s: float) -> LaunchError:
        if self._complete:
            job = self._complete[0]
            at = [name for name, hand in self._workers.items() if job in hand.assignments.values()]
            return LaunchError(
                f"job {job} is complete, but {', '.join(at)} had not left it after {timeout_s:g} s; give more time, "
                "or look at what they do when they are to go"
            )
        return LaunchError(
            f"none of the jobs {', '.join(self._pool.jobs)} is complete after {timeout_s:g} s; give more time, or "
            "look at what their workers do"
        )

    def _receive(self, name: str) -> None:
        """A worker has ended what it was told to do, or itself."""
        hand = self._workers[name]
        try:
            number, job, is_complete = hand.pipe.recv()
        except (EOFError, OSError):
            self._replace(name)
            return
        hand.assignments = {at: ordered for at, ordered in hand.assignments.items() if at > number}
        if is_complete and job in self._pool.jobs:
            self._complete.append(job)
            self.remove_job(job)

    def _replace(self, name: str) -> None:
        hand = self._workers[name]
        hand.process.join(GRACE_S)
        hand.num_deaths += 1
        if hand.num_deaths > MAX_DEATHS:
            raise LaunchError(
                f"{name} has ended {hand.num_deaths} times, the last time with exit code {hand.process.exitcode} at "
                f"job {self._pool.assignments[name] or 'none'}; what it wrote last says why"
            )
        hand.pipe.close()
        hand.assignments.clear()
        hand.process, hand.pipe = self._start(f"{name}.{hand.num_deaths}")  # jobs may not know yet that the other died
        self._assign(name, self._pool.assignments[name])

    def close(self) -> None:
        """No worker process is left."""
        for name in self._workers:
            self._assign(name, "")
        for hand in self._workers.values():
            hand.pipe.close()
        for hand in self._workers.values():
            hand.process.join(GRACE_S)
            if hand.process.is_alive():
                hand.process.kill()
                hand.process.join()
            hand.process.close()
        self._workers.clear()

    def __enter__(self) -> WorkerPool:
        """Use the pool in a ``with`` block, which closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def worker_main(job_function: JobFunction, worker: str, connection: Connection) -> None:
    """Work for one job after the other, as one is told, until nobody is there any more to tell."""
    with suppress(EOFError, ConnectionError):
        while True:
            number, job = connection.recv()
            while connection.poll():
                connection.send((number, job, False))  # passed over
                number, job = connection.recv()
            connection.send((number, job, bool(job) and _run_job(job_function, job, worker, connection)))


def _run_job(job_function: JobFunction, job: str, worker: str, connection: Connection) -> bool:
    """Return whether a job is complete; whatever its work raises ends the process, and is told as it ends."""
    try:
        return job_function(job, worker, connection.poll)
    except (EOFError, ConnectionError) as error:
        raise LaunchError(f"{worker} failed at job {job}: {type(error).__name__}: {error}") from error
