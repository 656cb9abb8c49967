"""Shared memory of a rank: the control block of its host, and tensors that the host's other ranks can map."""

from __future__ import annotations

import ctypes
import json
import os
import time
from bisect import bisect_right
from collections.abc import Callable
from ctypes import CDLL, c_int32
from dataclasses import dataclass
from functools import lru_cache
from secrets import token_bytes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from counterpoint.errors import PeerError
from counterpoint.fabric.c10d import Store
from counterpoint.fabric.fabric import Group
from counterpoint.fabric.fingerprint import format_ranks
from counterpoint.fabric.gloo.connections import wait_for_keys
from counterpoint.fabric.peer_liveness import PeerProcesses, describe_early_exit, open_peer_processes
from counterpoint.rpc.segments import COOKIE_BYTES, SegmentMapping, allocate_pages, create_segment, open_segment

CHUNK_BYTES = 256 << 10
TENSOR_TAG = 0  # tag of segments for tensors; groups have other tags


@dataclass(frozen=True, slots=True)
class RankContext:
    """What a rank needs to meet the others of its host.

    Args:
        store: the job's.
        rank: the own rank.
        num_ranks: the world size.
        local_ranks: those of this host, the own one included, sorted.
        timeout_s: the longest that it waits for another.
    """

    store: Store
    rank: int
    num_ranks: int
    local_ranks: Group
    timeout_s: float

    def map_host_memory(self, library: CDLL, processes: PeerProcesses) -> SegmentMapping:
        """Return the control block of the host, which its first rank creates and the others map; wait for all of them.

        Raises:
            PeerError: ranks are missing at the timeout, one has ended, or memory is short.
        """
        first, count = self.local_ranks[0], len(self.local_ranks)
        size = library.cp_host_bytes(count)
        if self.rank == first:
            mapping, cookie = create_segment("counterpoint host", size, allocate=False), token_bytes(COOKIE_BYTES)
            library.cp_format_host(mapping.address, count, cookie)
            address = {"pid": os.getpid(), "fd": mapping.fd, "inode": mapping.inode, "cookie": cookie.hex()}
            self.store.set(f"host/{first}", json.dumps(address))
        else:
            self._wait_on_store("host", (first,), processes)
            address = json.loads(self.store.get(f"host/{first}"))
            mapping = self._open(address, size)
            if not library.cp_is_host(mapping.address, count, bytes.fromhex(address["cookie"])):
                raise PeerError(f"rank {self.rank} mapped other memory than rank {first} shares; start the job again")
            self.store.set(f"host/{self.rank}", "opened")
        self._wait_on_store("host", self.local_ranks, processes)
        mapping.close_file()
        return mapping

    def open_processes(self) -> PeerProcesses:
        """Return the processes of this host's ranks.

        Raises:
            PeerError: one has ended already.
        """
        return open_peer_processes(self.store, self.local_ranks, self.rank, self.num_ranks)

    def _open(self, address: dict[str, Any], num_bytes: int) -> SegmentMapping:
        try:
            return open_segment(address["pid"], address["fd"], address["inode"], num_bytes)
        except OSError as error:
            raise PeerError(
                f"rank {self.rank} cannot open the shared memory of process {address['pid']}: "
                f"{(error.strerror or str(error)).lower()}; ranks that share memory run as one user in one container: "
                "look at the output of the rank that ended first, or use transport='gloo'"
            ) from error

    def _wait_on_store(self, place: str, members: Group, processes: PeerProcesses) -> None:
        began = time.monotonic()
        keys = [f"{place}/{member}" for member in members]
        missing = wait_for_keys(self.store, keys, self.timeout_s, lambda: processes.exited_rank() is not None)
        ended = processes.exited_rank()
        if missing and ended is not None:
            raise PeerError(describe_early_exit(ended))
        if missing:
            late = format_ranks([members[index] for index in missing])
            raise PeerError(
                f"rank {self.rank} waited {time.monotonic() - began:.1f} s for {late} to share memory; all ranks must "
                f"arrive within the timeout: look at the output of {late}"
            )


class SegmentHandle(NamedTuple):
    """Where another process maps a tensor.

    Args:
        pid: process that has the segment open.
        fd: its file descriptor.
        inode: of the segment.
        num_bytes: size of the segment.
        offset: of the tensor in the segment.
    """

    pid: int
    fd: int
    inode: int
    num_bytes: int
    offset: int


class SharedTensors:
    """Allocator of tensors that the other ranks of the host can map; freed blocks are reused.

    Args:
        library: the native library.
        host: handle of the host context.
        on_new_segment: called after a new segment was registered: an address may be shared now that was private before.
    """

    def __init__(self, library: CDLL, host: int, on_new_segment: Callable[[], None]) -> None:
        self._library = library
        self._host = host
        self._on_new = on_new_segment
        self._segments: dict[int, SegmentMapping] = {}
        # start of each segment, and its end and number; replaced atomically, because other threads read it
        self._index: tuple[list[int], list[tuple[int, int]]] = ([], [])
        self._free: dict[int, list[tuple[int, SegmentMapping]]] = {}

    def empty(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return a flat uninitialized tensor that collectives need not copy.

        Raises:
            PeerError: there is not enough memory.
        """
        num_bytes = max(num_elements * dtype.itemsize, 1)
        block_bytes = -(-num_bytes // page_size()) * page_size()
        free = self._free.setdefault(block_bytes, [])
        address, mapping = free.pop() if free else self._new(block_bytes)
        buffer = mapped_buffer(address, num_bytes, mapping, free)
        return torch.frombuffer(buffer, dtype=torch.uint8)[: num_elements * dtype.itemsize].view(dtype)

    def zeros(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return a flat zero tensor with all of its pages allocated.

        Raises:
            PeerError: there is not enough memory.
        """
        num_segments = len(self._segments)
        tensor = self.empty(num_elements, dtype)
        if num_elements and len(self._segments) == num_segments:
            handle = self.export_handle(tensor)
            allocate_pages("counterpoint tensors", handle.fd, handle.offset, num_elements * dtype.itemsize)
            tensor.zero_()
        return tensor

    def _new(self, num_bytes: int) -> tuple[int, SegmentMapping]:
        mapping = create_segment("counterpoint tensors", num_bytes, allocate=True)
        number = int(self._library.cp_register_segment(self._host, mapping.fd, num_bytes, TENSOR_TAG))
        if number < 0:
            mapping.close()
            raise PeerError("this rank shares too many tensors; allocate fewer, larger ones")
        self._segments[number] = mapping
        start = mapping.address
        starts, segments = self._index
        index = bisect_right(starts, start)
        segment = (start + num_bytes, number)
        self._index = ([*starts[:index], start, *starts[index:]], [*segments[:index], segment, *segments[index:]])
        self._on_new()
        return start, mapping

    def locate(self, address: int, num_bytes: int) -> tuple[int, int]:
        """Return the segment that contains these bytes, and the offset in it; segment -1 if none does."""
        starts, segments = self._index
        index = bisect_right(starts, address) - 1 if starts else -1
        if index < 0 or address + num_bytes > segments[index][0]:
            return -1, 0
        return segments[index][1], address - starts[index]

    def export_handle(self, tensor: Tensor) -> SegmentHandle:
        """Return where another process maps a tensor of :meth:`empty`."""
        segment, offset = self.locate(tensor.data_ptr(), tensor.numel() * tensor.element_size())
        mapping = self._segments[segment]
        return SegmentHandle(os.getpid(), mapping.fd, mapping.inode, len(mapping.memory), offset)

    def close(self) -> None:
        """Close the files and unmap what no tensor uses; other memory lives for as long as tensors use it."""
        for mapping in self._segments.values():
            mapping.close_file()
        self._segments.clear()
        self._index = ([], [])
        for free in self._free.values():
            free.clear()
        self._free.clear()


def map_tensor(address: Any, num_elements: int, dtype: torch.dtype) -> Tensor:  # noqa: ANN401 - from JSON
    """Return the tensor of another process, from its handle; it stays valid for as long as this process uses it.

    Raises:
        RuntimeError: it is gone.
    """
    handle = SegmentHandle(*address)
    try:
        mapping = open_segment(handle.pid, handle.fd, handle.inode, handle.num_bytes)
    except OSError as error:
        raise RuntimeError(f"memory of process {handle.pid}: {(error.strerror or str(error)).lower()}") from error
    end = handle.offset + num_elements * dtype.itemsize
    return torch.frombuffer(mapping.memory, dtype=torch.uint8)[handle.offset : end].view(dtype)


def page_size() -> int:
    """Return the page size in bytes."""
    return os.sysconf("SC_PAGE_SIZE")


class MappedBuffer:
    """Buffer that keeps its mapping, and returns its block to the free list when no tensor uses it any more."""

    address: int
    mapping: SegmentMapping
    free: list[tuple[int, SegmentMapping]]

    def __del__(self) -> None:
        self.free.append((self.address, self.mapping))


@lru_cache(maxsize=256)
def mapped_buffer_type(num_bytes: int) -> Any:  # noqa: ANN401 - a class of ctypes arrays
    """Return the class of buffers of this size."""
    return type("Loan", (MappedBuffer, ctypes.c_uint8 * num_bytes), {})


def mapped_buffer(address: int, num_bytes: int, mapping: SegmentMapping, free: list[tuple[int, SegmentMapping]]) -> Any:  # noqa: ANN401
    """Return the bytes as a buffer."""
    buffer = mapped_buffer_type(num_bytes).from_address(address)
    buffer.address, buffer.mapping, buffer.free = address, mapping, free
    return buffer


def int_array(values: tuple[int, ...]) -> Any:  # noqa: ANN401 - a ctypes array
    """Return the numbers as a C array."""
    return (c_int32 * len(values))(*values)
