"""The worker process of a loader, and its messages in shared memory, from which tensors are not copied.

The memory is sent through a socket as a file descriptor, so that results can be read after the worker has ended::

    loader                         worker
      | --- MicrobatchIndex --------> |   requests pipe
      | <-- WorkerReady ------------- |   results socket: first this,
      | <-- fields | WorkerError ---- |   then one result per request, in their order
      | ----------------------------- |   keepalive pipe: its end closes the worker
"""

from __future__ import annotations

import faulthandler
import fcntl
import mmap
import os
import signal
import traceback
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle

import torch

from counterpoint.data.fetch import Fields
from counterpoint.data.microbatch_reader import MicrobatchIndex, MicrobatchReader
from counterpoint.value_codec import decode_value, encode_parts

STACK_SIGNAL = signal.SIGUSR1
"""A worker that gets it writes its stack."""


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker's first message: it waits for requests."""


@dataclass(frozen=True, slots=True)
class WorkerError:
    """An exception of a worker as text, because not every exception can be pickled.

    Args:
        what: its type and message.
        note: its last note, such as the sample that was read.
        trace: its traceback.
    """

    what: str
    note: str
    trace: str


def send_result(result: WorkerReady | WorkerError | Fields, to: Connection, pid: int) -> None:
    """Send a result to process ``pid``."""
    match result:
        case WorkerReady():
            parts = encode_parts(None, "ready")
        case WorkerError():
            parts = encode_parts(asdict(result), "error")
        case _:
            parts = encode_parts(result, "fields")
    descriptor = os.memfd_create("counterpoint-samples")
    try:
        os.ftruncate(descriptor, sum(map(len, parts)))
        memory, start = mmap.mmap(descriptor, 0), 0
        for part in parts:
            memory[start : start + len(part)] = part
            start += len(part)
        send_handle(to, descriptor, pid)
    finally:
        os.close(descriptor)


def receive_result(source: Connection) -> WorkerReady | WorkerError | Fields:
    """Return the next result; its fields are views of the memory, which they keep alive.

    Raises:
        EOFError: the sender has ended, and all its results were received.
    """
    descriptor = recv_handle(source)
    try:
        memory = mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)
    content: Fields | dict[str, str] | None = decode_value(memoryview(memory))
    if content is None:
        return WorkerReady()
    return WorkerError(**content) if isinstance(content, dict) else content


@dataclass(frozen=True, slots=True)
class WorkerPipes:
    """A worker's ends of its pipes.

    Args:
        requests: indices of microbatches to read.
        results: first that the worker is ready, then fields or errors in the order of the requests.
        owner: process id of the loader.
        keepalive: nothing is written to it; its other end is closed when the loader's process ends in any way.
        stacks: the worker's stack, written on :data:`STACK_SIGNAL`.
    """

    requests: Connection
    results: Connection
    owner: int
    keepalive: Connection
    stacks: Connection


def run_worker(reader: MicrobatchReader, pipes: WorkerPipes) -> None:
    """Serve requests until the loader closes the pipe."""
    exit_when_closed(pipes.keepalive)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the trainer as well, which ends its workers
    faulthandler.register(STACK_SIGNAL, file=pipes.stacks.fileno(), all_threads=False)
    torch.set_num_threads(1)
    send_result(WorkerReady(), pipes.results, pipes.owner)
    while True:
        try:
            index = MicrobatchIndex(*pipes.requests.recv())
        except EOFError:
            return
        send_result(read_or_error(reader, index), pipes.results, pipes.owner)


def read_or_error(reader: MicrobatchReader, index: MicrobatchIndex) -> Fields | WorkerError:
    """Return the microbatch, or the error of reading it."""
    try:
        return reader.read(index)
    except Exception as error:  # noqa: BLE001 - any error of the dataset is reported
        note = [f"while reading {index}", *getattr(error, "__notes__", ())][-1]
        return WorkerError(
            f"{type(error).__name__}: {error}", note, "".join(traceback.format_exception(error)).rstrip()
        )


def exit_when_closed(keepalive: Connection) -> None:
    """Have the kernel end this process (SIGIO) when the other end of the pipe is closed, whatever it is doing."""
    fcntl.fcntl(keepalive.fileno(), fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(keepalive.fileno(), fcntl.F_SETFL, fcntl.fcntl(keepalive.fileno(), fcntl.F_GETFL) | os.O_ASYNC)
    if keepalive.poll(0):  # it was closed before the line above
        os._exit(1)
