"""What a loader's worker sends: plain JSON, and tensors in memory that is handed over with it, never copied again.

The memory travels inside the socket as a descriptor, so what a worker has sent can be read after its end, too.

What runs in a loader's worker process: it reads microbatches when told their place, until nobody asks any more.
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


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker's first parcel: from now on it can be told and asked."""


@dataclass(frozen=True, slots=True)
class WorkerError:
    """An error of a worker as text, because not every exception can travel.

    Args:
        what: its type and message.
        note: what was added to it, which sample was read for instance.
        trace: its traceback.
    """

    what: str
    note: str
    trace: str


def send_result(result: WorkerReady | WorkerError | Fields, to: Connection, pid: int) -> None:
    """The parcel is on its way to process ``pid``."""
    match result:
        case WorkerReady():
            to.send_bytes(b"{}")
        case WorkerError():
            to.send_bytes(json.dumps(asdict(result)).encode())
        case _:
            _send_fields(result, to, pid)


def receive_result(source: Connection) -> WorkerReady | WorkerError | Fields:
    """Return the next parcel.

    Raises:
        EOFError: the sender has ended, and all it sent was received.
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
    """Return a tensor that lies in the memory and keeps it."""
    kind: torch.dtype = getattr(torch, dtype)
    count = prod(shape)
    if not count:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(memory, dtype=kind, count=count, offset=offset).view(shape)


STACK_SIGNAL = signal.SIGUSR1
"""A worker that gets it writes what it is doing."""


@dataclass(frozen=True, slots=True)
class WorkerPipes:
    """A worker's ends of its pipes.

    Args:
        orders: places to read.
        answers: takes parcels: first that it is ready, then fields or faults in the order of the places.
        owner: the process that they are for.
        life: nothing is ever written there; it is closed when its owner ends, however that happens.
        stacks: what it was doing, written when it is asked by a signal.
    """

    requests: Connection
    results: Connection
    owner: int
    keepalive: Connection
    stacks: Connection


def run_worker(reader: MicrobatchReader, pipes: WorkerPipes) -> None:
    """Every place that was ordered has been answered, and nobody orders any more."""
    exit_when_closed(pipes.keepalive)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the trainer as well, which ends its workers
    faulthandler.register(STACK_SIGNAL, file=pipes.stacks.fileno(), all_threads=False)
    torch.set_num_threads(1)
    send_result(WorkerReady(), pipes.results, pipes.owner)
    while True:
        try:
            spot = MicrobatchIndex(*pipes.requests.recv())
        except EOFError:
            return
        send_result(read_or_error(reader, spot), pipes.results, pipes.owner)


def read_or_error(reader: MicrobatchReader, index: MicrobatchIndex) -> Fields | WorkerError:
    """Return the microbatch, or why it cannot be read."""
    try:
        return reader.read(index)
    except Exception as error:  # noqa: BLE001 - whatever the dataset raises, it is told
        note = [f"while reading {index}", *getattr(error, "__notes__", ())][-1]
        return WorkerError(
            f"{type(error).__name__}: {error}", note, "".join(traceback.format_exception(error)).rstrip()
        )


def exit_when_closed(keepalive: Connection) -> None:
    """The kernel ends this process when the other end of the pipe is closed, even while it computes or waits."""
    fcntl.fcntl(keepalive.fileno(), fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(keepalive.fileno(), fcntl.F_SETFL, fcntl.fcntl(keepalive.fileno(), fcntl.F_GETFL) | os.O_ASYNC)
    if keepalive.poll(0):  # it was closed before the line above
        os._exit(1)
