"""Microbatches read ahead by worker processes, in the order of the run and from wherever it begins.

A worker is started by a fork server that has one thread and has never computed, so no lock can be copied in a locked
state, whatever threads the trainer has. It is told places, never samples: which samples those are it finds itself.
Place k of the run is read by worker k modulo the number of workers, so that order and contents do not depend on it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from counterpoint.data.fetch import Fields
from counterpoint.data.microbatch_reader import MicrobatchIndex, MicrobatchReader
from counterpoint.data.worker import STACK_SIGNAL, WorkerError, WorkerPipes, WorkerReady, receive_result, run_worker
from counterpoint.errors import DataError

GRACE_S = 2.0  # from the last order to the kernel's end of a worker that still reads
START_S = 60.0  # the longest that a worker may take to begin: it imports torch and what the dataset needs
STACK_S = 2.0  # how long a worker that hangs has to write its stack
STACK_PAUSE_S = 0.2  # after so much silence it is complete
STACK_BYTES = 65536


@dataclass(slots=True)
class LoaderWorker:
    """One process and our ends of its pipes.

    Args:
        number: of the worker.
        process: it.
        orders: takes places.
        answers: gives fields or faults.
        life: held open as long as it may live.
        stacks: gives what it was doing.
        owed: the places it has been told and not yet answered.
        is_ready: whether it has begun.
    """

    number: int
    process: BaseProcess
    requests: Connection
    results: Connection
    keepalive: Connection
    stacks: Connection
    pending: deque[MicrobatchIndex] = field(default_factory=deque)
    is_ready: bool = False

    def __str__(self) -> str:
        return f"loader worker {self.number} (pid {self.process.pid})"


class MicrobatchLoader:
    """Reads the microbatches of a run ahead; close it.

    Args:
        reading: how a microbatch is read; it is sent to every worker.
        spots: the places to read, in the order in which they will be asked for.
        workers: how many processes.
        prefetch: microbatches that each reads ahead, at most.
        deadline_s: the longest that one microbatch may take.

    Raises:
        DataError: the dataset cannot be sent to another process.
    """

    def __init__(
        self,
        reader: MicrobatchReader,
        indices: Iterator[MicrobatchIndex],
        *,
        num_workers: int,
        prefetch_factor: int,
        deadline_s: float,
    ) -> None:
        self.indices = indices
        self.deadline_s = deadline_s
        self.workers: list[LoaderWorker] = []
        self.next_result_worker = 0  # the worker whose answer comes next
        self.next_request_worker = 0  # the worker that is told next
        self.buffered: dict[MicrobatchIndex, Fields] = {}
        try:
            for number in range(num_workers):
                self.workers.append(start_worker(number, reader))
            for _ in range(num_workers * prefetch_factor):
                self.request_next()
        except BaseException:
            self.close()
            raise

    def get_fields(self, index: MicrobatchIndex) -> Fields:
        """Return the fields of a microbatch, which is asked for once.

        Raises:
            DataError: it could not be read, or its worker ended or is too slow; the message names it.
        """
        while index not in self.buffered:
            found, fields = self.receive_next()
            if any((other.epoch, other.batch) != (found.epoch, found.batch) for other in self.buffered):
                self.buffered.clear()  # of a batch that is over: nobody asked for these
            self.buffered[found] = fields
        return self.buffered.pop(index)

    def request_next(self) -> None:
        """One more place is being read, if one is left."""
        spot = next(self.indices, None)
        if spot is None:
            return
        worker = self.workers[self.next_request_worker]
        self.next_request_worker = (self.next_request_worker + 1) % len(self.workers)
        worker.pending.append(spot)
        with suppress(OSError):  # a worker that has ended is told of when its answer is due
            worker.requests.send(tuple(spot))

    def receive_next(self) -> tuple[MicrobatchIndex, Fields]:
        """Return the next place and its fields, and have one more read."""
        worker = self.workers[self.next_result_worker]
        assert worker.pending, "no more is asked for than was ordered"
        if not worker.is_ready:
            first = wait_for_result(worker, max(START_S, self.deadline_s))
            assert isinstance(first, WorkerReady), "what a worker says first"
            worker.is_ready = True
        answer = wait_for_result(worker, self.deadline_s)
        spot = worker.pending.popleft()
        if isinstance(answer, WorkerError):
            raise DataError(f"{worker} failed {answer.note}: {answer.what}\n{answer.trace}")
        assert not isinstance(answer, WorkerReady), "said once"
        self.next_result_worker = (self.next_result_worker + 1) % len(self.workers)
        self.request_next()
        return spot, answer

    def close(self) -> None:
        """No worker is left, whatever it was doing."""
        for worker in self.workers:
            worker.requests.close()
        for worker in self.workers:
            if not worker.pending:  # what it still reads is for nobody: there is nothing to wait for
                worker.process.join(GRACE_S)
            worker.keepalive.close()
            worker.process.join(GRACE_S)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.process.close()
            worker.results.close()
            worker.stacks.close()
        self.workers.clear()
        self.buffered.clear()


def start_worker(number: int, reader: MicrobatchReader) -> LoaderWorker:
    """Return a worker that waits for its first place."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["counterpoint.data.worker"])  # torch is imported once, not by each
    (orders, tell), (life, hold), (see, stacks) = (context.Pipe(duplex=False) for _ in range(3))
    hear, answers = context.Pipe()  # a socket, because it carries descriptors
    theirs = WorkerPipes(orders, answers, os.getpid(), life, stacks)
    process = context.Process(target=run_worker, args=(reader, theirs), name=f"loader worker {number}", daemon=True)
    try:
        process.start()
    except Exception as error:
        raise DataError(
            f"a {type(reader.dataset).__name__} cannot be sent to a loader's worker: {type(error).__name__}: {error}; "
            "a dataset that other processes read has its class at the top of a file, and no open file, connection, "
            "lambda or generator in it: open those when the first sample is read, or take workers=0"
        ) from error
    finally:
        for end in (orders, answers, life, stacks):
            end.close()
    return LoaderWorker(number, process, tell, hear, hold, see)


def wait_for_result(worker: LoaderWorker, deadline_s: float) -> WorkerReady | WorkerError | Fields:
    """Return what a worker sends next.

    Raises:
        DataError: it has ended, or sends nothing until the deadline.
    """
    if not wait([worker.results, worker.process.sentinel], deadline_s):
        raise hang_error(worker, deadline_s)
    try:
        return receive_result(worker.results)
    except (EOFError, OSError):
        raise exit_error(worker) from None


def exit_error(worker: LoaderWorker) -> DataError:
    """Return what to say of a worker that is gone."""
    worker.process.join(GRACE_S)
    code = worker.process.exitcode
    busy = f"with {worker.pending[0]} to read" if worker.pending else "between two microbatches"
    if code is not None and code < 0:
        how = f"was killed by {signal.Signals(-code).name} {busy}"
        remedy = "if nobody sent it, the kernel ran out of memory: take fewer workers, or a smaller prefetch"
    else:
        how, remedy = f"ended with exit code {code} {busy}", "what it wrote last says why"
        if not worker.is_ready:
            remedy += ": a dataset for workers has its class at the top of a file, and the script that trains has its "
            remedy += "main part under `if __name__ == '__main__':`"
    return DataError(f"{worker} {how}; {remedy}")


def hang_error(worker: LoaderWorker, deadline_s: float) -> DataError:
    """Return what to say of a worker that does not answer, with its stack if it can still tell it."""
    return DataError(
        f"{worker} has not read {worker.pending[0]} within {deadline_s:g} s; a dataset that is this slow needs a longer "
        f"deadline_s, one that waits for ever a limit of its own\n{read_stack(worker)}".rstrip()
    )


def read_stack(worker: LoaderWorker) -> str:
    """Return what a worker is doing, as it says itself; empty where it does not."""
    if worker.process.pid is None or not worker.is_ready:
        return ""
    os.kill(worker.process.pid, STACK_SIGNAL)
    text, patience_s = b"", STACK_S
    while len(text) < STACK_BYTES and worker.stacks.poll(patience_s):  # it comes a few words at a time
        more = os.read(worker.stacks.fileno(), STACK_BYTES)
        if not more:
            break
        text, patience_s = text + more, STACK_PAUSE_S
    return text.decode(errors="replace")


def iter_microbatch_indices(
    reader: MicrobatchReader, first: tuple[int, int], num_batches: int, micros: Sequence[int]
) -> Iterator[MicrobatchIndex]:
    """Yield the places that a process reads in the rest of a run; microbatches without samples are none.

    Args:
        reading: of the run.
        first: epoch and batch to begin with.
        num_batches: how many.
        micros: those that this process reads.
    """
    epoch, batch = first
    for _ in range(num_batches):
        spots = (MicrobatchIndex(epoch, batch, micro) for micro in micros)
        yield from (spot for spot in spots if len(range(*reader.bounds(spot))))
        epoch, batch = (epoch, batch + 1) if batch + 1 < reader.sampler.num_batches else (epoch + 1, 0)
