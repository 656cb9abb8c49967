"""The worker process of a loader, and its messages: JSON, and tensors in shared memory that is never copied.

The memory is sent through the socket as a file descriptor, so that results can be read after the worker has ended::

    loader                         worker
      | --- MicrobatchIndex --------> |   requests pipe
      | <-- WorkerReady ------------- |   results socket: first this,
      | <-- fields | WorkerError ---- |   then one result per request, in their order
      | ----------------------------- |   keepalive pipe: its end closes the worker
"""

from __future__ import annotations

import faulthandler
import fcntl
import json
import mmap
import os
import signal
import traceback
from dataclasses import asdict, dataclass
from math import prod
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import torch
from torch import Tensor

from counterpoint.data.fetch import Fields
from counterpoint.data.microbatch_reader import MicrobatchIndex, MicrobatchReader

ALIGN_BYTES = 64
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
            to.send_bytes(b"{}")
        case WorkerError():
            to.send_bytes(json.dumps(asdict(result)).encode())
        case _:
            _send_fields(result, to, pid)


def receive_result(source: Connection) -> WorkerReady | WorkerError | Fields:
    """Return the next result.

    Raises:
        EOFError: the sender has ended, and all its results were received.
    """
    content: Any = json.loads(source.recv_bytes())
    if not content:
        return WorkerReady()
    if "what" in content:
        return WorkerError(**content)
    descriptor = recv_handle(source)
    try:
        memory = mmap.mmap(descriptor, content["num_bytes"])
    finally:
        os.close(descriptor)
    return tuple(_map_tensor(memory, *entry) for entry in content["fields"])


def _send_fields(fields: Fields, to: Connection, pid: int) -> None:
    table: list[tuple[str, list[int], int]] = []
    num_bytes = 0
    for field in fields:
        table.append((str(field.dtype).removeprefix("torch."), list(field.shape), num_bytes))
        num_bytes += -(-field.numel() * field.element_size() // ALIGN_BYTES) * ALIGN_BYTES
    descriptor = os.memfd_create("counterpoint-samples")
    try:
        os.ftruncate(descriptor, max(num_bytes, ALIGN_BYTES))
        memory = mmap.mmap(descriptor, max(num_bytes, ALIGN_BYTES))
        for field, entry in zip(fields, table, strict=True):
            _map_tensor(memory, *entry).copy_(field.detach())
        to.send_bytes(json.dumps({"fields": table, "num_bytes": max(num_bytes, ALIGN_BYTES)}).encode())
        send_handle(to, descriptor, pid)
    finally:
        os.close(descriptor)


def _map_tensor(memory: mmap.mmap, dtype: str, shape: list[int], offset: int) -> Tensor:
    """Return a tensor that is a view of the memory and keeps it alive."""
    torch_dtype: torch.dtype = getattr(torch, dtype)
    count = prod(shape)
    if not count:
        return torch.empty(shape, dtype=torch_dtype)
    return torch.frombuffer(memory, dtype=torch_dtype, count=count, offset=offset).view(shape)


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
