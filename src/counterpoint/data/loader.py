"""Worker processes that prefetch microbatches, in the order of the run and from any position.

Workers are started by a fork server, which has one thread and has never computed, so that no lock can be copied in a
locked state. They get indices, never samples. Request k is read by worker k modulo the number of workers, so that order
and contents do not depend on their number.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any

import numpy as np

from counterpoint.data.microbatch_reader import MicrobatchIndex, MicrobatchReader, SampleReader
from counterpoint.data.sampler import Indices
from counterpoint.data.worker import (
    STACK_SIGNAL,
    Microbatch,
    WorkerError,
    WorkerPipes,
    WorkerReady,
    receive_result,
    run_worker,
)
from counterpoint.errors import DataError

GRACE_S = 2.0  # from the end of requests to the kernel's end of a worker that is still reading
START_S = 60.0  # maximum time to start a worker, which imports torch and the dataset's modules
STACK_S = 2.0  # maximum time until a worker that hangs begins to write its stack
STACK_PAUSE_S = 0.2  # the stack is complete if nothing arrives for this time
STACK_BYTES = 65536


@dataclass(slots=True)
class LoaderWorker:
    """A worker process and the loader's ends of its pipes.

    Args:
        number: index of the worker.
        process: its process.
        requests: indices of microbatches to read.
        results: microbatches or errors.
        close_keepalive: closes what is kept open as long as the worker may run; called at the exit of this process.
        stacks: its stack on request.
        pending: requests without a result yet.
        is_ready: whether it has started.
    """

    number: int
    process: BaseProcess
    requests: Connection
    results: Connection
    close_keepalive: Finalize
    stacks: Connection
    pending: deque[MicrobatchIndex] = field(default_factory=deque)
    is_ready: bool = False

    def __str__(self) -> str:
        return f"loader worker {self.number} (pid {self.process.pid})"


class MicrobatchLoader:
    """Prefetches the microbatches of a run in worker processes; the owner has to close it.

    Args:
        reader: reads a microbatch; its dataset is sent to every worker.
        indices: the microbatches to read, in the order in which they will be requested.
        num_workers: number of processes.
        prefetch_factor: maximum number of microbatches that each worker reads ahead.
        timeout_s: maximum time to read one microbatch.
        init_worker: called in each worker with its number before it reads.

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
        timeout_s: float,
        init_worker: Callable[[int], None] | None = None,
    ) -> None:
        self.reader = reader
        self.indices = indices
        self.timeout_s = timeout_s
        self.workers: list[LoaderWorker] = []
        self.next_result_worker = 0
        self.next_request_worker = 0
        self.buffered: dict[MicrobatchIndex, Any] = {}
        self.last_batch: tuple[tuple[int, int], Indices] = ((-1, -1), np.empty(0, dtype=np.int64))
        try:
            for number in range(num_workers):
                self.workers.append(start_worker(number, reader.sample_reader, init_worker))
            for _ in range(num_workers * prefetch_factor):
                self.request_next()
        except BaseException:
            self.close()
            raise

    def get_samples(self, index: MicrobatchIndex) -> Any:  # noqa: ANN401 - any nest of tensors
        """Return the samples of a microbatch, which can be requested once.

        Raises:
            DataError: it could not be read, or its worker ended or is too slow; the message names it.
        """
        while index not in self.buffered:
            received, samples = self.receive_next()
            if any((other.epoch, other.batch) != (received.epoch, received.batch) for other in self.buffered):
                self.buffered.clear()  # of an earlier batch, whose other microbatches were not used
            self.buffered[received] = samples
        return self.buffered.pop(index)

    def request_next(self) -> None:
        """Request one more microbatch, if one is left."""
        index = next(self.indices, None)
        if index is None:
            return
        worker = self.workers[self.next_request_worker]
        self.next_request_worker = (self.next_request_worker + 1) % len(self.workers)
        worker.pending.append(index)
        with suppress(OSError):  # a worker that has ended is reported when its result is needed
            worker.requests.send((tuple(index), self.sample_indices(index)))

    def sample_indices(self, index: MicrobatchIndex) -> Indices:
        """Return the samples of a microbatch."""
        key = (index.epoch, index.batch)
        if self.last_batch[0] != key:
            self.last_batch = key, self.reader.sampler.batch(*key)
        return self.last_batch[1][slice(*self.reader.bounds(index))]

    def receive_next(self) -> tuple[MicrobatchIndex, Any]:
        """Return the next microbatch and its samples, and request one more."""
        worker = self.workers[self.next_result_worker]
        assert worker.pending, "every result was requested"
        if not worker.is_ready:
            first = wait_for_result(worker, max(START_S, self.timeout_s))
            assert isinstance(first, WorkerReady), "the first message of a worker"
            worker.is_ready = True
        result = wait_for_result(worker, self.timeout_s)
        index = worker.pending.popleft()
        if isinstance(result, WorkerError):
            raise DataError(f"{worker} failed {result.note}: {result.what}\n{result.trace}")
        assert not isinstance(result, WorkerReady), "sent once"
        self.next_result_worker = (self.next_result_worker + 1) % len(self.workers)
        self.request_next()
        return index, result.samples

    def close(self) -> None:
        """End all workers, whatever they are doing."""
        for worker in self.workers:
            worker.requests.close()
        for worker in self.workers:
            if not worker.pending:  # the results of pending requests are not used: such a worker is killed below
                worker.process.join(GRACE_S)
            worker.close_keepalive()
            worker.process.join(GRACE_S)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.process.close()
            worker.results.close()
            worker.stacks.close()
        self.workers.clear()
        self.buffered.clear()


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Keep Ctrl-C from this thread inside, and for good from processes that are started inside.

    Without it the fork server, while it imports torch, would write a traceback of its own.
    """
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def start_worker(number: int, reader: SampleReader, init: Callable[[int], None] | None) -> LoaderWorker:
    """Return a worker that waits for its first request.

    Raises:
        DataError: the dataset cannot be sent to another process.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["counterpoint.data.worker"])  # torch is imported once, not by each
    (requests, send_requests), (keepalive, hold), (read_stacks, stacks) = (context.Pipe(duplex=False) for _ in range(3))
    read_results, results = context.Pipe()  # a socket, because it carries descriptors
    pipes = WorkerPipes(requests, results, os.getpid(), keepalive, stacks)
    process = context.Process(
        target=run_worker, args=(number, reader, init, pipes), name=f"loader worker {number}", daemon=True
    )
    try:
        with without_interrupts():
            forkserver.ensure_running()
        process.start()
    except Exception as error:
        raise DataError(
            f"a {type(reader.dataset).__name__} cannot be sent to a loader's worker: {type(error).__name__}: {error}; "
            "a dataset for workers has its class at the top level of a file, and no open file, connection, lambda or "
            "generator in it, and a collate_fn is not a lambda: open files when the first sample is read, or give "
            "num_workers=0"
        ) from error
    finally:
        for end in (requests, results, keepalive, stacks):
            end.close()
    close_keepalive = Finalize(None, hold.close, exitpriority=1)  # before daemons get SIGTERM, which workers ignore
    return LoaderWorker(number, process, send_requests, read_results, close_keepalive, read_stacks)


def wait_for_result(worker: LoaderWorker, timeout_s: float) -> WorkerReady | WorkerError | Microbatch:
    """Return the next message of a worker.

    Raises:
        DataError: it has ended, or sends nothing within the timeout.
    """
    if not wait([worker.results, worker.process.sentinel], timeout_s):
        raise hang_error(worker, timeout_s)
    try:
        return receive_result(worker.results)
    except (EOFError, OSError):
        raise exit_error(worker) from None


def exit_error(worker: LoaderWorker) -> DataError:
    """Return the error about a worker that has ended."""
    worker.process.join(GRACE_S)
    code = worker.process.exitcode
    state = f"while reading {worker.pending[0]}" if worker.pending else "between two microbatches"
    if code is not None and code < 0:
        fact = f"was killed by {signal.Signals(-code).name} {state}"
        remedy = "unless a user sent it, the kernel ran out of memory: give a smaller num_workers or prefetch_factor"
    else:
        fact, remedy = f"ended with exit code {code} {state}", "see its last output"
        if not worker.is_ready:
            remedy += ": a dataset for workers has its class at the top level of a file, and the training script has "
            remedy += "its main part under `if __name__ == '__main__':`"
    return DataError(f"{worker} {fact}; {remedy}")


def hang_error(worker: LoaderWorker, timeout_s: float) -> DataError:
    """Return the error about a worker that does not answer, with its stack if it can still write it."""
    return DataError(
        f"{worker} has not read {worker.pending[0]} within {timeout_s:g} s; give a longer timeout_s for a slow "
        "dataset, "
        f"or a timeout of its own to one that waits forever\n{read_stack(worker)}".rstrip()
    )


def read_stack(worker: LoaderWorker) -> str:
    """Return the stack that a worker writes on request; empty if it does not."""
    if worker.process.pid is None or not worker.is_ready:
        return ""
    os.kill(worker.process.pid, STACK_SIGNAL)
    text, patience_s = b"", STACK_S
    while len(text) < STACK_BYTES and worker.stacks.poll(patience_s):  # it is written in small parts
        more = os.read(worker.stacks.fileno(), STACK_BYTES)
        if not more:
            break
        text, patience_s = text + more, STACK_PAUSE_S
    return text.decode(errors="replace")


def iter_microbatch_indices(
    reader: MicrobatchReader, first: tuple[int, int], num_batches: int, micros: Sequence[int]
) -> Iterator[MicrobatchIndex]:
    """Yield the microbatches that a process reads in the rest of a run, except those without samples.

    Args:
        reader: of the run.
        first: the first epoch and batch.
        num_batches: number of batches.
        micros: the microbatches of each batch that this process reads.
    """
    epoch, batch = first
    for _ in range(num_batches):
        indices = (MicrobatchIndex(epoch, batch, micro) for micro in micros)
        yield from (index for index in indices if len(range(*reader.bounds(index))))
        epoch, batch = (epoch, batch + 1) if batch + 1 < reader.sampler.num_batches else (epoch + 1, 0)
