"""Pool of worker processes on this host that elastic jobs share: workers move between jobs as jobs start and end."""

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
"""From the job's name, the worker's, and whether to stop, to whether all data of the job has been processed."""

GRACE_S = 10.0
MAX_DEATHS = 3


@dataclass(slots=True)
class PooledWorker:
    """One worker process.

    Attributes:
        process: which.
        pipe: our end of its pipe.
        num_deaths: how often it has ended unexpectedly.
        assignments: jobs that were assigned and not yet left, by number.
        num_assignments: of all so far.
    """

    process: BaseProcess
    pipe: Connection
    num_deaths: int = 0
    assignments: dict[int, str] = field(default_factory=dict)
    num_assignments: int = 0


class WorkerPool:
    """Worker processes, and the jobs that they work for; close it.

    A worker that is assigned to another job finishes its minibatch, returns its task, and joins that job in the same
    process, without new imports. One that dies is started again: ``worker-0.1`` after ``worker-0``.

    Args:
        num_workers: number of processes.
        work: works for a job; an importable function at the top level of a module.

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
        our_end, worker_end = context.Pipe()
        process = context.Process(target=worker_main, args=(self._work, name, worker_end), name=name, daemon=True)
        try:
            process.start()
        except Exception as error:
            our_end.close()
            raise LaunchError(
                f"{name} could not be started: {type(error).__name__}: {error}; what a pool does is a function at the "
                "top of a file"
            ) from error
        finally:
            worker_end.close()
        return process, our_end

    @property
    def current_jobs(self) -> dict[str, str]:
        """The job of each worker; empty if it has none."""
        return dict(self._pool.assignments)

    def add_job(self, demand: JobDemand) -> list[Reassignment]:
        """Start to assign workers to a job; return the moves."""
        return self._assign_all(self._pool.add_job(demand))

    def remove_job(self, job: str) -> list[Reassignment]:
        """Stop to assign workers to a job, complete or not; return the moves."""
        return self._assign_all(self._pool.remove_job(job))

    def _assign_all(self, moves: Iterable[Reassignment]) -> list[Reassignment]:
        ordered = list(moves)
        for move in ordered:
            self._assign(move.worker, move.target)
        return ordered

    def _assign(self, worker: str, job: str) -> None:
        pooled = self._workers[worker]
        pooled.assignments[pooled.num_assignments] = job
        with suppress(OSError):  # a dead worker is detected at the next receive
            pooled.pipe.send((pooled.num_assignments, job))
        pooled.num_assignments += 1

    def wait(self, timeout_s: float) -> str:
        """Return the next job that is complete and that all workers have left; its servers can be stopped.

        Args:
            timeout_s: the longest that this lasts.

        Raises:
            LaunchError: there is no job, none completes in time, or a worker dies repeatedly.
        """
        end_s = monotonic() + timeout_s
        while self._pool.jobs or self._complete:
            for job in self._complete:
                if not any(job in worker.assignments.values() for worker in self._workers.values()):
                    self._complete.remove(job)
                    return job
            workers_by_pipe = {worker.pipe: name for name, worker in self._workers.items()}
            ready = wait(list(workers_by_pipe), max(0.0, end_s - monotonic()))
            if not ready:
                raise self._timeout_error(timeout_s)
            for pipe in ready:
                assert isinstance(pipe, Connection)
                self._receive(workers_by_pipe[pipe])
        raise LaunchError("there is no job to wait for; call add_job(JobDemand(...)) first")

    def _timeout_error(self, timeout_s: float) -> LaunchError:
        if self._complete:
            job = self._complete[0]
            names = [name for name, worker in self._workers.items() if job in worker.assignments.values()]
            return LaunchError(
                f"job {job} is complete, but {', '.join(names)} had not left it after {timeout_s:g} s; give more time, "
                "or check what they do when they should stop"
            )
        return LaunchError(
            f"none of the jobs {', '.join(self._pool.jobs)} is complete after {timeout_s:g} s; give more time, or "
            "check what their workers do"
        )

    def _receive(self, name: str) -> None:
        """Handle the end of an assignment, or of a worker."""
        worker = self._workers[name]
        try:
            number, job, is_complete = worker.pipe.recv()
        except (EOFError, OSError):
            self._replace(name)
            return
        worker.assignments = {
            assigned: assigned_job for assigned, assigned_job in worker.assignments.items() if assigned > number
        }
        if is_complete and job in self._pool.jobs:
            self._complete.append(job)
            self.remove_job(job)

    def _replace(self, name: str) -> None:
        worker = self._workers[name]
        worker.process.join(GRACE_S)
        worker.num_deaths += 1
        if worker.num_deaths > MAX_DEATHS:
            raise LaunchError(
                f"{name} has ended {worker.num_deaths} times, the last time with exit code {worker.process.exitcode} "
                "at "
                f"job {self._pool.assignments[name] or 'none'}; its last output shows the cause"
            )
        worker.pipe.close()
        worker.assignments.clear()
        worker.process, worker.pipe = self._start(
            f"{name}.{worker.num_deaths}"
        )  # a new name: jobs may not know yet that the former died
        self._assign(name, self._pool.assignments[name])

    def close(self) -> None:
        """End all worker processes."""
        for name in self._workers:
            self._assign(name, "")
        for worker in self._workers.values():
            worker.pipe.close()
        for worker in self._workers.values():
            worker.process.join(GRACE_S)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.process.close()
        self._workers.clear()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def worker_main(job_function: JobFunction, worker: str, connection: Connection) -> None:
    """Work for one assigned job after the other, until the pool closes the pipe."""
    with suppress(EOFError, ConnectionError):
        while True:
            number, job = connection.recv()
            while connection.poll():
                connection.send((number, job, False))  # superseded
                number, job = connection.recv()
            connection.send((number, job, bool(job) and _run_job(job_function, job, worker, connection)))


def _run_job(job_function: JobFunction, job: str, worker: str, connection: Connection) -> bool:
    """Return whether the job is complete; an exception ends the process, and is reported at its exit."""
    try:
        return job_function(job, worker, connection.poll)
    except (EOFError, ConnectionError) as error:
        raise LaunchError(f"{worker} failed at job {job}: {type(error).__name__}: {error}") from error
