"""What a loader's worker sends: plain JSON, and tensors in memory that is handed over with it, never copied again.

The memory travels inside the socket as a descriptor, so what a worker has sent can be read after its end, too.
"""

from __future__ import annotations

import json
import mmap
import os
from dataclasses import asdict, dataclass
from math import prod
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import torch
from torch import Tensor

from counterpoint.data.fetch import Fields

ALIGN_BYTES = 64


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker's first parcel: from now on it can be told and asked."""


@dataclass(frozen=True, slots=True)
class Fault:
    """An error of a worker as text, because not every exception can travel.

    Args:
        what: its type and message.
        note: what was added to it, which sample was read for instance.
        trace: its traceback.
    """

    what: str
    note: str
    trace: str


def send(parcel: Ready | Fault | Fields, to: Connection, pid: int) -> None:
    """The parcel is on its way to process ``pid``."""
    match parcel:
        case Ready():
            to.send_bytes(b"{}")
        case Fault():
            to.send_bytes(json.dumps(asdict(parcel)).encode())
        case _:
            _send_fields(parcel, to, pid)


def receive(source: Connection) -> Ready | Fault | Fields:
    """Return the next parcel.

    Raises:
        EOFError: the sender has ended, and all it sent was received.
    """
    content: Any = json.loads(source.recv_bytes())
    if not content:
        return Ready()
    if "what" in content:
        return Fault(**content)
    descriptor = recv_handle(source)
    try:
        memory = mmap.mmap(descriptor, content["num_bytes"])
    finally:
        os.close(descriptor)
    return tuple(_tensor(memory, *entry) for entry in content["fields"])


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
            _tensor(memory, *entry).copy_(field.detach())
        to.send_bytes(json.dumps({"fields": table, "num_bytes": max(num_bytes, ALIGN_BYTES)}).encode())
        send_handle(to, descriptor, pid)
    finally:
        os.close(descriptor)


def _tensor(memory: mmap.mmap, dtype: str, shape: list[int], offset: int) -> Tensor:
    """Return a tensor that lies in the memory and keeps it."""
    kind: torch.dtype = getattr(torch, dtype)
    count = prod(shape)
    if not count:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(memory, dtype=kind, count=count, offset=offset).view(shape)
