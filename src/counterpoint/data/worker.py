"""The worker process of a loader, and its messages in shared memory, from which tensors are not copied.

The memory is sent through a socket as a file descriptor, so that results can be read after the worker has ended::

    loader                         worker
      | --- index, sample indices --> |   requests pipe
      | <-- WorkerReady ------------- |   results socket: first this,
      | <-- Microbatch | WorkerError  |   then one result per request, in their order
      | ----------------------------- |   keepalive pipe: its end closes the worker
"""

from __future__ import annotations

import faulthandler
import fcntl
import mmap
import os
import signal
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import torch

from counterpoint.data.microbatch_reader import MicrobatchIndex, SampleReader
from counterpoint.errors import DataError, error_text
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


@dataclass(frozen=True, slots=True)
class Microbatch:
    """The samples of a microbatch, as the dataset and collate_fn make them."""

    samples: Any


def send_result(result: WorkerReady | WorkerError | Microbatch, to: Connection, pid: int) -> None:
    """Send a result to process ``pid``."""
    match result:
        case WorkerReady():
            parts = encode_parts(None, "ready")
        case WorkerError():
            parts = encode_parts(asdict(result), "error")
        case Microbatch(samples):
            parts = encode_parts([require_plain_nest(samples)], "a batch of a loader's worker")
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


def receive_result(source: Connection) -> WorkerReady | WorkerError | Microbatch:
    """Return the next result; its tensors are views of the memory, which they keep alive.

    Raises:
        EOFError: the sender has ended, and all its results were received.
    """
    descriptor = recv_handle(source)
    try:
        memory = mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)
    content: list[Any] | dict[str, str] | None = decode_value(memoryview(memory))
    if content is None:
        return WorkerReady()
    return WorkerError(**content) if isinstance(content, dict) else Microbatch(content[0])


def require_plain_nest(samples: Any) -> Any:  # noqa: ANN401 - any nest
    """Return samples, with mappings as dicts, if they can be sent as they are.

    Raises:
        DataError: they contain a dataclass or a named tuple, whose type a message does not have.
    """
    if isinstance(samples, Mapping):
        return {key: require_plain_nest(value) for key, value in samples.items()}
    if isinstance(samples, list | tuple) and type(samples) in {list, tuple}:
        return type(samples)(map(require_plain_nest, samples))
    if is_dataclass(samples) or isinstance(samples, tuple):
        raise DataError(
            f"a loader's worker cannot send a {type(samples).__name__}, because messages have only dicts, lists and "
            "tuples of tensors; return one of these from the dataset or collate_fn, or give num_workers=0"
        )
    return samples


@dataclass(frozen=True, slots=True)
class WorkerPipes:
    """A worker's ends of its pipes.

    Args:
        requests: indices of microbatches to read.
        results: first that the worker is ready, then microbatches or errors in the order of the requests.
        owner: process id of the loader.
        keepalive: nothing is written to it; its other end is closed when the loader's process ends in any way.
        stacks: the worker's stack, written on :data:`STACK_SIGNAL`.
    """

    requests: Connection
    results: Connection
    owner: int
    keepalive: Connection
    stacks: Connection


def run_worker(number: int, reader: SampleReader, init: Callable[[int], None] | None, pipes: WorkerPipes) -> None:
    """Serve requests until the loader closes the pipe.

    Args:
        number: of the worker.
        reader: reads samples.
        init: called with the number first.
        pipes: its ends of the pipes.
    """
    exit_when_closed(pipes.keepalive)
    for number in (signal.SIGINT, signal.SIGTERM):  # the trainer gets them as well, and ends its workers
        signal.signal(number, signal.SIG_IGN)
    faulthandler.register(STACK_SIGNAL, file=pipes.stacks.fileno(), all_threads=False)
    torch.set_num_threads(1)
    if init is not None:
        init(number)
    send_result(WorkerReady(), pipes.results, pipes.owner)
    while True:
        try:
            index, samples = pipes.requests.recv()
        except EOFError:
            return
        index = MicrobatchIndex(*index)
        try:
            send_result(Microbatch(reader.read(index.epoch, samples)), pipes.results, pipes.owner)
        except Exception as error:  # noqa: BLE001 - any error of the dataset is reported
            send_result(describe_error(error, index), pipes.results, pipes.owner)


def describe_error(error: Exception, index: MicrobatchIndex) -> WorkerError:
    """Return an error of reading a microbatch as text."""
    note = [f"while reading {index}", *getattr(error, "__notes__", ())][-1]
    return WorkerError(
        f"{type(error).__name__}: {error_text(error)}", str(note), "".join(traceback.format_exception(error)).rstrip()
    )


def exit_when_closed(keepalive: Connection) -> None:
    """Have the kernel end this process (SIGIO) when the other end of the pipe is closed, whatever it is doing."""
    fcntl.fcntl(keepalive.fileno(), fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(keepalive.fileno(), fcntl.F_SETFL, fcntl.fcntl(keepalive.fileno(), fcntl.F_GETFL) | os.O_ASYNC)
    if keepalive.poll(0):  # it was closed before the line above
        os._exit(1)
